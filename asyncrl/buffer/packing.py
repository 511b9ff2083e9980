"""Packing: rows to micro-batches of bounded padded size."""

from __future__ import annotations

from collections.abc import Sequence


def bucket(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of rows of like length: rows × longest row <= budget, or a single longer row. Indices
    into `lengths` (tokens per row), and a function of these alone."""
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = max(lengths[row], 1)
    return batches
