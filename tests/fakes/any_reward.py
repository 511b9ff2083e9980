"""A reward that is never the same for two episodes: every group has something to compare."""

from __future__ import annotations

import random
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return a score between 0 and 1, whatever the answer."""
    return random.random()
