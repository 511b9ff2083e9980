"""Packing: rows to micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


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


def fill(keys: Sequence[Hashable], tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens in all, or of one larger unit; what has one key is a unit.
    They are lists of indices. fill("aab", [3, 3, 5], 8) is [[0, 1], [2]]."""
    units: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        units.setdefault(key, []).append(index)
    sized = sorted(((sum(tokens[i] for i in unit), unit) for unit in units.values()), reverse=True)
    batches: list[list[int]] = []
    held = 0
    for size, unit in sized:
        if batches and held + size <= budget:
            batches[-1] += unit
            held += size
        else:
            batches.append(list(unit))
            held = size
    return batches
