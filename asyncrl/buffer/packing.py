"""Packs episodes into micro-batches of bounded size, for each rank.

    pieces ─units─► episodes that share their prompt ─partition_units─► parts of ranks ─micro_batches─► cut

Ranks partition the episodes of a plan by the sizes in the plan, and cut their parts by the true sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import NamedTuple


class Piece(NamedTuple):
    """The size of one episode.

    key: episodes with the same key begin with the same tokens, which are computed once.
    tokens: tokens of all sequences of the episode.
    shared: tokens at the beginning that are shared; of two episodes the smaller number counts.
    rows: number of sequences.
    width: tokens of the longest sequence.
    attention: work beyond that of the tokens, expressed in tokens.
    """

    key: Hashable
    tokens: int
    shared: int
    rows: int
    width: int
    attention: float = 0.0


class RowUnit(NamedTuple):
    """Pieces that stay together: indices, tokens, sequences, tokens of the longest sequence, and work."""

    members: tuple[int, ...] = ()
    tokens: int = 0
    rows: int = 0
    width: int = 0
    work: float = 0.0

    def joined_with(self, added_unit: RowUnit, shared: int = 0) -> RowUnit:
        """Return the union of two units, of which `shared` tokens are computed once."""
        return RowUnit(
            self.members + added_unit.members,
            self.tokens + added_unit.tokens - shared,
            self.rows + added_unit.rows,
            max(self.width, added_unit.width),
            self.work + added_unit.work - shared,
        )


def units(pieces: Sequence[Piece], budget: int, ranks: int = 1) -> list[RowUnit]:
    """Join pieces of the same key into units of at most `budget` tokens, or of a single piece.

    Units of a key follow one another, in order. If there are fewer units than `ranks`, each is cut between
    episodes, so that every rank gets some if each unit has enough episodes.
    """
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


def partition_units(units: Sequence[RowUnit], ranks: int) -> list[RowUnit]:
    """Partition units among ranks: each unit goes to the rank with the least work so far."""
    parts = [RowUnit()] * ranks
    for unit in units:
        rank = min(range(ranks), key=lambda rank: parts[rank].work)
        parts[rank] = parts[rank].joined_with(unit)
    return parts


def micro_batches(pieces: Sequence[Piece], budget: int, *, padded: bool = False) -> list[tuple[int, ...]]:
    """Return the indices of each micro-batch's pieces: at most `budget` tokens, or a single unit.

    The largest units come first. With `padded` each sequence counts as the longest of its micro-batch, so
    sequences of similar length go together.
    """
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
