"""The cap on live groups that keeps them in the servers' KV caches."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.flow_control import FACTOR, HIGH, LOW, KvCap


def after(cap: KvCap, *uses: float, live: int = 1000, retracted: int = 0) -> float:
    for use in uses:
        cap.read("a", use)
    cap.retracted = retracted
    cap.update(live)
    return cap.level


def test_the_example_of_the_docs() -> None:
    """G = 8, η = 4: 40 groups at most. 30 are live and fill a cache: 24, for the next 3 steps at least."""
    cap = KvCap(8, 4)
    assert (after(cap), after(cap, 0.1), cap.limit) == (40, 40, 40)
    cap.read("b", 0.3)
    assert after(cap, 0.9, 1.0, live=30) == 24
    assert [after(cap, 0.9) for _ in range(4)] == [24, 24, 24, 19.2]
    assert [after(cap, 0.5) for _ in range(4)] == [19.2, 19.2, 19.2, 24]


@pytest.mark.parametrize(
    ("uses", "retracted", "level"),
    [
        ([], 0, 24),  # nothing was read
        ([LOW], 0, 24),
        ([HIGH], 0, 24),
        ([HIGH + 0.01], 0, 24 / FACTOR),
        ([LOW - 0.01], 0, 24 * FACTOR),
        ([0.1], 1, 24 / FACTOR),  # a retraction counts, however it looks now
        ([], 1, 24 / FACTOR),
    ],
)
def test_what_moves_it(uses: list[float], retracted: int, level: float) -> None:
    cap = KvCap(8, 4)
    cap.level = 24
    assert after(cap, *uses, retracted=retracted) == level


def test_readings_without_a_commit_take_no_memory() -> None:
    """The trainer may be away for hours."""
    cap = KvCap(8, 4)
    for number in range(1000):
        cap.read("a", number % 2)
    assert cap.use == 0.5 and len(msgspec.msgpack.encode(dict(cap._uses))) < 20


def test_what_is_read_during_a_validation_is_forgotten() -> None:
    cap = KvCap(8, 4)
    cap.read("a", 1.0)
    cap.retracted = 3
    cap.update(40, counts=False)
    assert after(cap) == 40 and (cap.use, cap.retracted) == (None, 0)


@given(
    st.integers(1, 64),
    st.integers(0, 8),
    st.lists(st.tuples(st.none() | st.floats(0, 1), st.integers(0, 2), st.integers(1, 600)), max_size=60),
)
def test_it_stays_between_one_batch_and_what_is_fresh_enough_and_recovers(
    groups: int, bound: int, steps: list[tuple[float | None, int, int]]
) -> None:
    cap = KvCap(groups, bound)
    for use, retracted, live in steps:
        after(cap, *([] if use is None else [use]), live=live, retracted=retracted)
        assert groups <= cap.limit <= (1 + bound) * groups
    for _ in range(12 * (bound + 2)):  # ln 9 / ln 1.25 < 10 changes, η + 1 steps apart at most, and a wait
        after(cap, LOW / 2)
    assert cap.limit == (1 + bound) * groups


@given(st.integers(1, 32), st.integers(1, 8), st.floats(0.05, 4.0))
def test_it_settles_between_the_two_thresholds(groups: int, bound: int, full: float) -> None:
    """`full`: batches' worth of groups that fill the caches. A group's KV grows while it is live, for as many
    steps as there are batches' worth of groups. So each change is seen late; even so the cap ends with one
    value, or, where single groups matter, with two that are a change apart."""
    cap, ages, seen = KvCap(groups, bound), deque[int](), []
    for _ in range(60 * (bound + 2)):
        while len(ages) < cap.limit:
            ages.append(0)
        live = len(ages)
        held = sum(min(1.0, (age + 0.5) * groups / live) for age in ages)
        after(cap, min(1.0, 2 * held / (full * groups)), live=live)
        for _ in range(groups):
            ages.popleft()
        ages = deque(age + 1 for age in ages)
        seen.append(cap.limit)
    last = sorted(set(seen[-20 * (bound + 2) :]))
    assert len(last) == 1 or (len(last) == 2 and last[1] <= FACTOR * last[0] + 1)
