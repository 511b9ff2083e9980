from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.packing import bucket, fill

lengths = st.lists(st.integers(1, 300), max_size=40)


def at(values: list[int], rows: list[int]) -> list[int]:
    return [values[row] for row in rows]


@settings(deadline=None)
@given(lengths, st.integers(50, 1000))
def test_buckets_fit_the_budget_or_are_one_row(values: list[int], budget: int) -> None:
    batches = bucket(values, budget)
    assert sorted(chain(*batches)) == list(range(len(values)))
    for rows in batches:
        padded = len(rows) * max(at(values, rows))
        assert padded <= budget or len(rows) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4)), max_size=40), st.integers(50, 1000))
def test_buckets_count_every_row_of_an_episode(values: list[tuple[int, int]], budget: int) -> None:
    lengths, rows = [length for length, _ in values], [count for _, count in values]
    batches = bucket(lengths, budget, rows)
    assert sorted(chain(*batches)) == list(range(len(values)))
    for part in batches:
        assert sum(at(rows, part)) * max(at(lengths, part)) <= budget or len(part) == 1


@settings(deadline=None)
@given(lengths)
def test_rows_of_like_length_share_a_bucket(values: list[int]) -> None:
    """No row of one bucket is longer than a row of the bucket before."""
    batches = bucket(values, 600)
    for longer, shorter in pairwise(batches):
        assert min(at(values, longer)) >= max(at(values, shorter))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300)), max_size=40), st.integers(50, 1000))
def test_what_has_one_key_stays_together(values: list[tuple[int, int]], budget: int) -> None:
    keys, tokens = [key for key, _ in values], [count for _, count in values]
    batches = fill(keys, tokens, budget)
    assert sorted(chain(*batches)) == list(range(len(values)))
    held = [{keys[index] for index in part} for part in batches]
    assert sum(map(len, held)) == len(set(keys))
    for part, own in zip(batches, held, strict=True):
        assert sum(at(tokens, part)) <= budget or len(own) == 1
