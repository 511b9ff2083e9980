"""Runs reward functions in child processes: a function that blocks or crashes ends its own process only.

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

MAX_PROCESSES = min(4, os.cpu_count() or 1)  # processes per reward function
LOAD_SECONDS = 300.0  # to import the function and call its `load`, which may read a model
# Deadlines that a call waits for a free process; a running call ends within one deadline.
MAX_WAIT_DEADLINES = 10
MAX_ANSWER_BYTES = 1 << 20  # bytes


class RewardPool:
    """Calls one function in up to `size` processes, which start on demand and stay."""

    def __init__(self, source: RewardSource, size: int = MAX_PROCESSES) -> None:
        self._pool = ProcessPool(
            SCORING_SERVICE,
            source,
            name="the reward process",
            size=size,
            max_answer_bytes=MAX_ANSWER_BYTES,
            start_seconds=LOAD_SECONDS,
        )

        self.close = self._pool.close

    async def call(self, episode: RewardInput, seconds: float) -> RewardResult:
        """Return the function's result. The call may last `seconds`, the wait for a process
        MAX_WAIT_DEADLINES times as long, and loading the first process LOAD_SECONDS. RewardError for a failed
        call, CallTimeout for a late call."""
        try:
            await self._pool.warm()
            return await self._pool.call(episode, seconds, MAX_WAIT_DEADLINES * seconds)
        except ChildError as error:
            raise RewardError(str(error)) from None


def _load_scorer(source: RewardSource) -> Callable[[RewardInput], RewardResult]:
    """Load the reward, in the child. No event loop runs around sync code, so sync code may start a loop."""
    reward = load_reward(source)
    reward.load()

    def score(episode: RewardInput) -> RewardResult:
        try:
            result = reward.function(episode)
            return as_result(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        except BaseException as error:  # also SystemExit, so that the error names file and line
            raise RewardError(describe(error)) from None

    return score


async def _awaited(result: Any) -> Any:
    return await result


SCORING_SERVICE = Service(
    "asyncrl.rewards.process:SCORING_SERVICE", _load_scorer, RewardSource, RewardInput, RewardResult
)
