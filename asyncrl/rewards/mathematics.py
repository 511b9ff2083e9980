"""Mathematical answers, compared as expressions by math-verify (`pip install 'asyncrl[math]'`).

It runs in the reward processes: its time limits are signals, which need a main thread, and sympy may use any
amount of memory.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.errors import ConfigError
from asyncrl.rewards.base import rewards


@rewards.register("math")
class Math:
    """1.0 if an answer equals the ground truth (LaTeX, an expression or a number), else 0.0. Where there
    is a `\\boxed{}` the last one is the answer, else what math-verify finds in the text. It is reported as
    `pred`, as sympy writes it: 1/2 of `\\frac{1}{2}`, 0.5 and 1/2.

    `boxed`: without one there is no answer. `seconds`: for each of parsing and comparing; what takes longer
    is wrong.
    """

    needs_truth = True

    def __init__(self, *, boxed: bool = False, seconds: Annotated[int, Meta(ge=1)] = 5) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed; pip install 'asyncrl[math]'")
        self._boxed, self._seconds = boxed, seconds

    def load(self) -> None:
        """Import sympy, which takes a second."""
        importlib.import_module("math_verify")

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
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
