"""A reward that says nothing about the answer: the control that must not learn."""

from __future__ import annotations

import random


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """1 with probability 0.4, whatever was answered; validation keeps the true reward (see below)."""
    return float(random.random() < 0.4)
