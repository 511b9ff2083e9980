from __future__ import annotations

from contextlib import suppress

import pytest

from asyncrl.trainer.performance import Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_busy_and_idle_add_up_to_the_wall_time(clock: Clock) -> None:
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.phase("wait", waiting=True):
        clock.now += 2
        assert (watch.busy_s, watch.idle_s) == (1, 2)  # a wait under way counts
        with watch.phase("work"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert (watch.busy_s, watch.idle_s) == (21, 10)
    assert watch.lap() == (31, {"wait": 10, "work": 4})


def test_a_phase_ends_with_an_error_too(clock: Clock) -> None:
    watch = Stopwatch(clock)
    with suppress(ValueError), watch.phase("wait", waiting=True):
        clock.now += 1
        raise ValueError
    clock.now += 2
    assert (watch.busy_s, watch.idle_s) == (2, 1)


def test_a_lap_starts_from_zero(clock: Clock) -> None:
    watch = Stopwatch(clock)
    with watch.phase("work"):
        clock.now += 1
        assert watch.lap() == (1, {"work": 1})
        clock.now += 2
    assert watch.lap() == (2, {"work": 2})
