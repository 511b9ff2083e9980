"""Packing: rows to micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


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


class RowUnit(NamedTuple):
    """Rows that lie in one micro-batch: indices of them, and tokens that they take."""

    members: list[int]
    tokens: int


def units(
    keys: Sequence[Hashable], tokens: Sequence[int], shared: Sequence[int], budget: int
) -> list[RowUnit]:
    """Who has one key begins with the same tokens, `shared` of them (the least of two decides), which are
    computed once. Units are of one key, in order, and of at most `budget` tokens or a single member; those of
    a key come one after another. units("aab", [9, 9, 5], [6, 6, 0], 12) is [([0, 1], 12), ([2], 5)]."""
    found: dict[Hashable, list[RowUnit]] = {}
    for index, key in enumerate(keys):
        own = found.setdefault(key, [])
        begun = own[-1] if own else None
        more = tokens[index] - (min(shared[index], shared[begun.members[0]]) if begun else 0)
        if begun and begun.tokens + more <= budget:
            own[-1] = RowUnit([*begun.members, index], begun.tokens + more)
        else:
            own.append(RowUnit([index], tokens[index]))
    return [unit for own in found.values() for unit in own]


def fill(units: Sequence[RowUnit], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens in all, or of one larger unit, the largest units first."""
    batches: list[list[int]] = []
    held = 0
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        if batches and held + unit.tokens <= budget:
            batches[-1] += unit.members
            held += unit.tokens
        else:
            batches.append(list(unit.members))
            held = unit.tokens
    return batches
