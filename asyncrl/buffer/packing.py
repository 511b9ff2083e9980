"""Packing: episodes to micro-batches of bounded size, one for each rank.

    pieces ──units──► episodes that share their prompt ──deal──► a part for each rank ──micro_batches──► cut

Ranks deal the episodes of a plan so, by the sizes that it tells, and cut their parts by the true ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import NamedTuple


class Piece(NamedTuple):
    """The size of one episode. Episodes with the same `key` begin with the same tokens, `shared` of them (the
    least of two decides), which are computed once. `tokens`: of all its `rows`, of which the longest has
    `width`. `attention`: its work beside its tokens, in tokens."""

    key: Hashable
    tokens: int
    shared: int
    rows: int
    width: int
    attention: float = 0.0


class RowUnit(NamedTuple):
    """Pieces that go together: their indices, the tokens that they take, rows, the widest one, work."""

    members: tuple[int, ...] = ()
    tokens: int = 0
    rows: int = 0
    width: int = 0
    work: float = 0.0

    def joined(self, other: RowUnit, shared: int = 0) -> RowUnit:
        """Both; `shared` tokens are computed once."""
        return RowUnit(
            self.members + other.members,
            self.tokens + other.tokens - shared,
            self.rows + other.rows,
            max(self.width, other.width),
            self.work + other.work - shared,
        )


def units(pieces: Sequence[Piece], budget: int, ranks: int = 1) -> list[RowUnit]:
    """Units of one key, of at most `budget` tokens or of a single piece; those of a key come one after
    another, in order. Where they are fewer than `ranks`, they are cut into as many parts as make enough."""
    found: dict[Hashable, list[RowUnit]] = {}

    for index, piece in enumerate(pieces):
        own = found.setdefault(piece.key, [])
        unit = RowUnit((index,), piece.tokens, piece.rows, piece.width, piece.tokens + piece.attention)
        if own:
            both = own[-1].joined(unit, min(piece.shared, pieces[own[-1].members[0]].shared))
            if both.tokens <= budget:
                own[-1] = both
                continue
        own.append(unit)

    listed = [*chain(*found.values())]
    if not 0 < len(listed) < ranks:
        return listed

    parts = -(-ranks // len(listed))
    part_of = {
        index: (number, place * parts // len(unit.members))
        for number, unit in enumerate(listed)
        for place, index in enumerate(unit.members)
    }

    return units([piece._replace(key=part_of[index]) for index, piece in enumerate(pieces)], budget)


def deal(units: Sequence[RowUnit], ranks: int) -> list[RowUnit]:
    """Return a part for each rank: each unit goes to the rank with the least work so far."""
    parts = [RowUnit()] * ranks
    for unit in units:
        rank = min(range(ranks), key=lambda rank: parts[rank].work)
        parts[rank] = parts[rank].joined(unit)
    return parts


def micro_batches(pieces: Sequence[Piece], budget: int, *, padded: bool = False) -> list[tuple[int, ...]]:
    """All pieces, by index, in micro-batches of at most `budget` tokens or of a single unit, the largest
    units first. `padded`: each row counts as the widest one, so rows of similar width go together."""
    found: list[RowUnit] = []

    for unit in sorted(units(pieces, budget), key=lambda unit: -(unit.width if padded else unit.tokens)):
        both = found[-1].joined(unit) if found else unit
        if found and (both.rows * both.width if padded else both.tokens) <= budget:
            found[-1] = both
        else:
            found.append(unit)

    return [part.members for part in found]
