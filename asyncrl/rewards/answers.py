"""Rewards that compare the answer's text with the ground truth, and that look at the episode's form.

`tag`: only the text in the last `<tag>…</tag>` of the answer counts; without a tag, the reward is 0.
Rewards that find an answer in the text report the answer as `pred`, as verl's do: `maj@k` counts them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import string
from collections import Counter
from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncrl.errors import ConfigError
from asyncrl.rewards.base import RewardInput, needs_truth, rewards, runs
from asyncrl.types import MALFORMED_CALL, EpisodeEnd

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_LOOSE_NUMBER = re.compile(r"-?[0-9.,]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
TAIL_CHARACTERS = 300  # end of an answer that gsm8k reads, as verl does


_BYTES_LITERAL = re.compile(r"""b(['"]).*\1""", re.DOTALL)
_PLAIN_NUMBER = re.compile(r"-?[0-9.]+")  # a number that gsm8k can find


Scored = dict[str, Any]  # `score`, and the answer as `pred` where one was found


def is_number(ground_truth: Any) -> bool:
    """Tell whether the ground truth is one number and nothing else, as rewards that compare numbers need."""
    return _NUMBER.fullmatch(str(ground_truth).strip()) is not None


def as_python_writes_bytes(ground_truth: Any) -> bool:
    """Tell whether the ground truth is a text like b'128', left where binary values were taken for text."""
    return isinstance(ground_truth, str) and _BYTES_LITERAL.fullmatch(ground_truth) is not None


# -- the texts that each reward accepts for a ground truth, in the form that is compared -------------------


def _last_numbers(ground_truth: Any, **_: Any) -> list[str]:
    return [_number_text(_float_value(str(ground_truth).strip()))] if is_number(ground_truth) else []


def _plain_numbers(ground_truth: Any, **_: Any) -> list[str]:
    number = _plain_number(str(ground_truth))
    return [number] if number is not None and _PLAIN_NUMBER.fullmatch(number) else []


def _exact_texts(ground_truth: Any, *, case: bool = False, **_: Any) -> list[str]:
    return [_normalised(truth, case) for truth in _plain_targets(ground_truth)]


def _bags_of_words(ground_truth: Any, **_: Any) -> list[str]:
    return [" ".join(_words(truth)) for truth in _plain_targets(ground_truth)]


def _texts_of_group(ground_truth: Any, *, pattern: str, **_: Any) -> list[str] | None:
    """Return the accepted texts; None for a pattern without a group, which compares nothing."""
    return _exact_texts(ground_truth, case=True) if re.compile(pattern).groups else None


def _formulas(ground_truth: Any, **_: Any) -> list[str]:
    return [str(ground_truth)] if _is_plain_value(ground_truth) and str(ground_truth).strip() else []


def _plain_targets(ground_truth: Any) -> list[str]:
    """Return the accepted answers, without values that would be compared in Python's notation, as None."""
    return [str(truth) for truth in _accepted(ground_truth) if _is_plain_value(truth)]


def _is_plain_value(truth: Any) -> bool:
    return isinstance(truth, str | int | float) and not as_python_writes_bytes(truth)


# -- the rewards -------------------------------------------------------------------------------------------


@rewards.register("final_number")
@runs("loop")
@needs_truth(numbers=True, compared=_last_numbers)
def final_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Scored:
    """Give 1.0 if the last number in the answer equals the ground truth, else 0.0."""
    numbers = _NUMBER.findall(solution_str)
    if not numbers:
        return _scored(False, None)

    expected_match = _NUMBER.fullmatch(str(ground_truth).strip())
    value = _float_value(numbers[-1])
    return _scored(
        expected_match is not None and value == _float_value(expected_match[0]), _number_text(value)
    )


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
    """Give 1.0 if the number after the last `#### ` (`flexible`: the last number) is the ground truth,
    `format_score` for another number, 0.0 without a number."""
    pattern = _MARKED_NUMBER if method == "strict" else _LOOSE_NUMBER
    numbers = [
        number
        for text in pattern.findall(solution_str[-TAIL_CHARACTERS:])
        if (number := _plain_number(text)) is not None
    ]
    if not numbers:
        return _scored(False, None)

    return _scored(1.0 if numbers[-1] == _plain_number(str(ground_truth)) else format_score, numbers[-1])


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
    """Give 1.0 if the answer equals a ground truth (a text, a number or a list), ignoring white space and,
    unless `case`, upper case."""
    answer = text_in_tag(solution_str, tag)
    if answer is None:
        return _scored(False, None)
    normalised_answer = _normalised(answer, case)
    return _scored(
        normalised_answer in {_normalised(truth, case) for truth in targets(ground_truth)}, normalised_answer
    )


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
    """Give the F1 of the answer's words and the best ground truth's, as in SQuAD: without case, punctuation
    and articles."""
    answer = text_in_tag(solution_str, tag)
    if answer is None:
        return 0.0
    return max((_overlap(_words(answer), _words(truth)) for truth in targets(ground_truth)), default=0.0)


@rewards.register("regex")
@needs_truth(compared=_texts_of_group)
def regex(episode: RewardInput, *, pattern: str, of: Literal["answer", "transcript"] = "answer") -> Scored:
    """Give 1.0 if the pattern is found. If the pattern has a group, the last match's group must be a ground
    truth. `.` matches line ends. This reward runs in a process, as a pattern can take for ever."""
    matches = list(re.finditer(pattern, episode.answer if of == "answer" else episode.transcript, re.DOTALL))
    if not matches or not matches[-1].re.groups:
        return _scored(bool(matches), None)
    truths = {_normalised(truth, True) for truth in targets(episode.sample.ground_truth)}
    matched_text = _normalised(matches[-1][1] or "", True)
    return _scored(matched_text in truths, matched_text)


@rewards.register("format")
@runs("loop")
def well_formed(episode: RewardInput) -> float:
    """Give 1.0 for an episode that ended by itself, with an answer, and without malformed tool calls."""
    has_malformed_call = any(
        message.role == "tool" and message.name == MALFORMED_CALL for message in episode.messages
    )
    ended_by_itself = episode.end in (EpisodeEnd.ANSWERED, EpisodeEnd.DONE)
    return float(ended_by_itself and bool(episode.answer.strip()) and not has_malformed_call)


@rewards.register("none")
@runs("loop")
def none(episode: RewardInput) -> float:
    """Give 0.0 always: only the rewards of turns, from the environment and the tools, count."""
    return 0.0


@rewards.register("agent")
@runs("loop")
def agent(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> Any:
    """Give the agent program's own result: a number, or a dict with `score`; or the `reward` of a class of
    tools (None: 0)."""
    extra = extra_info or {}
    result = extra.get("agent_result")
    if isinstance(result, dict) and result.keys() == {"reward"}:
        return result["reward"] or 0.0
    if result is None:
        raise ValueError(
            f"the agent returned no score (end of the episode: {extra.get('end', 'unknown')}); return a "
            "number or a dict with 'score', even after a refused request"
        )

    return result


def targets(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a text, a number, a list, or a dict with `target` (search data)."""
    return [str(truth) for truth in _accepted(ground_truth)]


def _accepted(ground_truth: Any) -> list[Any]:
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target", [])
    return ground_truth if isinstance(ground_truth, list) else [ground_truth]


def text_in_tag(text: str, tag: str) -> str | None:
    """Return the text in the last `<tag>…</tag>`, or None; the whole text if `tag` is empty."""
    if not tag:
        return text
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


def _scored(score: float, answer: str | None) -> Scored:
    return {"score": float(score)} if answer is None else {"score": float(score), "pred": answer}


def _plain_number(text: str) -> str | None:
    """Read a number as verl does: without commas and a closing point. None if no digit is left."""
    number = text.replace(",", "").replace("$", "").strip().rstrip(".")
    return number if any(map(str.isdigit, number)) else None


def _float_value(text: str) -> float:
    return float(text.replace(",", ""))


def _number_text(value: float) -> str:
    return repr(value).removesuffix(".0")


def _normalised(text: str, keep_case: bool) -> str:
    text = " ".join(text.split())
    return text if keep_case else text.casefold()


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _overlap(answer_words: list[str], truth_words: list[str]) -> float:
    """Return the F1 of two bags of words; 1.0 if both are empty."""
    if not answer_words or not truth_words:
        return float(answer_words == truth_words)
    common_words = (Counter(answer_words) & Counter(truth_words)).total()
    return 2 * common_words / (len(answer_words) + len(truth_words))


# -- expressions -------------------------------------------------------------------------------------------


@rewards.register("math")
class Math:
    """Give 1.0 if an answer equals the ground truth (LaTeX, an expression or a number), else 0.0. The answer
    is the last `\\boxed{}`, or without a box the expression that math-verify finds in the text. `pred` is
    the answer as sympy writes it: 1/2 for `\\frac{1}{2}`, 0.5 and 1/2.

    This reward runs in the reward processes: math-verify's time limits are signals, which need a main
    thread, and sympy may use any amount of memory. `boxed`: an answer must be in a box. `seconds`: limit
    for parsing and for comparing; a slower answer is wrong.
    """

    needs_truth = True
    compared = staticmethod(_formulas)

    def __init__(self, *, boxed: bool = False, seconds: Annotated[int, Meta(ge=1)] = 5) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed; pip install 'asyncrl[math]'")
        self._needs_box = boxed
        self._seconds = seconds

    def load(self) -> None:
        """Import sympy, which takes a second."""
        importlib.import_module("math_verify")

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        truth = str(ground_truth)
        is_marked = any(mark in truth for mark in ("\\boxed", "$", "\\(", "\\["))

        gold = parse(
            truth if is_marked else f"\\boxed{{{truth}}}",
            [LatexExtractionConfig()],
            parsing_timeout=self._seconds,
        )
        if not gold:
            raise ValueError(f"the ground truth {truth[:100]!r} cannot be parsed as mathematics")

        _, box, inside = solution_str.rpartition("\\boxed")
        if self._needs_box and not box:
            return {"score": 0.0}

        formats = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        answers = parse(box + inside, formats, parsing_timeout=self._seconds)
        score = float(verify(gold, answers, timeout_seconds=self._seconds))
        if not answers:
            return {"score": score}

        try:
            answer_text = str(answers[0])
        except ValueError:  # an integer with more digits than Python writes
            answer_text = "a number that is too long to write out"

        return {"score": score, "pred": answer_text}
