"""Spans of many tasks, joined by name."""

from __future__ import annotations

from typing import Any

from asyncrl.runtime.activity import (
    FLUSH_SECONDS,
    INSTANT_SECONDS,
    JOIN_GAP_SECONDS,
    MAX_NAMES,
    OTHER,
    Activity,
    Waits,
)

AHEAD = 1024.0  # of the wall clock, in seconds


class Written:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines = list[tuple[str, float, float, int, float]]()
        self.longest = list[float]()
        self.activity = Activity(self, clock=lambda: self.now, wall=lambda: self.now + AHEAD)

    def record(self, name: str, start: float, end: float, **details: Any) -> None:
        self.lines.append((name, start - AHEAD, end - AHEAD, details["calls"], details["seconds"]))
        self.longest.append(details["longest"])

    def run(self, name: str, start: float, end: float) -> None:
        self.now = start
        begun = self.activity.begin_call(name)
        self.now = end
        self.activity.end_call(begun)


def test_calls_that_overlap_or_follow_soon_are_one_span() -> None:
    written = Written()
    outer = written.activity.begin_call("tool")
    written.run("tool", 0.25, 1.0)
    written.activity.end_call(outer)
    written.run("tool", 1.0 + JOIN_GAP_SECONDS, 1.5)
    written.run("tool", 1.5 + JOIN_GAP_SECONDS + 0.25, 2.25)  # not so soon
    written.now = 10.0
    written.activity.flush()
    assert written.lines == [("tool", 0.0, 1.5, 3, 2.0), ("tool", 2.0, 2.25, 1, 0.25)]


def test_what_goes_on_is_cut_every_period() -> None:
    written = Written()
    begun = written.activity.begin_call("tool")
    for step in range(1, 5):
        written.now = step * FLUSH_SECONDS / 2
        written.activity.flush_if_due()
    written.now += 1.0
    written.activity.end_call(begun)
    written.activity.flush()
    written.activity.flush()
    cuts = (0.0, FLUSH_SECONDS, 2 * FLUSH_SECONDS, 2 * FLUSH_SECONDS + 1)
    pieces = zip(cuts, cuts[1:], (1, 0, 0), strict=False)
    assert written.lines == [("tool", start, end, calls, end - start) for start, end, calls in pieces]


def test_a_worker_of_many_slots_writes_little() -> None:
    """64 tasks at once, 50 times a second, under 1000 names in turn, for five periods."""
    written = Written()
    calls = 0
    for tick in range(int(5 * FLUSH_SECONDS * 50)):
        written.now = tick / 50
        begun = [written.activity.begin_call(f"tool {(tick * 64 + task) % 1000}") for task in range(64)]
        written.now += 0.015
        for name in begun:
            written.activity.end_call(name)
            calls += 1
        written.activity.flush_if_due()
    written.activity.flush()
    assert (
        len(written.lines) <= (MAX_NAMES + 1) * (1 / FLUSH_SECONDS + 1 / JOIN_GAP_SECONDS) * 5 * FLUSH_SECONDS
    )
    assert sum(line[3] for line in written.lines) == calls
    assert OTHER in {line[0] for line in written.lines}


def test_waits_are_recorded_by_the_name_of_their_kind() -> None:
    written = Written()
    waits = Waits(activity=written.activity)
    for version in (7, 8):
        with waits.wait_named(f"weights v{version}", span="fresher weights"):
            written.now += 0.125
    for _ in range(1000):
        with waits.wait_named("acks"):
            written.now += INSTANT_SECONDS / 2  # left out, however many
    with waits.wait_named("acks"):
        written.now += 0.5
    written.activity.flush()
    assert [line[0] for line in written.lines] == ["fresher weights", "acks"]
    assert written.lines[0] == ("fresher weights", 0.0, 0.25, 2, 0.25)
    assert written.lines[1][3:] == (1, 0.5)
    assert written.longest == [0.125, 0.5]
