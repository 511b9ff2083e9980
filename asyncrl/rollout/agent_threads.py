"""Where agent functions run: beside the worker's loop, which answers their requests and cannot wait for them.

Coroutine functions share one loop in a thread of its own: one that blocks keeps other agents waiting, never
the engine. Other functions get a thread each.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.errors import one_line
from asyncrl.gateway import Agent, Endpoint
from asyncrl.isolation.foreign import in_thread
from asyncrl.types import Sample

CLOSE = 5.0  # seconds that a cancelled agent has for its own clean-up


class AgentThreads:
    """Owner of the second loop, which is started with the first agent that needs it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, agent: Agent, sample: Sample, endpoint: Endpoint) -> Any:
        """What the agent returns. Raises what it raises; when cancelled, after it was cancelled, too."""
        call = functools.partial(agent, sample, endpoint)
        if not inspect.iscoroutinefunction(inspect.unwrap(getattr(agent, "func", agent))):
            result = await in_thread(call, "agent")
            if not inspect.isawaitable(result):
                return result
            call = functools.partial(_awaited, result)
        return await self._beside(call)

    def close(self) -> None:
        """Let the thread end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _beside(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        there, done = self._started(), asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[Any]] = []

        def begin() -> None:
            tasks.append(there.create_task(_contained(call)))
            tasks[0].add_done_callback(functools.partial(_report, done))

        there.call_soon_threadsafe(begin)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.wait([done], timeout=CLOSE)
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="agents").start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _awaited(result: Any) -> Any:
    return await result


async def _contained(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """These would end the loop of all agents."""
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(one_line(error)) from error


def _report(done: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    """Hand the outcome to the worker's loop."""
    home = done.get_loop()
    if not home.is_closed():
        home.call_soon_threadsafe(_settle, done, task)


def _settle(done: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    if task.cancelled():  # by itself, if anybody is still waiting: a failure, not our own end
        done.set_exception(RuntimeError("the agent was cancelled by its own code"))
        done.exception()
    elif (error := task.exception()) is not None:
        done.set_exception(error)
        done.exception()  # it may be that nobody waits any more
    else:
        done.set_result(task.result())
