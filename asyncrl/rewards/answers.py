"""Rewards that compare the answer's text with the ground truth, and that look at the episode's form.

`tag`: only what stands in the last `<tag>…</tag>` of the answer counts; without one, the reward is 0.
Those that find an answer in the text report it as `pred`, as verl's do: `maj@k` counts them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import string
from collections import Counter
from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncrl.errors import ConfigError
from asyncrl.rewards.base import RewardInput, needs_truth, rewards, runs
from asyncrl.types import EpisodeEnd

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_LOOSE = re.compile(r"-?[0-9.,]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
TAIL = 300  # characters of an answer that gsm8k looks at, as verl does


_BYTES = re.compile(r"""b(['"]).*\1""", re.DOTALL)
_PLAIN = re.compile(r"-?[0-9.]+")  # a number that gsm8k can find


Scored = dict[str, Any]  # `score`, and the answer as `pred` where one was found


def is_number(ground_truth: Any) -> bool:
    """True if it is one number and nothing else, as a reward that compares numbers needs it."""
    return _NUMBER.fullmatch(str(ground_truth).strip()) is not None


def as_python_writes_bytes(ground_truth: Any) -> bool:
    """True of the text b'128', which stands in data where binary values were taken for text."""
    return isinstance(ground_truth, str) and _BYTES.fullmatch(ground_truth) is not None


# -- the texts that each reward accepts for a ground truth, as it compares them ----------------------------


def _last_numbers(ground_truth: Any, **_: Any) -> list[str]:
    return [_written_number(_value(str(ground_truth).strip()))] if is_number(ground_truth) else []


def _plain_numbers(ground_truth: Any, **_: Any) -> list[str]:
    number = _plain(str(ground_truth))
    return [number] if number is not None and _PLAIN.fullmatch(number) else []


def _exact_texts(ground_truth: Any, *, case: bool = False, **_: Any) -> list[str]:
    return [_normalised(truth, case) for truth in _written_targets(ground_truth)]


def _bags_of_words(ground_truth: Any, **_: Any) -> list[str]:
    return [" ".join(_words(truth)) for truth in _written_targets(ground_truth)]


def _of_group(ground_truth: Any, *, pattern: str, **_: Any) -> list[str] | None:
    """None without a group: nothing is compared then."""
    return _exact_texts(ground_truth, case=True) if re.compile(pattern).groups else None


def _formulas(ground_truth: Any, **_: Any) -> list[str]:
    return [str(ground_truth)] if _is_written(ground_truth) and str(ground_truth).strip() else []


def _written_targets(ground_truth: Any) -> list[str]:
    """The accepted answers without those of which only Python's notation would be compared, such as None."""
    return [str(truth) for truth in _accepted(ground_truth) if _is_written(truth)]


def _is_written(truth: Any) -> bool:
    return isinstance(truth, str | int | float) and not as_python_writes_bytes(truth)


# -- the rewards -------------------------------------------------------------------------------------------


@rewards.register("final_number")
@runs("loop")
@needs_truth(numbers=True, compared=_last_numbers)
def final_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Scored:
    """1.0 if the last number in the answer equals the ground truth, else 0.0."""
    found = _NUMBER.findall(solution_str)
    if not found:
        return _scored(False, None)
    expected = _NUMBER.fullmatch(str(ground_truth).strip())
    value = _value(found[-1])
    return _scored(expected is not None and value == _value(expected[0]), _written_number(value))


@rewards.register("gsm8k")
@runs("loop")
@needs_truth(numbers=True, compared=_plain_numbers)
def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> Scored:
    """1.0 if the number after the last `#### ` (`flexible`: the last number) is the ground truth;
    `format_score` for another number; 0.0 for none."""
    pattern = _MARKED if method == "strict" else _LOOSE
    found = [number for text in pattern.findall(solution_str[-TAIL:]) if (number := _plain(text)) is not None]
    if not found:
        return _scored(False, None)
    return _scored(1.0 if found[-1] == _plain(str(ground_truth)) else format_score, found[-1])


@rewards.register("exact")
@runs("loop")
@needs_truth(compared=_exact_texts)
def exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    tag: str = "",
    case: bool = False,
) -> Scored:
    """1.0 if the answer is one of the ground truths (a text, a number or a list), white space and (unless
    `case`) upper case aside."""
    answer = tagged(solution_str, tag)
    if answer is None:
        return _scored(False, None)
    found = _normalised(answer, case)
    return _scored(found in {_normalised(truth, case) for truth in targets(ground_truth)}, found)


@rewards.register("f1")
@runs("loop")
@needs_truth(compared=_bags_of_words)
def f1(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    tag: str = "",
) -> float:
    """F1 of the answer's words and the best ground truth's, as in SQuAD: no case, punctuation, articles."""
    answer = tagged(solution_str, tag)
    if answer is None:
        return 0.0
    return max((_overlap(_words(answer), _words(truth)) for truth in targets(ground_truth)), default=0.0)


@rewards.register("regex")
@needs_truth(compared=_of_group)
def regex(given: RewardInput, *, pattern: str, of: Literal["answer", "transcript"] = "answer") -> Scored:
    """1.0 if the pattern is found. If it has a group, the last match's must be one of the ground truths.
    `.` matches line ends. It runs in a process: a pattern can take for ever."""
    matches = list(re.finditer(pattern, given.answer if of == "answer" else given.transcript, re.DOTALL))
    if not matches or not matches[-1].re.groups:
        return _scored(bool(matches), None)
    truths = {_normalised(truth, True) for truth in targets(json.loads(given.sample.ground_truth))}
    found = _normalised(matches[-1][1] or "", True)
    return _scored(found in truths, found)


@rewards.register("format")
@runs("loop")
def well_formed(given: RewardInput) -> float:
    """1.0 for an episode that ended by itself, with an answer, and in which every tool call could be read."""
    malformed = any(message.role == "tool" and message.name == "malformed_call" for message in given.messages)
    whole = given.end in (EpisodeEnd.ANSWERED, EpisodeEnd.DONE)
    return float(whole and bool(given.answer.strip()) and not malformed)


@rewards.register("none")
@runs("loop")
def none(given: RewardInput) -> float:
    """Always 0.0: only the rewards of turns, from the environment and the tools, count."""
    return 0.0


@rewards.register("agent")
@runs("loop")
def agent(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Any:
    """Return what the agent program returned: a number, or a dict with `score`."""
    info = extra_info or {}
    result = info.get("agent_result")
    if result is None:
        raise ValueError(
            f"the agent returned no score (end of the episode: {info.get('end', 'unknown')}); return a "
            "number or a dict with 'score', also after a refused request"
        )
    return result


def targets(ground_truth: Any) -> list[str]:
    """The accepted answers: of a text or number, a list, or a dict with `target` (as search data has)."""
    return [str(truth) for truth in _accepted(ground_truth)]


def _accepted(ground_truth: Any) -> list[Any]:
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target", [])
    return ground_truth if isinstance(ground_truth, list) else [ground_truth]


def tagged(text: str, tag: str) -> str | None:
    """Return the last `<tag>…</tag>` of the text, or None; all of it when no tag is asked for."""
    if not tag:
        return text
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


def _scored(score: float, answer: str | None) -> Scored:
    return {"score": float(score)} if answer is None else {"score": float(score), "pred": answer}


def _plain(text: str) -> str | None:
    """verl's reading of a number: without commas and a closing point; None where no digit is left."""
    number = text.replace(",", "").replace("$", "").strip().rstrip(".")
    return number if any(map(str.isdigit, number)) else None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _written_number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _normalised(text: str, case: bool) -> str:
    text = " ".join(text.split())
    return text if case else text.casefold()


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _overlap(found: list[str], expected: list[str]) -> float:
    """Two empty texts agree."""
    if not found or not expected:
        return float(found == expected)
    common = (Counter(found) & Counter(expected)).total()
    return 2 * common / (len(found) + len(expected))


# -- expressions -------------------------------------------------------------------------------------------


@rewards.register("math")
class Math:
    """1.0 if an answer equals the ground truth (LaTeX, an expression or a number), else 0.0. Where there
    is a `\\boxed{}` the last one is the answer, else what math-verify finds in the text. It is reported as
    `pred`, as sympy writes it: 1/2 of `\\frac{1}{2}`, 0.5 and 1/2.

    It runs in the reward processes: math-verify's time limits are signals, which need a main thread, and
    sympy may use any amount of memory. `boxed`: without one there is no answer. `seconds`: for each of
    parsing and comparing; what takes longer is wrong.
    """

    needs_truth = True
    compared = staticmethod(_formulas)

    def __init__(self, *, boxed: bool = False, seconds: Annotated[int, Meta(ge=1)] = 5) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed; pip install 'asyncrl[math]'")
        self._boxed = boxed
        self._seconds = seconds

    def load(self) -> None:
        """Import sympy, which takes a second."""
        importlib.import_module("math_verify")

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        truth = str(ground_truth)
        marked = any(mark in truth for mark in ("\\boxed", "$", "\\(", "\\["))
        gold = parse(
            truth if marked else f"\\boxed{{{truth}}}",
            [LatexExtractionConfig()],
            parsing_timeout=self._seconds,
        )
        if not gold:
            raise ValueError(f"the ground truth {truth[:100]!r} cannot be read as mathematics")
        _, box, inside = solution_str.rpartition("\\boxed")
        if self._boxed and not box:
            return {"score": 0.0}
        formats = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        found = parse(box + inside, formats, parsing_timeout=self._seconds)
        score = float(verify(gold, found, timeout_seconds=self._seconds))
        return {"score": score, "pred": _written(found[0])} if found else {"score": score}


def _written(found: Any) -> str:
    try:
        return str(found)
    except ValueError:  # an integer with more digits than Python writes
        return "a number that is too long to be written"
