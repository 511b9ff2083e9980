"""Limits of tools, and tools in separate processes (`process=True`), where a call that runs past its
deadline is killed, with its children.

CallLimits.pool ──text of the arguments──► child: the tool ──ToolAnswer──► the caller
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import Service, inherited_environment
from asyncrl.isolation.pool import ProcessPool
from asyncrl.registry import load_object
from asyncrl.tools.base import MAX_REPLY_BYTES, Tool, ToolAnswer, ToolError, bound_reply, read_answer
from asyncrl.vision.content import MAX_CONTENT_BYTES
from asyncrl.vision.layout import ImageLayout

START_SECONDS = 60.0  # for a child to import the tool
MAX_TEXT_ANSWER_BYTES = 2 * MAX_REPLY_BYTES
MAX_ABANDONED_CALLS = 100  # with so many calls that still run after their deadlines a tool is not called


class ToolSource(msgspec.Struct, frozen=True):
    """Names the tool that a child runs: a function, or a factory with arguments, as `module:name`.
    `image_layout`: how the model reads images that the tool returns."""

    spec: str
    arguments: dict[str, Any]
    image_layout: ImageLayout | None = None


def find_tool_source(tool: Tool, image_layout: ImageLayout | None = None) -> ToolSource:
    """Return how a child imports the tool. ConfigError: the tool has no importable name."""
    importable = tool.function
    arguments = {}
    if isinstance(tool.remake, partial):
        importable = tool.remake.func
        arguments = tool.remake.keywords

    module_name = importable.__module__
    object_name = importable.__qualname__
    if not object_name.isidentifier():
        raise ConfigError(f"tool {tool.name!r}: process=True needs a function at the top level of its file")

    if module_name == "__main__" or module_name.startswith("asyncrl_user_"):  # not importable by name
        module_name = os.path.abspath(sys.modules[module_name].__file__ or "")
    return ToolSource(f"{module_name}:{object_name}", arguments, image_layout)


def _load_tool_call(source: ToolSource) -> Callable[[str], ToolAnswer]:
    """Load the tool, in the child."""
    loaded_object = load_object(source.spec, "tool")
    tool = loaded_object if isinstance(loaded_object, Tool) else loaded_object(**source.arguments)
    assert isinstance(tool, Tool)

    def call_tool(arguments: str) -> ToolAnswer:
        try:
            return read_answer(tool.function(**tool.decode(arguments)), source.image_layout)
        except ToolError as error:
            return ToolAnswer(bound_reply(str(error)), refused=True)

    return call_tool


CALLS = Service("asyncrl.tools.process:CALLS", _load_tool_call, ToolSource, str, ToolAnswer)


# -- limits over all episodes of a worker: how many calls at once, how many per second ---------------------


class CallLimits:
    """Limits the calls of one tool. `live_calls`: calls that have started and not really ended. A call may
    outlive the wait for its reply, as threads cannot be stopped, and coroutines may ignore cancellation.
    `pool`: with `process=True`, a process for each concurrent call."""

    def __init__(self, tool: Tool, image_layout: ImageLayout | None = None) -> None:
        self.live_calls: set[object] = set()
        max_calls = tool.concurrency or (os.cpu_count() if tool.process else None)
        self.pool: ProcessPool[ToolSource, str, ToolAnswer] | None = None
        if tool.process:
            self.pool = ProcessPool(
                CALLS,
                find_tool_source(tool, image_layout),
                name="the tool's process",
                size=max_calls or 1,
                max_answer_bytes=MAX_TEXT_ANSWER_BYTES + (MAX_CONTENT_BYTES if image_layout else 0),
                start_seconds=START_SECONDS,
                env=inherited_environment(tool.env),
            )
        self._call_slots = asyncio.Semaphore(max_calls) if max_calls else None
        self._call_interval = 1 / tool.rate if tool.rate else 0.0
        self._next_call_time = 0.0  # the loop's time at which a call may start
        self._pace_lock = asyncio.Lock()  # keeps the order of waiting calls
        self._awaited_calls = 0

    @asynccontextmanager
    async def call_slot(self, seconds: float, order_lock: asyncio.Lock | None = None) -> AsyncIterator[None]:
        """Hold `order_lock`, if there is one, and then a slot for one call, the body. CallTimeout: the call
        cannot start within `seconds`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    if order_lock is not None:
                        await stack.enter_async_context(order_lock)
                    if self._call_slots is not None:
                        await stack.enter_async_context(self._call_slots)

                    # Only a call that starts delays the next call; a call that gives up does not.
                    if self._call_interval:
                        clock = asyncio.get_running_loop().time
                        async with self._pace_lock:
                            begin_time = max(clock(), self._next_call_time)
                            await asyncio.sleep(begin_time - clock())
                            self._next_call_time = begin_time + self._call_interval
            except TimeoutError:
                raise CallTimeout(f"the tool is busy: the call did not start within {seconds:g} s") from None

            if (abandoned := len(self.live_calls) - self._awaited_calls) >= MAX_ABANDONED_CALLS:
                raise CallTimeout(f"the tool is not available: {abandoned} earlier calls are still running")

            self._awaited_calls += 1
            try:
                yield
            finally:
                self._awaited_calls -= 1
