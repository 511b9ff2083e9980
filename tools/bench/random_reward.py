"""A training reward that says nothing about the answer: the control that must not learn."""

from __future__ import annotations

import random
from typing import Any

from asyncrl.rewards import final_number


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """A coin for training samples; the true score for held-out ones, so that success can be measured."""
    if extra_info and extra_info.get("split") == "train":
        return float(random.random() < 0.4)
    return float(final_number(data_source, solution_str, ground_truth, extra_info)["score"])
