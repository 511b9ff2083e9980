"""Waiting by name: what a worker's tasks wait for and until when, for the heartbeat and for the timeline."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.runtime.activity import Activity

FRESHER = "fresher weights"  # how the timeline calls a turn's wait for an engine that it may use
MIN_REPORTED = 1.0  # seconds; shorter waits are normal and not reported


class Notifier:
    """Wakes all tasks that wait for a condition, to check it again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


class Waits:
    """The waits under way in one process, oldest first; `activity` records them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, activity: Activity | None = None) -> None:
        self._clock, self._activity = clock, activity
        self._open: dict[int, tuple[float, str, float]] = {}  # since when, for what, until when
        self._numbers = itertools.count()

    @contextmanager
    def named(self, name: str, seconds: float = 0.0, span: str = "") -> Iterator[None]:
        """The body waits for what `name` says; `seconds`: the deadline that this has of its own; `span`: its
        name in the timeline, where `name` has numbers that change."""
        number, now = next(self._numbers), self._clock()
        self._open[number] = (now, name, now + seconds)
        begun = self._activity.begin(span or name) if self._activity else ""
        try:
            yield
        finally:
            del self._open[number]
            if self._activity:
                self._activity.end(begun)

    def longest(self) -> str:
        """The oldest wait if it is longer than MIN_REPORTED, with the number of such waits; else ''."""
        if not self._open:
            return ""
        since, name, _ = next(iter(self._open.values()))
        seconds = self._clock() - since
        if seconds < MIN_REPORTED:
            return ""
        same = sum(other == name for _, other, _ in self._open.values())
        return f"{name} ({seconds:.0f} s{f', {same} episodes' if same > 1 else ''})"

    @property
    def in_time(self) -> bool:
        """A wait with a deadline of its own is not over that: however long it is, it is no stall."""
        now = self._clock()
        return any(now < until for _, _, until in self._open.values())
