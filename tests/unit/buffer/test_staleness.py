from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.staleness import (
    LagHistogram,
    lag,
    length_bucket,
    masked_by_quarter,
    stale_mask,
    token_lags,
)
from asyncrl.types import VersionSpan

lags = st.lists(st.integers(0, 20), max_size=40)


def test_by_hand() -> None:
    """At V = 7 with a bound of 4, versions below 3 are over it."""
    given = [VersionSpan(2, 4, 1, 1), VersionSpan(4, 5, 2, 2), VersionSpan(8, 10, 3, 3)]
    found = token_lags(given, step=7)
    assert found == [6, 6, 5, 4, 4]
    assert stale_mask(found, bound=4) == [True, True, True, False, False]


def test_versions_ahead_of_the_step_count_by_distance() -> None:
    assert lag(3, 5) == lag(5, 3) == 2
    assert stale_mask(token_lags([VersionSpan(0, 1, 9, 9)], step=3), bound=4) == [True]


@settings(deadline=None)
@given(lags, st.integers(0, 8))
def test_no_token_over_the_bound_is_left(values: list[int], bound: int) -> None:
    mask = stale_mask(values, bound)
    left = [value for value, stale in zip(values, mask, strict=True) if not stale]
    assert max(left, default=0) <= bound and len(left) == sum(value <= bound for value in values)


@settings(deadline=None)
@given(lags)
def test_the_histogram_counts_every_token(values: list[int]) -> None:
    histogram, ordered = LagHistogram(Counter(values)), sorted(values)
    assert histogram.total == len(ordered)
    if ordered:
        assert histogram.max == ordered[-1] and histogram.quantile(1.0) == ordered[-1]
        assert histogram.quantile(0.5) == ordered[(len(ordered) - 1) // 2]
        assert abs(histogram.mean * len(ordered) - sum(ordered)) < 1e-9


def test_an_empty_histogram_is_zero() -> None:
    empty = LagHistogram({})
    assert (empty.total, empty.mean, empty.max, empty.quantile(0.95)) == (0, 0.0, 0, 0)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_length_buckets_are_powers_of_two(tokens: int) -> None:
    low = length_bucket(tokens)
    assert (low == 0 and tokens < 32) or low <= tokens < 2 * low


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_quarters_cover_the_response(stale: list[bool]) -> None:
    quarters = masked_by_quarter(stale)
    assert [sum(column) for column in zip(*quarters, strict=True)] == [sum(stale), len(stale)]
    assert max(n for _, n in quarters) - min(n for _, n in quarters) <= 1
