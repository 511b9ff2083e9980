"""One reward call and its shaping: foreign code, bounded in time and kept off the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.rewards import RewardFunction, ShapingInput, shape
from asyncrl.rewards import score as score_with
from asyncrl.rewards.shaping import Shaping
from asyncrl.tools.base import in_thread
from asyncrl.types import Sample, Verdict

THREADS = 8  # reward calls of one worker that run at once


class RewardError(AsyncrlError):
    """The reward function or a shaping raised, ran out of time or gave back no number."""


class Scorer:
    """Calls a reward function with a deadline; `shapings` are applied to the episodes that train.

    A sync function runs in a daemon thread: one that never returns costs its thread, not the worker. The
    functions of asyncrl.rewards are known to be quick and run at once.
    """

    def __init__(self, reward: RewardFunction, timeout: float, shapings: Sequence[Shaping] = ()) -> None:
        self._reward, self._timeout, self._shapings = reward, timeout, shapings
        package = getattr(reward, "__module__", "").startswith("asyncrl.rewards")
        self._inline = package or inspect.iscoroutinefunction(reward)
        self._threads = asyncio.Semaphore(THREADS)

    async def score(self, sample: Sample, answer: str, extra: Mapping[str, Any]) -> Verdict:
        """The verdict on one episode; `extra` is added to the sample's extra_info. Raises RewardError."""

        async def call(*, extra_info: dict[str, Any], **arguments: Any) -> Any:
            result = await self._call(extra_info={**extra_info, **extra}, **arguments)
            return await result if inspect.isawaitable(result) else result

        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                return await score_with(call, sample, answer)
        except Exception as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            why = f"no reward within {self._timeout:g} s" if late else one_line(error)
            raise RewardError(why) from error

    def shape(self, given: ShapingInput) -> float:
        """What is added to the reward of an episode. Raises RewardError."""
        try:
            return shape(self._shapings, given)
        except Exception as error:
            raise RewardError(f"algorithm.shaping: {one_line(error)}") from error

    async def _call(self, **arguments: Any) -> Any:
        if self._inline:
            return self._reward(**arguments)
        await self._threads.acquire()
        return await in_thread(lambda: self._reward(**arguments), "reward", self._threads.release)
