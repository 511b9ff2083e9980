"""How busy an engine is: totals for the heartbeat, coalesced intervals for the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Recorder(Protocol):
    """What is used of a timeline. Times are wall-clock, so that processes line up."""

    def record(self, name: str, start: float, end: float) -> None: ...


class BusyTimer:
    """Busy while at least one turn is being sampled. The totals decide how much is sampled at once, so they
    are of a clock that cannot be set; only the intervals are of the `wall` clock."""

    def __init__(
        self,
        timeline: Recorder,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._timeline, self._clock, self._wall = timeline, clock, wall
        self._born = self._since = clock()
        self._running = 0
        self._busy = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The body samples a turn."""
        if not self._running:
            self._since = self._clock()
        self._running += 1
        try:
            yield
        finally:
            if self._running == 1:
                self.flush()
            self._running -= 1

    def flush(self) -> None:
        """Write the interval so far: a crash loses no more than the time since the last flush."""
        if self._running:
            now, end = self._clock(), self._wall()
            self._timeline.record("decode", end - (now - self._since), end)
            self._busy += now - self._since
            self._since = now

    @property
    def seconds(self) -> tuple[float, float]:
        """(busy, idle) since the start."""
        now = self._clock()
        busy = self._busy + (now - self._since if self._running else 0.0)
        return busy, now - self._born - busy
