from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.staleness import (
    LagHistogram,
    fresh_until,
    lag,
    length_bucket,
    masked_by_quarter,
    stale_mask,
    stale_ranges,
)
from asyncrl.types import VersionSpan


@st.composite
def spans(draw: st.DrawFn) -> list[VersionSpan]:
    """Spans with gaps (tool replies) between them; versions in any order: engines may differ."""
    position, found = 0, []
    for _ in range(draw(st.integers(0, 8))):
        position += draw(st.integers(0, 4))
        end = position + draw(st.integers(1, 6))
        version = draw(st.integers(0, 12))
        found.append(VersionSpan(position, end, version, version))
        position = end
    return found


def test_by_hand() -> None:
    """At V = 7 with a bound of 4, versions below 3 are over it."""
    given = [VersionSpan(2, 4, 1, 1), VersionSpan(4, 5, 2, 2), VersionSpan(8, 10, 3, 3)]
    assert stale_ranges(given, step=7, bound=4) == [(2, 5)]
    assert stale_mask(given, 7, 4, length=10) == [False] * 2 + [True] * 3 + [False] * 5
    assert fresh_until(given, 4) == 5
    assert fresh_until([], 4) is None


@given(spans(), st.integers(0, 20), st.integers(0, 8))
def test_the_mask_is_the_definition(given: list[VersionSpan], step: int, bound: int) -> None:
    length = max((span.end for span in given), default=0) + 2
    mask = stale_mask(given, step, bound, length)
    for position in range(length):
        inside = [span.version for span in given if span.start <= position < span.end]
        assert mask[position] == any(abs(step - version) > bound for version in inside)


@given(spans(), st.integers(0, 20), st.integers(0, 8))
def test_ranges_are_sorted_apart_and_not_empty(given: list[VersionSpan], step: int, bound: int) -> None:
    ranges = stale_ranges(given, step, bound)
    assert all(start < end for start, end in ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


@given(spans(), st.integers(0, 8))
def test_fresh_until_is_the_last_step_without_a_stale_token(given: list[VersionSpan], bound: int) -> None:
    last = fresh_until(given, bound)
    if last is not None:
        if max(span.version for span in given) <= last:  # none from beyond that step
            assert not stale_ranges(given, last, bound)
        assert stale_ranges(given, last + 1, bound)


def test_versions_ahead_of_the_step_count_by_distance() -> None:
    assert lag(3, 5) == lag(5, 3) == 2


@given(spans(), st.integers(0, 20), st.integers(0, 8))
def test_the_histogram_counts_every_token(given: list[VersionSpan], step: int, bound: int) -> None:
    histogram = LagHistogram.of(given, step)
    expanded = sorted(lag(step, span.version) for span in given for _ in range(span.end - span.start))
    assert histogram.total == len(expanded)
    assert histogram.over(bound) == sum(end - start for start, end in stale_ranges(given, step, bound))
    if expanded:
        assert histogram.max == expanded[-1] and histogram.quantile(1.0) == expanded[-1]
        assert histogram.quantile(0.5) == expanded[(len(expanded) - 1) // 2]
        assert histogram.mean * len(expanded) - sum(expanded) < 1e-9


@given(spans(), spans())
def test_histograms_merge(a: list[VersionSpan], b: list[VersionSpan]) -> None:
    merged = LagHistogram.of(a, 5)
    merged.merge(LagHistogram.of(b, 5))
    assert list(merged) == list(LagHistogram.of([*a, *b], 5))


def test_an_empty_histogram_is_zero() -> None:
    empty = LagHistogram()
    assert (empty.total, empty.mean, empty.max, empty.quantile(0.95)) == (0, 0.0, 0, 0)


@given(st.integers(0, 10**6))
def test_length_buckets_are_powers_of_two(tokens: int) -> None:
    low = length_bucket(tokens)
    assert (low == 0 and tokens < 32) or low <= tokens < 2 * low


@given(st.lists(st.booleans(), max_size=30))
def test_quarters_cover_the_response(stale: list[bool]) -> None:
    quarters = masked_by_quarter(stale)
    assert [sum(column) for column in zip(*quarters, strict=True)] == [sum(stale), len(stale)]
    assert max(n for _, n in quarters) - min(n for _, n in quarters) <= 1
