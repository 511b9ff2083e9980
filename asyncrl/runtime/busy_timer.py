"""How busy an engine is: totals for the heartbeat, joined spans for the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.runtime.activity import GAP, Activity, Recorder

DECODE = "decode"  # at least one turn is sampled; by a server: `decode on <its name>`


class BusyTimer:
    """Busy while at least one turn is being sampled. The totals decide how much is sampled at once, so they
    are of a clock that cannot be set; only the spans are of the `wall` clock."""

    def __init__(
        self,
        timeline: Recorder,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._all, self._servers = (Activity(timeline, gap, clock, wall) for gap in (0.0, GAP))
        self._born = self._since = clock()
        self._running = 0
        self._busy = 0.0

    @contextmanager
    def turn(self, server: str = "") -> Iterator[None]:
        """The body samples a turn, on a server of this name or an engine of its own."""
        if not self._running:
            self._since = self._clock()
        self._running += 1
        self._all.begin(DECODE)
        named = server and self._servers.begin(f"{DECODE} on {server}")
        try:
            yield
        finally:
            if named:
                self._servers.end(named)
            self._all.end(DECODE)
            self._running -= 1
            if not self._running:
                self._busy += self._clock() - self._since

    def tick(self) -> None:
        """To be called now and then: what is not written yet, a crash loses."""
        self._all.tick()
        self._servers.tick()

    def flush(self) -> None:
        """Write the spans so far."""
        self._all.flush()
        self._servers.flush()

    @property
    def seconds(self) -> tuple[float, float]:
        """(busy, idle) since the start."""
        now = self._clock()
        busy = self._busy + (now - self._since if self._running else 0.0)
        return busy, now - self._born - busy
