"""The product-limit estimate by hand and for a known distribution; what a buffer feeds it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.buffer.lifetimes import Lifetimes
from asyncrl.types import FailReason
from tests.unit.buffer.machine import land, make

NOW = 100.0
Lives = list[tuple[float, float, bool]]  # duration, weight, whether it ended


def seen(lives: Lives, size: int = 1000) -> Lifetimes:
    """All that runs is looked at when it is NOW."""
    lifetimes = Lifetimes(size)
    for key, (duration, weight, has_ended) in enumerate(sorted(lives, key=lambda life: not life[2])):
        lifetimes.begin_life(key, NOW - duration if not has_ended else 10.0, weight)
        if has_ended:
            lifetimes.end_lives(key, 10.0 + duration)
    return lifetimes


@pytest.mark.parametrize(
    ("lives", "quantiles"),
    [
        pytest.param(
            [(k, 1, True) for k in range(1, 11)],
            {0.1: 1, 0.5: 5, 0.9: 9, 1.0: 10},
            id="all ended: the empirical distribution",
        ),
        pytest.param(  # risk sets by hand: 6 at 2 (the one that runs for 2 is still at risk), 4 at 3, 2 at 7
            [(2, 1, True), (2, 1, False), (3, 1, True), (5, 1, False), (7, 1, True), (9, 1, False)],
            {0.5: 7, 0.7: math.inf},
            id="what runs is censored",
        ),
        pytest.param(
            [(1, 30, True), (2, 60, False), (3, 10, True), (1, 0, True)],
            {0.3: 1, 0.31: 3},
            id="weights are tokens",
        ),
        pytest.param([(1, 1, False)], {0.5: math.inf}, id="one that runs"),
        pytest.param([], {0.5: math.inf}, id="nothing"),
    ],
)
def test_by_hand(lives: Lives, quantiles: dict[float, float]) -> None:
    lifetimes = seen(lives)
    assert {q: lifetimes.quantile(q, NOW) for q in quantiles} == quantiles


def test_delayed_entry_is_at_risk_only_from_then() -> None:
    """A window of two begins at 2 s. One of those that it sees began 2 s before: at 1 one of the others is at
    risk of two, at 3 one of two, at 4 the last one."""
    window = Lifetimes(2)
    for key, (began, ended_at) in enumerate([(1.0, 2.0), (2.0, 3.0), (0.0, 4.0)]):
        window.begin_life(key, began)
        window.end_lives(key, ended_at)
    window.begin_life("runs", 2.0)
    assert [window.quantile(q, 5.0) for q in (0.5, 0.51, 0.75, 0.76)] == [1.0, 4.0, 4.0, 4.0]
    window.end_lives("runs", 5.0)  # the window begins at 3 s: at 3 nothing else is at risk yet
    assert window.quantile(1.0, 9.0) == 3.0


def test_a_life_that_ends_when_the_window_begins_is_never_at_risk() -> None:
    window = Lifetimes(1)
    for key, began in (("left", 0.0), ("stays", 1.0)):
        window.begin_life(key, began)
        window.end_lives(key, 2.0)
    assert window.quantile(0.5, 9.0) == math.inf


def test_a_window_over_a_steady_stream_is_unbiased() -> None:
    """10,000 exponential lives of mean 5 begin ten a second: the newest 2,000 give its quantiles."""
    rng = np.random.default_rng(1)
    now = 1000.0
    began = np.arange(10_000) / 10
    ended_at = began + rng.exponential(5.0, began.size)
    window = Lifetimes(2000)
    events = sorted(
        [(at, False, key) for key, at in enumerate(began)] + [(at, True, k) for k, at in enumerate(ended_at)]
    )
    for at, ends, key in events:
        if at <= now:
            window.end_lives(key, at) if ends else window.begin_life(key, at)
    assert window.quantile(0.5, now) == pytest.approx(5 * math.log(2), rel=0.15)  # seeded
    assert window.quantile(0.9, now) == pytest.approx(5 * math.log(10), rel=0.15)


def test_a_window_follows_a_change() -> None:
    window = Lifetimes(3)
    for now, seconds in ((20.0, 1.0), (60.0, 9.0)):
        for key in range(10):
            window.begin_life(key, now + key)
            window.end_lives(key, now + key + seconds)
        assert window.quantile(0.5, 99.0) == seconds


def test_weight_that_runs_and_is_older() -> None:
    lifetimes = Lifetimes(10)
    for key, now in (("a", 1.0), ("a", 3.0), ("b", 1.0)):
        lifetimes.begin_life(key, now, 10)
    assert [lifetimes.running_weight(than) for than in (1.0, 2.0, 4.0)] == [0, 20, 30]
    lifetimes.end_lives("b", 4.0)
    assert lifetimes.running_weight(2.0) == 10
    assert [lifetimes.ended_weight(ended_after, began_before=2.0) for ended_after in (3.0, 4.0)] == [10, 0]
    assert lifetimes.ended_weight(ended_after=3.0, began_before=1.0) == 0
    lifetimes.forget_lives("a")
    assert lifetimes.running_weight(4.0) == 0


def test_ages_of_tokens_in_a_buffer() -> None:
    """A member that lands after the deadline of 4 s, and one whose first attempt failed, have tokens of their
    own ages."""
    buffer, _ = make(episodes_per_group=4, group_policy="partial", group_deadline=4.0)
    buffer.admit_group(now=0.0)
    for member in range(4):
        buffer.assign(buffer.episodes[f"0.{member}"], "w", 1, 0, 1.0 + member / 8)
        buffer.waiting_tokens.begin_life(f"0.{member}", 2.0, 10)
    buffer.fail_attempt(buffer.episodes["0.3"], FailReason.EPISODE_ERROR, 2.0)
    for member, now in ((0, 2.0), (1, 3.0)):
        land(buffer, f"0.{member}", now=now)
    buffer.settle_overdue(5.0)
    land(buffer, "0.2", now=10.0)
    buffer.assign(buffer.episodes["0.3"], "w", 1, 0, 9.0)
    buffer.waiting_tokens.begin_life("0.3", 9.0, 10)
    land(buffer, "0.3", now=10.0)
    assert [buffer.waiting_tokens.quantile(q, 20.0) for q in (0.25, 0.75, 1.0)] == [1.0, 3.0, 8.0]
    assert buffer.waiting_tokens.running_weight(20.0) == 0
