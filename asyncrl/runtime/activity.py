"""What the tasks of a process do at once, in few spans: 512 slots have thousands of waits a second.

    begin, end (any number of tasks, by name) ──► one span a name in PERIOD seconds ──► the timeline

Spans of one name are joined while they overlap, or follow within `gap` seconds; each keeps the number of
calls and their seconds together. A process writes at most NAMES * (1 / PERIOD + 1 / gap) lines a second, of
about 120 bytes; NAMES / PERIOD where all names are busy all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

PERIOD = 2.0  # seconds after which a span that goes on is cut; also what a crash may lose
GAP = 0.25  # seconds
NAMES = 32  # at a time; what begins beyond them is recorded as OTHER
OTHER = "other waits"
SHORTEST = 0.001  # seconds together; less is left out


class Recorder(Protocol):
    """What is used of a timeline. Times are wall-clock, so that processes line up."""

    def record(self, name: str, start: float, end: float, **details: object) -> None: ...


class Joined(msgspec.Struct):
    """The span under way of one name, in monotonic seconds."""

    start: float
    changed: float  # when `running` last changed
    running: int = 0
    calls: int = 0
    seconds: float = 0.0

    def advance(self, now: float) -> None:
        self.seconds += self.running * (now - self.changed)
        self.changed = now


class Activity:
    """Durations are of a clock that cannot be set; only where spans lie is of the `wall` clock. `gap` 0:
    spans of one name are joined only while they overlap, and written when the last of them ends."""

    def __init__(
        self,
        timeline: Recorder,
        gap: float = GAP,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._timeline, self._gap, self._clock, self._wall = timeline, gap, clock, wall
        self._joined: dict[str, Joined] = {}
        self._flushed = clock()

    def begin(self, name: str) -> str:
        """A task begins. Returns the name to `end` it with."""
        now = self._clock()
        if name not in self._joined and len(self._joined) >= NAMES:
            name = OTHER
        joined = self._joined.get(name)
        if joined is None or (not joined.running and now - joined.changed > self._gap):
            if joined is not None:
                self._write(name, joined, now)
            joined = self._joined[name] = Joined(now, now)
        joined.advance(now)
        joined.running += 1
        joined.calls += 1
        return name

    def end(self, name: str) -> None:
        """A task of this name ends."""
        now, joined = self._clock(), self._joined[name]
        joined.advance(now)
        joined.running -= 1
        if not joined.running and not self._gap:
            self._write(name, self._joined.pop(name), now)

    def tick(self) -> None:
        """To be called now and then: every PERIOD seconds it writes what there is."""
        if self._clock() - self._flushed >= PERIOD:
            self.flush()

    def flush(self) -> None:
        """Write the spans so far; those that go on begin anew."""
        now = self._flushed = self._clock()
        for name, joined in list(self._joined.items()):
            if joined.running:
                joined.advance(now)
                self._joined[name] = Joined(now, now, joined.running)
            else:
                del self._joined[name]
            self._write(name, joined, now)

    def _write(self, name: str, joined: Joined, now: float) -> None:
        if joined.seconds >= SHORTEST or not self._gap:
            ahead = self._wall() - now
            start, end = joined.start + ahead, joined.changed + ahead
            self._timeline.record(name, start, end, calls=joined.calls, seconds=round(joined.seconds, 6))
