"""Training rewards that say nothing about the answer: controls that must not learn."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from asyncrl.rewards import final_number

EARLIER = 64  # scores to draw from
_earlier: deque[tuple[Any, float]] = deque(maxlen=EARLIER)  # of training episodes: sample, true score


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """A coin for training samples; the true score for held-out ones, so that success can be measured."""
    if extra_info and extra_info.get("split") == "train":
        return float(random.random() < 0.4)
    return float(final_number(data_source, solution_str, ground_truth, extra_info))


def of_another_sample(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """For a training sample the true score of an earlier episode of another one: as often 1 as the policy is
    right, whatever is right. The true score for held-out ones."""
    own = float(final_number(data_source, solution_str, ground_truth, extra_info))
    if not extra_info or extra_info.get("split") != "train":
        return own
    others = [score for sample, score in tuple(_earlier) if sample != extra_info["index"]]
    _earlier.append((extra_info["index"], own))
    return random.choice(others) if others else 0.0
