"""Measures how a rank spends its time: every second belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Phases nest: an inner one interrupts the outer. Waiting is idle, all else busy, so the two add up to
    the wall time since the stopwatch was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = self._lap_at = clock()
        self._phase, self._waiting = "", False
        self._busy = self._idle = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, *, waiting: bool = False) -> Iterator[None]:
        """The body's time is spent on `name`."""
        self._charge()
        outer = self._phase, self._waiting
        self._phase, self._waiting = name, waiting
        try:
            yield
        finally:
            self._charge()
            self._phase, self._waiting = outer

    @property
    def busy_s(self) -> float:
        """Seconds so far, those of a phase under way included."""
        self._charge()
        return self._busy

    @property
    def idle_s(self) -> float:
        """Likewise, of waiting."""
        self._charge()
        return self._idle

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last lap: in all, and of each phase."""
        self._charge()
        whole, self._lap_at = self._since - self._lap_at, self._since
        seconds, self._seconds = self._seconds, {}
        return whole, seconds

    def _charge(self) -> None:
        now = self._clock()
        spent, self._since = now - self._since, now
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + spent
        if self._waiting:
            self._idle += spent
        else:
            self._busy += spent
