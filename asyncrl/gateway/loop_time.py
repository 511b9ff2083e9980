"""Limits the loop time of a worker that the agents of each episode may take.

All input of an episode costs the worker's loop time: one-byte chunks, broken requests, large JSON. An episode
that takes more than its share is held: its connections are not read, and its requests are not decoded, until
the share has grown again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from types import coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")

LOOP_FRACTION = 0.25  # fraction of the loop's time for all held episodes together
LOOP_BURST = 0.5  # seconds of the loop's time that an episode may take at once
MIN_HELD_SECONDS = 0.05  # shortest time that an episode is held
MAX_HELD_SECONDS = 10.0  # longest time until the hold of an episode is decided anew


class _EpisodeTime:
    """The loop time that a running episode has left: seconds of CPU, which grow with LOOP_FRACTION. The
    episode is held while it is not `released`."""

    def __init__(self) -> None:
        self.seconds_left = LOOP_BURST
        self._updated_at = time.monotonic()
        self.released = asyncio.Event()
        self.released.set()
        # While the episode is held, the timer runs until the hold is decided anew.
        self.release_timer: asyncio.TimerHandle | None = None
        self._timeouts: dict[asyncio.Timeout, float] = {}  # timeouts with seconds

    @property
    def is_held(self) -> bool:
        return not self.released.is_set()

    def spend_seconds(self, seconds: float, fraction: float) -> None:
        """Spend so many seconds. `fraction`: the part of each second that was earned since the last call."""
        now = time.monotonic()
        seconds_left = min(LOOP_BURST, self.seconds_left + (now - self._updated_at) * fraction) - seconds
        self.seconds_left = max(seconds_left, -MAX_HELD_SECONDS * fraction)
        self._updated_at = now

    def hold_episode(self) -> None:
        self.released.clear()
        self._restart_timeouts()

    def release_episode(self) -> None:
        if self.release_timer is not None:
            self.release_timer.cancel()
        self.released.set()
        self._restart_timeouts()

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after so many seconds, which begin anew with each release."""
        async with asyncio.timeout(None if self.is_held else seconds) as timeout:
            self._timeouts[timeout] = seconds
            try:
                yield
            finally:
                del self._timeouts[timeout]

    def _restart_timeouts(self) -> None:
        now = asyncio.get_running_loop().time()
        for timeout, seconds in self._timeouts.items():
            if not timeout.expired():
                timeout.reschedule(None if self.is_held else now + seconds)


class LoopTimes:
    """The loop time of all running episodes. `hold_connections`, called with an episode and a flag, stops
    reading the episode's connections (True), or reads on (False)."""

    def __init__(self, hold_connections: Callable[[object, bool], None]) -> None:
        self._hold_connections = hold_connections
        self._episode_times: dict[object, _EpisodeTime] = {}  # by running episode

    def begin_episode(self, episode: object) -> None:
        """Count the loop time of this episode from now on."""
        self._episode_times[episode] = _EpisodeTime()

    def end_episode(self, episode: object) -> None:
        """Forget the episode. Requests that wait to be decoded go on."""
        self._episode_times.pop(episode).release_episode()

    def is_held(self, episode: object) -> bool:
        episode_time = self._episode_times.get(episode)
        return episode_time is not None and episode_time.is_held

    async def until_released(self, episode: object) -> None:
        """Wait until the episode may take more of the loop's time, or has ended. Requests go on one after the
        other: each request may make the next request wait again."""
        episode_time = self._episode_times.get(episode)
        while episode_time is not None and episode_time.is_held:
            await episode_time.released.wait()

    def reading_timeout(self, episode: object, seconds: float) -> AbstractAsyncContextManager[None]:
        """Raise TimeoutError in the body after so many seconds, which begin anew whenever the episode is
        released."""
        return self._episode_times[episode].timeout(seconds)

    @coroutine
    def charge_steps(
        self, work: Coroutine[Any, Any, T], current_episode: Callable[[], object]
    ) -> Generator[Any, Any, T]:
        """Await `work`, and charge the loop time of each step to the episode that `current_episode` returns
        after the step."""
        steps = work.__await__()
        step: Callable[[], Any] = partial(next, steps)

        while True:
            started = time.thread_time()
            try:
                awaited = step()
            except StopIteration as end:
                return cast(T, end.value)
            finally:
                self.charge_episode(current_episode(), time.thread_time() - started)

            try:
                yield awaited
                step = partial(next, steps)
            except BaseException as error:
                step = partial(steps.throw, error)

    @contextmanager
    def charging_episode(self, episode: object) -> Iterator[None]:
        """Charge this episode for the loop time of the body, which does not wait."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.charge_episode(episode, time.thread_time() - started)

    def charge_episode(self, episode: object, seconds: float) -> None:
        """Charge loop time to an episode (nothing is counted for None or an ended episode). An episode that
        took too much is held."""
        episode_time = self._episode_times.get(episode)
        if episode_time is None:
            return

        episode_time.spend_seconds(seconds, self._loop_fraction(episode_time))
        if episode_time.seconds_left < 0 and not episode_time.is_held:
            episode_time.hold_episode()
            self._wait_for_share(episode, episode_time)
            self._hold_connections(episode, True)

    def _wait_for_share(self, episode: object, episode_time: _EpisodeTime) -> None:
        debt_seconds = -episode_time.seconds_left / self._loop_fraction(episode_time)
        wait_seconds = min(MAX_HELD_SECONDS, max(MIN_HELD_SECONDS, debt_seconds))
        loop = asyncio.get_running_loop()
        episode_time.release_timer = loop.call_later(wait_seconds, self._release, episode, episode_time)

    def _release(self, episode: object, episode_time: _EpisodeTime) -> None:
        """Release a held episode, or let it wait again if it still owes loop time."""
        episode_time.spend_seconds(0.0, self._loop_fraction(episode_time))
        if episode_time.seconds_left < 0:  # charged meanwhile, or owes more than MAX_HELD_SECONDS earn
            self._wait_for_share(episode, episode_time)
            return

        episode_time.release_episode()
        self._hold_connections(episode, False)

    def _loop_fraction(self, episode_time: _EpisodeTime) -> float:
        """Return the fraction of the loop's time that an episode gets: all held episodes share one
        fraction."""
        if not episode_time.is_held:
            return LOOP_FRACTION
        return LOOP_FRACTION / sum(episode_time.is_held for episode_time in self._episode_times.values())
