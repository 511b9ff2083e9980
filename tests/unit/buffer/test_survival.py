"""The Kaplan-Meier estimate, against curves computed by hand and against a known distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.buffer.survival import RecentLifetimes, SurvivalCurve


def curve(*lives: tuple[float, float, bool], entries: tuple[float, ...] = ()) -> SurvivalCurve:
    durations, weights, ended = zip(*lives, strict=True) if lives else ((), (), ())
    return SurvivalCurve(durations, weights, ended, entries)


def test_without_censoring_it_is_the_empirical_distribution() -> None:
    found = curve(*((float(k), 1.0, True) for k in range(1, 11)))
    assert found.survival.tolist() == pytest.approx([1 - k / 10 for k in range(1, 11)])
    assert (found.quantile(0.1), found.quantile(0.5), found.quantile(0.9), found.quantile(1.0)) == (
        1,
        5,
        9,
        10,
    )
    assert found.restricted_mean(math.inf) == pytest.approx(5.5)
    assert found.restricted_mean(3.0) == pytest.approx(1 + 0.9 + 0.8)


def test_what_runs_counts_as_censored() -> None:
    """Risk sets by hand: 6 at 2, 4 at 3 (one censored at 2 was still at risk at 2), 2 at 7."""
    found = curve((2, 1, True), (2, 1, False), (3, 1, True), (5, 1, False), (7, 1, True), (9, 1, False))
    assert found.survival.tolist() == pytest.approx([5 / 6, 5 / 8, 5 / 16])
    assert found.quantile(0.5) == 7 and found.quantile(0.7) == math.inf
    assert found.restricted_mean(10) == pytest.approx(2 + 5 / 6 + 4 * 5 / 8 + 3 * 5 / 16)


def test_weights_are_tokens() -> None:
    found = curve((1, 30, True), (2, 60, False), (3, 10, True), (1, 0, True))
    assert found.survival.tolist() == pytest.approx([0.7, 0.0])
    assert found.quantile(0.3) == 1 and found.quantile(0.31) == 3


def test_nothing_known() -> None:
    for found in (curve(), curve((1, 1, False))):
        assert found.quantile(0.5) == math.inf and found.restricted_mean(4.0) == 4.0


def test_delayed_entry_is_at_risk_only_from_then() -> None:
    """One of three was seen only from the age of 2: at 1 two are at risk, at 3 two, at 4 one."""
    found = curve((1, 1, True), (3, 1, True), (4, 1, True), entries=(0, 0, 2))
    assert found.survival.tolist() == pytest.approx([1 / 2, 1 / 4, 0])


def test_a_window_over_a_steady_stream_is_unbiased() -> None:
    """10,000 exponential lives of mean 5 begin one a second: the newest 2,000 that ended give that mean."""
    rng, now = np.random.default_rng(1), 10_000.0
    began, lasts = np.arange(10_000.0), rng.exponential(5.0, 10_000)
    ended = began + lasts
    window = RecentLifetimes(2000)
    for k in np.argsort(ended):
        if ended[k] <= now:
            window.add(began[k], ended[k])
    found = window.curve(((b, 1.0) for b, e in zip(began, ended, strict=True) if e > now), now)
    assert len(window) == 2000
    assert found.restricted_mean(1000.0) == pytest.approx(5.0, abs=0.5)  # 4.5 standard errors; seeded
    assert found.quantile(0.9) == pytest.approx(5 * math.log(10), rel=0.15)


def test_a_window_follows_a_change() -> None:
    window = RecentLifetimes(3)
    for k in range(10):
        window.add(k, k + 1.0)
    assert window.curve([], 20.0).restricted_mean(100.0) == 1.0
    for k in range(10, 13):
        window.add(k, k + 9.0)
    assert window.curve([], 30.0).restricted_mean(100.0) == 9.0
