"""One reward call: foreign code, bounded in time and kept off the event loop."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.types import Sample

THREADS = 8  # reward calls of one worker that run at once

Result = float | Mapping[str, Any]
Reward = Callable[[str, str, Any, dict[str, Any]], Result | Awaitable[Result]]


class RewardError(AsyncrlError):
    """The reward function raised, ran out of time or gave back no number."""


class Scorer:
    """Calls a function of verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info).

    A sync function runs in a daemon thread: one that never returns costs its thread, not the worker.
    """

    def __init__(self, reward: Reward, timeout: float) -> None:
        self._reward, self._timeout = reward, timeout
        self._is_async = inspect.iscoroutinefunction(reward)
        self._threads = asyncio.Semaphore(THREADS)

    async def score(self, sample: Sample, answer: str, extra: Mapping[str, Any]) -> float:
        """The reward of one episode; `extra` is added to the sample's extra_info. Raises RewardError."""
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                ground_truth = msgspec.json.decode(sample.ground_truth)
                info = {**msgspec.json.decode(sample.extra_info), **extra}
                return _number(await self._call(sample.data_source, answer, ground_truth, info))
        except TimeoutError as error:
            if deadline.expired():
                raise RewardError(f"no reward within {self._timeout:g} s") from error
            raise RewardError(one_line(error)) from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(one_line(error)) from error

    async def _call(self, *arguments: Any) -> Any:
        if self._is_async:
            return await self._reward(*arguments)  # type: ignore[misc]
        await self._threads.acquire()
        result = await _in_thread(lambda: self._reward(*arguments), self._threads.release)
        return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[[], Any], ended: Callable[[], None]) -> Any:
    """Run a function in a daemon thread. `ended` is called in the loop when it has really returned, which may
    be long after this coroutine was cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        ended()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as problem:
            error = problem if isinstance(problem, Exception) else RuntimeError(one_line(problem))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name="reward").start()
    return await future


def _number(result: Any) -> float:
    """verl's functions return a number, or a mapping with a `score`."""
    value = float(result["score"] if isinstance(result, Mapping) else result)
    if not math.isfinite(value):
        raise RewardError(f"the reward is {value}")
    return value
