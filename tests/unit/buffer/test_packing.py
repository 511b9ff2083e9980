from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.packing import balance, bucket, pack, padded

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
    assert all(padded(at(values, rows)) <= budget or len(rows) == 1 for rows in batches)


@given(lengths)
def test_rows_of_like_length_share_a_bucket(values: list[int]) -> None:
    """No row of one bucket is longer than a row of the bucket before."""
    batches = bucket(values, 600)
    for longer, shorter in pairwise(batches):
        assert min(at(values, longer)) >= max(at(values, shorter))


@given(lengths, st.integers(1, 4), st.integers(300, 1000))
def test_pack_gives_all_ranks_the_same_number_of_micro_batches(
    values: list[int], ranks: int, budget: int
) -> None:
    micros = pack(values, ranks, budget)
    assert all(len(micro) == ranks and any(micro) for micro in micros)
    assert sorted(chain(*chain(*micros))) == list(range(len(values)))
    assert all(padded(at(values, rows)) <= budget for micro in micros for rows in micro)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], []), ([5], [[[0], []]]), ([1, 9, 4, 6], [[[1, 0], [3, 2]]])],
)
def test_pack_by_hand(values: list[int], wanted: list[list[list[int]]]) -> None:
    assert pack(values, ranks=2, budget=100) == wanted
