from __future__ import annotations

import math
from itertools import chain, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.packing import Piece, micro_batches, partition_units, units

pieces = st.lists(
    st.builds(
        lambda key, width, rows, shared, attention: Piece(
            key, width * rows, min(shared, width * rows), rows, width, attention
        ),
        st.integers(0, 5),
        st.integers(1, 300),
        st.integers(1, 3),
        st.integers(0, 200),
        st.floats(0, 100),
    ),
    max_size=40,
)
budgets = st.integers(50, 1000)


def padded_size(part: list[Piece]) -> int:
    return sum(piece.rows for piece in part) * max(piece.width for piece in part)


@settings(deadline=None)
@given(pieces, budgets)
def test_padded_rows_of_like_width_share_a_micro_batch_within_the_budget(
    drawn: list[Piece], budget: int
) -> None:
    """And no row of one is wider than one of the micro-batch before."""
    drawn = [piece._replace(key=index, shared=0) for index, piece in enumerate(drawn)]
    packed = [[drawn[index] for index in part] for part in micro_batches(drawn, budget, padded=True)]
    assert sorted(chain(*packed)) == sorted(drawn)
    for part in packed:
        assert padded_size(part) <= budget or len(part) == 1
    for wider, narrower in pairwise(packed):
        assert min(piece.width for piece in wider) >= max(piece.width for piece in narrower)


@settings(deadline=None)
@given(pieces, budgets, st.sampled_from([1, 2, 4]))
def test_units_are_of_one_key_and_fit_the_budget_or_are_one_piece(
    drawn: list[Piece], budget: int, ranks: int
) -> None:
    packed_units = units(drawn, budget, ranks)
    assert sorted(chain(*(unit.members for unit in packed_units))) == list(range(len(drawn)))
    for unit in packed_units:
        assert len({drawn[index].key for index in unit.members}) == 1
        first, *other_pieces = (drawn[index] for index in unit.members)
        alone = first.tokens + sum(piece.tokens - min(piece.shared, first.shared) for piece in other_pieces)
        assert unit.tokens == alone and (alone <= budget or not other_pieces)
        attention = sum(piece.attention for piece in (first, *other_pieces))
        assert math.isclose(unit.work, alone + attention)


@settings(deadline=None)
@given(pieces, budgets)
def test_units_fill_micro_batches_of_the_budget(drawn: list[Piece], budget: int) -> None:
    unit_by_member = {unit.members[0]: unit for unit in units(drawn, budget)}
    packed = micro_batches(drawn, budget)
    assert sorted(chain(*packed)) == list(range(len(drawn)))
    for part in packed:
        packed_units = [unit_by_member[index] for index in part if index in unit_by_member]
        assert sorted(part) == sorted(chain(*(unit.members for unit in packed_units)))
        assert sum(unit.tokens for unit in packed_units) <= budget or len(packed_units) == 1


def test_few_large_groups_occupy_all_ranks() -> None:
    """Members that share 10 of 30 tokens: two groups of four on four ranks, two members each."""
    group = [Piece("a", 30, 10, 1, 30)] * 4 + [Piece("b", 30, 10, 1, 30)] * 4
    parts = partition_units(units(group, 1000, 4), 4)
    assert sorted(part.members for part in parts) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [part.tokens for part in partition_units(units(group, 1000, 2), 2)] == [90, 90]
