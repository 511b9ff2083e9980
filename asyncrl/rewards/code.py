"""Judges code by unit tests, in the sandbox.

The output of an answer is compared outside the sandbox, so the answer never sees the expected output. Only
`tests`, which are code themselves, run in the sandbox beside the answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.isolation.sandbox.base import ISOLATION, RunEnding, RunResult, SandboxLimits
from asyncrl.isolation.sandbox.detection import check_isolation
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.rewards.base import rewards

FENCE = "```"
LANGUAGE_PATTERN = re.compile(r"[\w+-]*")
PYTHON_LANGUAGES = ("", "python", "py", "python3")
MAX_OUTPUT_BYTES = 4 << 20  # bytes of output that are compared
EXTRA_CHARACTERS = 4096  # characters that a right output may have beyond the expected: digits, white space


class CodeTruth(msgspec.Struct, frozen=True):
    """Holds a ground truth: `inputs` and `outputs` of programs, or with `fn_name` arguments and results of a
    function; or `tests`, code that raises if the answer is wrong (each element of a list counts)."""

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str | None = None
    tests: str | list[str] = []


@dataclass(frozen=True)
class CodeTest:
    """Describes one run: a program around the answer, the program's input, and the check of the output.
    `is_right` may raise the exceptions that `passes` catches, as an output can be any text."""

    source: str
    stdin: str
    is_right: Callable[[str], bool]


@rewards.register("code")
@dataclass(kw_only=True, eq=False)
class Code:
    """Give 1.0 if the last block of code in the answer passes all tests of the ground truth, else 0.0; with
    `partial` the fraction of passed tests. Components: `passed`, `tests`.

    `seconds`: limit of each test; tests that have not run after `total_seconds` count as failed. `max_tests`:
    use only the first tests; 0: all. `at_once`: sandboxes of one worker. `require`: see docs/guides/tasks.md.
    """

    needs_truth = True
    own_deadline = True  # waiting for a sandbox and starting it do not count against the answer

    partial: bool = False
    seconds: Annotated[float, Meta(gt=0)] = 5.0
    total_seconds: Annotated[float, Meta(gt=0)] = 40.0
    memory_mb: Annotated[int, Meta(ge=1)] = 512
    max_tests: Annotated[int, Meta(ge=0)] = 0
    at_once: Annotated[int, Meta(ge=1)] = 8
    require: str = " ".join(ISOLATION)

    def __post_init__(self) -> None:
        self._limits = SandboxLimits(memory=self.memory_mb, output=MAX_OUTPUT_BYTES)
        self._isolation = check_isolation(self.require)
        self._sandbox_slots = asyncio.Semaphore(self.at_once)

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        truth = read_code_truth(ground_truth)
        answer = last_block(solution_str)
        cases = cases_of(truth, answer or "")[: self.max_tests or None]
        passed = 0

        if answer:
            async with self._sandbox_slots, Jail(self._limits, require=self._isolation) as sandbox:
                deadline = time.monotonic() + self.total_seconds
                for case in cases:
                    seconds = min(self.seconds, deadline - time.monotonic())
                    if seconds <= 0:
                        break

                    result = await sandbox.run("program", case.source, seconds, case.stdin)
                    is_right = passes(case, result)
                    passed += is_right
                    if not (is_right or self.partial):
                        break  # one failure decides

        score = passed / len(cases) if self.partial else float(passed == len(cases))
        return {"score": score, "components": {"passed": passed, "tests": len(cases)}}


def passes(case: CodeTest, result: RunResult) -> bool:
    """Tell whether a run passes. An output that nests too deep, or holds too large a number, is wrong."""
    try:
        return result.ending == RunEnding.DONE and not result.omitted and case.is_right(result.output)
    except (ValueError, OverflowError, RecursionError):
        return False


def read_code_truth(truth_or_json: Any) -> CodeTruth:
    """Read tests from an object or JSON text. ValueError if there are no tests."""
    if isinstance(truth_or_json, str):
        truth_or_json = json.loads(truth_or_json)

    try:
        truth = msgspec.convert(truth_or_json, CodeTruth)
    except msgspec.ValidationError as error:
        raise ValueError(f"the ground truth contains no tests: {error}") from None

    if len(truth.inputs) != len(truth.outputs):
        counts = f"{len(truth.inputs)} and {len(truth.outputs)}"
        raise ValueError(f"the ground truth's `inputs` and `outputs` differ in length ({counts})")
    if not truth.inputs and not truth.tests:
        raise ValueError("the ground truth contains no tests; expected `inputs` and `outputs`, or `tests`")

    return truth


def last_block(text: str) -> str | None:
    """Return the last fenced block of Python, or of no language. An unclosed block goes on to the end."""
    block = None
    fence = text.find(FENCE)

    while fence >= 0 and (line_end := text.find("\n", fence)) >= 0:
        end = text.find(FENCE, line_end + 1)
        language = LANGUAGE_PATTERN.match(text, fence + len(FENCE), line_end)
        if language and language[0].lower() in PYTHON_LANGUAGES:
            block = text[line_end + 1 : end if end >= 0 else None]

        fence = text.find(FENCE, end + len(FENCE)) if end >= 0 else -1

    return block


def cases_of(truth: CodeTruth, answer: str) -> list[CodeTest]:
    """Make one case for each test."""
    cases: list[CodeTest] = []
    for test_input, expected in zip(truth.inputs, truth.outputs, strict=True):
        if truth.fn_name:
            cases.append(_call_test(answer, truth.fn_name, test_input, expected))
        else:
            source = f"{SILENCE_STDERR}\n{RUN_CODE.format(code=answer)}"
            is_right = partial(same_text, expected=expected)
            cases.append(CodeTest(source, _stdio_text(test_input), is_right))

    tests = [truth.tests] if isinstance(truth.tests, str) else truth.tests
    return cases + [_assertion_test(answer, test) for test in tests]


SILENCE_STDERR = "import os as _os; _os.dup2(_os.open('/dev/null', 1), 2); del _os"
RUN_CODE = "exec(compile({code!r}, '<answer>', 'exec'), globals())"


def _call_test(answer: str, function_name: str, test_input: Any, expected: Any) -> CodeTest:
    """Test a function, or a method of a class Solution. The program prints the result after a mark that the
    answer cannot know in advance."""
    mark = secrets.token_hex(16)
    source = "\n".join(
        (
            SILENCE_STDERR,
            "import json as _json, sys as _sys",
            "_given = _json.loads(_sys.stdin.read())",
            "__name__ = 'answer'",
            RUN_CODE.format(code=answer),
            "_owner = Solution() if 'Solution' in globals() else _sys.modules['__main__']",
            f"_result = getattr(_owner, {function_name!r})(*_given)",
            f"print({chr(10) + mark!r} + _json.dumps(_result, default=list))",
        )
    )

    def is_right(output: str) -> bool:
        _, has_mark, printed = output.rpartition(mark)
        value = expected
        if isinstance(expected, str):  # the JSON text of a value, or a text
            with suppress(ValueError):
                value = json.loads(expected)

        if not has_mark or too_long(printed, json.dumps(value)):
            return False
        return same_value(json.loads(printed), value)

    arguments = test_input if isinstance(test_input, list) else [test_input]
    if isinstance(test_input, str):  # one JSON value per line
        arguments = [json.loads(line) for line in test_input.splitlines() if line.strip()]

    return CodeTest(source, json.dumps(arguments), is_right)


def _assertion_test(answer: str, test: str) -> CodeTest:
    """Test by code that raises. The last line prints a mark, so that no answer can pass by an early exit."""
    mark = secrets.token_hex(16)
    source = "\n".join(
        (
            SILENCE_STDERR,
            RUN_CODE.format(code=answer),
            RUN_CODE.format(code=test),
            f"print({chr(10) + mark!r})",
        )
    )

    return CodeTest(source, "", lambda output: output.rstrip().endswith(mark))


def same_text(output: str, expected: Any) -> bool:
    """Compare an output with the expected text, or list of lines, word by word in each line; numbers with a
    point may differ by 1e-6 of their size."""
    output = output.strip()
    expected_text = _stdio_text(expected).strip()
    if too_long(output, expected_text):
        return False

    output_lines = [line.split() for line in output.splitlines()]
    expected_lines = [line.split() for line in expected_text.splitlines()]
    same_counts = [len(line) for line in output_lines] == [len(line) for line in expected_lines]
    return same_counts and all(map(_same_word, chain(*output_lines), chain(*expected_lines)))


def too_long(output: str, expected: str) -> bool:
    """Tell whether an output is too long to be right; a comparison would hold up the event loop."""
    return len(output) > 8 * len(expected) + EXTRA_CHARACTERS


def same_value(result: Any, expected: Any) -> bool:
    """Compare JSON values, floats to 1e-6 of their size. Some data sets wrap the expected value in a list."""
    return _close(result, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _close(result, expected[0])
    )


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
        return are_numbers and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
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


def _stdio_text(value: Any) -> str:
    """Return a program's input or output; some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
