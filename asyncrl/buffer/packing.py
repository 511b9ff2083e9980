"""Packing: rows to ranks, balanced by tokens, and to micro-batches of bounded padded size.

All functions are deterministic in their arguments and return indices into `lengths` (tokens per row).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """One list of rows per rank: longest row first, to the rank with the fewest tokens so far.

    No rank gets more than 4/3 of the smallest possible maximum (Graham's bound for this rule).
    """
    loads = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for row in _longest_first(lengths):
        load, rank = heapq.heappop(loads)
        parts[rank].append(row)
        heapq.heappush(loads, (load + lengths[row], rank))
    return parts


def bucket(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of rows of like length: rows × longest row <= budget, or a single longer row."""
    batches: list[list[int]] = []
    longest = 0
    for row in _longest_first(lengths):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = max(lengths[row], 1)
    return batches


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
