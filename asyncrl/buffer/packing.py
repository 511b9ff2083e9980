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

    def joined_with(self, added_unit: RowUnit, shared: int = 0) -> RowUnit:
        """Both; `shared` tokens are computed once."""
        return RowUnit(
            self.members + added_unit.members,
            self.tokens + added_unit.tokens - shared,
            self.rows + added_unit.rows,
            max(self.width, added_unit.width),
            self.work + added_unit.work - shared,
        )


def units(pieces: Sequence[Piece], budget: int, ranks: int = 1) -> list[RowUnit]:
    """Units of one key, of at most `budget` tokens or of a single piece; those of a key come one after
    another, in order. Where they are fewer than `ranks`, they are cut into as many parts as make enough."""
    units_by_key: dict[Hashable, list[RowUnit]] = {}

    for index, piece in enumerate(pieces):
        key_units = units_by_key.setdefault(piece.key, [])
        unit = RowUnit((index,), piece.tokens, piece.rows, piece.width, piece.tokens + piece.attention)
        if key_units:
            joined_unit = key_units[-1].joined_with(
                unit, min(piece.shared, pieces[key_units[-1].members[0]].shared)
            )
            if joined_unit.tokens <= budget:
                key_units[-1] = joined_unit
                continue
        key_units.append(unit)

    all_units = [*chain(*units_by_key.values())]
    if not 0 < len(all_units) < ranks:
        return all_units

    parts_per_unit = -(-ranks // len(all_units))
    part_of = {
        index: (number, position * parts_per_unit // len(unit.members))
        for number, unit in enumerate(all_units)
        for position, index in enumerate(unit.members)
    }

    return units([piece._replace(key=part_of[index]) for index, piece in enumerate(pieces)], budget)


def deal(units: Sequence[RowUnit], ranks: int) -> list[RowUnit]:
    """Return a part for each rank: each unit goes to the rank with the least work so far."""
    parts = [RowUnit()] * ranks
    for unit in units:
        rank = min(range(ranks), key=lambda rank: parts[rank].work)
        parts[rank] = parts[rank].joined_with(unit)
    return parts


def micro_batches(pieces: Sequence[Piece], budget: int, *, padded: bool = False) -> list[tuple[int, ...]]:
    """All pieces, by index, in micro-batches of at most `budget` tokens or of a single unit, the largest
    units first. `padded`: each row counts as the widest one, so rows of similar width go together."""
    packed_units: list[RowUnit] = []

    for unit in sorted(units(pieces, budget), key=lambda unit: -(unit.width if padded else unit.tokens)):
        joined_unit = packed_units[-1].joined_with(unit) if packed_units else unit
        if (
            packed_units
            and (joined_unit.rows * joined_unit.width if padded else joined_unit.tokens) <= budget
        ):
            packed_units[-1] = joined_unit
        else:
            packed_units.append(unit)

    return [part.members for part in packed_units]
