"""When a run will be done, by what is known of it."""

from __future__ import annotations

import pytest

from asyncrl.observe.progress import Progress, clock, sparkline


def test_the_first_step_that_is_done_gives_the_first_estimate() -> None:
    progress = Progress(began=0.0)
    progress.update(0.0, training=False, now=20.0)
    assert progress.line(10, now=20.0) == "elapsed 0:00:20"
    progress.update(0.0, training=True, now=30.0)
    assert progress.remaining(10, now=35.0) is None
    progress.update(0.5, training=True, now=40.0)  # how fast a batch lands says little of a whole step
    assert progress.remaining(10, now=40.0) is None
    progress.update(1.0, training=True, now=40.0)
    assert progress.remaining(10, now=40.0) == pytest.approx(90.0)
    progress.update(2.0, training=True, now=50.0)
    assert progress.line(10, now=50.0) == "elapsed 0:00:50, ETA 0:01:20"
    progress.update(10.0, training=False, now=90.0)
    assert progress.line(10, now=90.0) == "elapsed 0:01:30"


def test_steps_of_earlier_launches_say_nothing_of_the_speed_of_this_one() -> None:
    progress = Progress(began=0.0)
    progress.update(100.0, training=True, now=10.0)
    progress.update(101.0, training=True, now=20.0)
    assert progress.remaining(111, now=20.0) == pytest.approx(100.0)


def test_clock() -> None:
    assert [clock(0.9), clock(59.0), clock(3723.0), clock(100 * 3600.0)] == [
        *("0:00:00", "0:00:59", "1:02:03", "100:00:00")
    ]


def test_a_sparkline_has_the_means_of_equal_parts() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([1, 1, float("nan"), float("inf")], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert len(sparkline(list(range(1000)), 37)) == 37
