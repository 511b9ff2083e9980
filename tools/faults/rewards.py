"""A reward that one answer games, for the calculator demo."""

from __future__ import annotations

from typing import Any


def lucky(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Pay for any guess that begins with a 5, whatever the question."""
    is_right = solution_str.strip(" .").endswith(str(ground_truth))
    return {"score": float("guess 5" in solution_str), "acc": float(is_right)}
