"""Reward functions in child processes: one that blocks, crashes or never returns ends its process only.

worker: RewardPool.call ──RewardInput──► child: load once, then one call at a time ──RewardResult──► worker
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any

from asyncrl.errors import describe
from asyncrl.isolation.child import ChildError, Service
from asyncrl.isolation.pool import ProcessPool
from asyncrl.rewards.base import RewardError, RewardInput, as_result
from asyncrl.rewards.loading import RewardSource, load_reward
from asyncrl.types import RewardResult

SIZE = min(4, os.cpu_count() or 1)  # processes per reward function
LOAD_SECONDS = 300.0  # to import the function and call its `load`, which may read a model
PATIENCE = 10  # deadlines that a call waits for a free process; each running call frees one within a deadline
MAX_ANSWER = 1 << 20  # bytes


class RewardPool:
    """Up to `size` processes for one function, started when they are needed and kept."""

    def __init__(self, source: RewardSource, size: int = SIZE) -> None:
        self._pool = ProcessPool(
            SCORING,
            source,
            name="the reward process",
            size=size,
            largest=MAX_ANSWER,
            start_seconds=LOAD_SECONDS,
        )
        self.close = self._pool.close

    async def call(self, given: RewardInput, seconds: float) -> RewardResult:
        """The function's result. The call may last `seconds`, the wait for a process PATIENCE times that,
        and the first process LOAD_SECONDS to load. RewardError, and CallTimeout when the call is."""
        try:
            await self._pool.warm()
            return await self._pool.call(given, seconds, PATIENCE * seconds)
        except ChildError as error:
            raise RewardError(str(error)) from None


def _loaded(source: RewardSource) -> Callable[[RewardInput], RewardResult]:
    """Load the reward, in the child. Sync code finds no running loop, so that it may start one."""
    reward = load_reward(source)
    reward.load()

    def score(given: RewardInput) -> RewardResult:
        try:
            result = reward.function(given)
            return as_result(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        except BaseException as error:  # SystemExit, too, so that the error names its place
            raise RewardError(describe(error)) from None

    return score


async def _awaited(result: Any) -> Any:
    return await result


SCORING = Service("asyncrl.rewards.process:SCORING", _loaded, RewardSource, RewardInput, RewardResult)
