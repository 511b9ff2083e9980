"""Waiting by name: what a worker's tasks wait for, so that a heartbeat can say it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """The waits under way in one process, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, tuple[float, str]] = {}
        self._numbers = itertools.count()

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """The body waits for what `name` says."""
        number = next(self._numbers)
        self._open[number] = (self._clock(), name)
        try:
            yield
        finally:
            del self._open[number]

    def longest(self) -> str:
        """The oldest wait if it is longer than MIN_REPORTED, with the number of such waits; else ''."""
        if not self._open:
            return ""
        since, name = next(iter(self._open.values()))
        seconds = self._clock() - since
        if seconds < MIN_REPORTED:
            return ""
        same = sum(other == name for _, other in self._open.values())
        return f"{name} ({seconds:.0f} s{f', {same} episodes' if same > 1 else ''})"
