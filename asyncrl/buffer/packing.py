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


def pack(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """`[micro][rank]` → rows: each rank's part fits the budget, and all ranks have the same count.

    Rows of like length meet in one micro-batch, so that ranks pad little and finish together. Parts
    may be empty in the last micro-batches.
    """
    balanced = balance(lengths, ranks)
    parts = [bucket([lengths[row] for row in rows], budget) for rows in balanced]
    count = max((len(part) for part in parts), default=0)
    return [
        [
            [rows[i] for i in part[micro]] if micro < len(part) else []
            for rows, part in zip(balanced, parts, strict=True)
        ]
        for micro in range(count)
    ]


def padded(lengths: Sequence[int]) -> int:
    """Tokens of a micro-batch of these rows, padding included."""
    return len(lengths) * max(lengths, default=0)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
