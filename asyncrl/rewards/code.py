"""Code judged by unit tests, in the sandbox.

The output of an answer is compared outside the sandbox, so the answer never sees the expected output. Only
`tests`, which are code themselves, run in the sandbox with it.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.isolation.sandbox.base import ISOLATION, RunEnding, RunResult, SandboxLimits
from asyncrl.isolation.sandbox.detection import check_isolation
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.rewards.base import rewards

FENCE = "```"
LANGUAGE = re.compile(r"[\w+-]*")
LANGUAGES = ("", "python", "py", "python3")
LARGEST = 4 << 20  # bytes of output that are compared
SLACK = 4096  # characters more than expected that are looked at: digits, white space


class CodeTruth(msgspec.Struct, frozen=True):
    """`inputs` and `outputs` of programs, or with `fn_name` arguments and results of a function; or `tests`,
    code that raises where the answer is wrong (a list of such codes counts one by one)."""

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str | None = None
    tests: str | list[str] = []


@dataclass(frozen=True)
class CodeTest:
    """Describes one run: a program around the answer, what it reads, and whether its output is right: `right`
    may raise what `passes` catches, as the output can be anything."""

    source: str
    stdin: str
    right: Callable[[str], bool]


@rewards.register("code")
class Code:
    """1.0 if the last block of code in the answer passes all tests of the ground truth, else 0.0; with
    `partial` the share that it passes. Components: `passed`, `tests`.

    `seconds` is for each test; what has not run after `total_seconds` counts as failed. `max_tests`: use only
    the first ones; 0: all. `at_once`: sandboxes of one worker. `require`: see docs/sandbox.md.
    """

    needs_truth = True
    own_deadline = True  # waiting for a sandbox and starting it do not count against the answer

    def __init__(
        self,
        *,
        partial: bool = False,
        seconds: Annotated[float, Meta(gt=0)] = 5.0,
        total_seconds: Annotated[float, Meta(gt=0)] = 40.0,
        memory_mb: Annotated[int, Meta(ge=1)] = 512,
        max_tests: Annotated[int, Meta(ge=0)] = 0,
        at_once: Annotated[int, Meta(ge=1)] = 8,
        require: str = " ".join(ISOLATION),
    ) -> None:
        self._partial = partial
        self._seconds = seconds
        self._total = total_seconds
        self._most = max_tests or None
        self._limits = SandboxLimits(memory=memory_mb, output=LARGEST)
        self._require = check_isolation(require)
        self._places = asyncio.Semaphore(at_once)

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        truth = read_truth(ground_truth)
        answer = last_block(solution_str)
        cases = cases_of(truth, answer or "")[: self._most]
        passed = await self._run(cases) if answer else 0
        score = passed / len(cases) if self._partial else float(passed == len(cases))
        return {"score": score, "components": {"passed": passed, "tests": len(cases)}}

    async def _run(self, cases: list[CodeTest]) -> int:
        """Count the tests that pass; without `partial` it stops at the first that does not."""
        passed = 0
        async with self._places, Jail(self._limits, require=self._require) as sandbox:
            until = time.monotonic() + self._total
            for case in cases:
                seconds = min(self._seconds, until - time.monotonic())
                if seconds <= 0:
                    break
                result = await sandbox.run("program", case.source, seconds, case.stdin)
                right = passes(case, result)
                passed += right
                if not (right or self._partial):
                    break
        return passed


def passes(case: CodeTest, result: RunResult) -> bool:
    """An output that cannot be compared, as it nests too deep or holds too large a number, is wrong."""
    try:
        return result.ending == RunEnding.DONE and not result.omitted and case.right(result.output)
    except (ValueError, OverflowError, RecursionError):
        return False


def read_truth(given: Any) -> CodeTruth:
    """Read tests from an object or its JSON text. ValueError when it holds no tests."""
    if isinstance(given, str):
        given = json.loads(given)
    try:
        truth = msgspec.convert(given, CodeTruth)
    except msgspec.ValidationError as error:
        raise ValueError(f"the ground truth holds no tests: {error}") from None
    if len(truth.inputs) != len(truth.outputs):
        raise ValueError(f"the ground truth has {len(truth.inputs)} inputs, {len(truth.outputs)} outputs")
    if not truth.inputs and not truth.tests:
        raise ValueError("the ground truth holds no tests: `inputs` and `outputs`, or `tests`, are expected")
    return truth


def last_block(text: str) -> str | None:
    """The last fenced block of Python, or of no language. One that is not closed goes on to the end."""
    found = None
    fence = text.find(FENCE)
    while fence >= 0 and (line_end := text.find("\n", fence)) >= 0:
        end = text.find(FENCE, line_end + 1)
        language = LANGUAGE.match(text, fence + len(FENCE), line_end)
        if language and language[0].lower() in LANGUAGES:
            found = text[line_end + 1 : end if end >= 0 else None]
        fence = text.find(FENCE, end + len(FENCE)) if end >= 0 else -1
    return found


def cases_of(truth: CodeTruth, answer: str) -> list[CodeTest]:
    """Make one case for each test."""
    pairs = list(zip(truth.inputs, truth.outputs, strict=True))
    if truth.fn_name:
        cases = [_call(answer, truth.fn_name, given, expected) for given, expected in pairs]
    else:
        cases = [_stdio(answer, given, expected) for given, expected in pairs]
    tests = [truth.tests] if isinstance(truth.tests, str) else truth.tests
    return cases + [_assertion(answer, test) for test in tests]


QUIET = "import os as _os; _os.dup2(_os.open('/dev/null', 1), 2); del _os"
RUN = "exec(compile({code!r}, '<answer>', 'exec'), globals())"


def _stdio(answer: str, given: Any, expected: Any) -> CodeTest:
    source = f"{QUIET}\n{RUN.format(code=answer)}"
    return CodeTest(source, _text(given), lambda output: same_text(output, _text(expected)))


def _call(answer: str, name: str, given: Any, expected: Any) -> CodeTest:
    """Call the function, or the method of a class Solution. Its result is printed after a mark that the
    answer cannot know in advance."""
    mark = secrets.token_hex(16)
    source = "\n".join(
        (
            QUIET,
            "import json as _json, sys as _sys",
            "_given = _json.loads(_sys.stdin.read())",
            "__name__ = 'answer'",
            RUN.format(code=answer),
            "_owner = Solution() if 'Solution' in globals() else _sys.modules['__main__']",
            f"_result = getattr(_owner, {name!r})(*_given)",
            f"print({chr(10) + mark!r} + _json.dumps(_result, default=list))",
        )
    )

    def right(output: str) -> bool:
        _, marked, printed = output.rpartition(mark)
        value = _value(expected)
        if not marked or too_long(printed, json.dumps(value)):
            return False
        return same_value(json.loads(printed), value)

    arguments = given if isinstance(given, list) else [given]
    if isinstance(given, str):  # one JSON value per line
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
    return CodeTest(source, json.dumps(arguments), right)


def _assertion(answer: str, test: str) -> CodeTest:
    """Passed when the last line ran: not by an answer that ends the program early."""
    mark = secrets.token_hex(16)
    source = f"{QUIET}\n{RUN.format(code=answer)}\n{RUN.format(code=test)}\nprint({chr(10) + mark!r})"
    return CodeTest(source, "", lambda output: output.rstrip().endswith(mark))


def same_text(found: str, expected: str) -> bool:
    """Equal words in equal lines; numbers with a point may differ by 1e-6 of their size."""
    found = found.strip()
    expected = expected.strip()
    if too_long(found, expected):
        return False
    ours = found.splitlines()
    theirs = expected.splitlines()
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def too_long(found: str, expected: str) -> bool:
    """Too long to be right: comparing it would hold up the event loop."""
    return len(found) > 8 * len(expected) + SLACK


def _same_line(a: str, b: str) -> bool:
    ours = a.split()
    theirs = b.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def same_value(found: Any, expected: Any) -> bool:
    """Equal as JSON, floats to 1e-6 of their size; data sets wrap the expected value in a list, or do not."""
    return _close(found, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _close(found, expected[0])
    )


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
        return numbers and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and bool(a == b)


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if "." not in a + b:
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _text(value: Any) -> str:
    """Return a program's input or output; some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(expected: Any) -> Any:
    """Return an expected result; a text is one JSON value, or itself."""
    if isinstance(expected, str):
        try:
            return json.loads(expected)
        except ValueError:
            return expected
    return expected
