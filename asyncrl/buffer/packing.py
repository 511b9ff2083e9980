"""Packing: rows to micro-batches of bounded padded size."""

from __future__ import annotations

from collections.abc import Sequence


def bucket(lengths: Sequence[int], budget: int, rows: Sequence[int] = ()) -> list[list[int]]:
    """Micro-batches of episodes of similar length: rows × longest row <= budget, or a single larger episode.
    They are lists of indices into `lengths` (tokens of an episode's longest row). `rows` of each episode;
    none given: one each. bucket([5, 9, 4], 10) is [[1], [0, 2]]: 1 × 9, then 2 × 5."""
    batches: list[list[int]] = []
    longest = held = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        more = rows[index] if rows else 1
        if batches and (held + more) * longest <= budget:
            batches[-1].append(index)
            held += more
        else:
            batches.append([index])
            longest, held = max(lengths[index], 1), more
    return batches
