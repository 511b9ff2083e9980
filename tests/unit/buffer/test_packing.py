from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.packing import balance, bucket

lengths = st.lists(st.integers(1, 300), max_size=40)


def at(values: list[int], rows: list[int]) -> list[int]:
    return [values[row] for row in rows]


@given(lengths, st.integers(1, 5))
def test_balance_gives_every_row_to_one_rank_within_a_third_of_the_best(
    values: list[int], ranks: int
) -> None:
    parts = balance(values, ranks)
    assert len(parts) == ranks and sorted(chain(*parts)) == list(range(len(values)))
    best = max([sum(values) / ranks, *values, 0])
    assert max(sum(at(values, part)) for part in parts) <= 4 / 3 * best + max(values, default=0) / 3


@given(lengths, st.integers(50, 1000))
def test_buckets_fit_the_budget_or_are_one_row(values: list[int], budget: int) -> None:
    batches = bucket(values, budget)
    assert sorted(chain(*batches)) == list(range(len(values)))
    for rows in batches:
        padded = len(rows) * max(at(values, rows))
        assert padded <= budget or len(rows) == 1


@given(lengths)
def test_rows_of_like_length_share_a_bucket(values: list[int]) -> None:
    """No row of one bucket is longer than a row of the bucket before."""
    batches = bucket(values, 600)
    for longer, shorter in pairwise(batches):
        assert min(at(values, longer)) >= max(at(values, shorter))


@pytest.mark.parametrize(
    ("values", "wanted"), [([], [[], []]), ([5], [[0], []]), ([1, 9, 4, 6], [[1, 0], [3, 2]])]
)
def test_balance_by_hand(values: list[int], wanted: list[list[int]]) -> None:
    assert balance(values, ranks=2) == wanted
