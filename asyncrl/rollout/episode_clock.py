"""Keeps the time of an episode, which stands still while its engine sleeps or a scorer has no server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class EpisodeClock:
    """Counts the seconds of an episode, and moves `time_limit` so that it expires after `episode_timeout`
    counted seconds. Seconds of earlier attempts count from `restart` on; waits in `paused` never count."""

    time_limit: asyncio.Timeout
    episode_timeout: float
    earlier_seconds: float = 0.0
    _started_at: float = field(default_factory=_loop_time)  # time of this clock
    _paused_at: float | None = None  # time of this clock while paused
    _paused_seconds: float = 0.0
    _open_pauses: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds that the episode has taken. Threads of agents may read the clock."""
        return self._now() - self._started_at

    @property
    def seconds_left(self) -> float:
        return (self.time_limit.when() or math.inf) - _loop_time()

    def restart(self) -> None:
        """Restart the clock after the recorded turns have been repeated: repeating costs the episode no
        time."""
        self._started_at = self._now() - self.earlier_seconds
        self._reschedule_limit()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the body waits for a sleeping engine, or for a scorer without a server. The
        waits of rows that are sampled side by side may overlap."""
        if not self._open_pauses:
            self._paused_at = self._now()
            self._reschedule_limit()

        self._open_pauses += 1
        try:
            yield
        finally:
            self._open_pauses -= 1
            if not self._open_pauses and self._paused_at is not None:
                self._paused_seconds = _loop_time() - self._paused_at
                self._paused_at = None  # last, because agents' threads read the clock
                self._reschedule_limit()

    def _now(self) -> float:
        """Return the event loop's time, less the seconds for which the clock was paused."""
        paused_at = self._paused_at  # read once: a thread may ask while the pause ends
        return _loop_time() - self._paused_seconds if paused_at is None else paused_at

    def _reschedule_limit(self) -> None:
        deadline = self._started_at + self.episode_timeout + self._paused_seconds
        with suppress(RuntimeError):  # the episode is over
            self.time_limit.reschedule(deadline if self._paused_at is None else None)
