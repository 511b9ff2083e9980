"""Limits of tools, and tools in processes of their own (`process=True`): what runs past its deadline is
killed, with its children.

CallLimits.call_process ──text of the arguments──► child: the tool ──ToolAnswer──► the caller
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
from asyncrl.isolation.child import Service, inherited
from asyncrl.isolation.pool import ProcessPool
from asyncrl.registry import load_object
from asyncrl.tools.base import MAX_REPLY, Tool, ToolError, reply_of, within_memory

START_SECONDS = 60.0  # for a child to import what the tool needs
MAX_ANSWER = 2 * MAX_REPLY  # bytes
MAX_ABANDONED = 100  # calls of one tool that still run after their deadlines; with more it is not called


class ToolSource(msgspec.Struct, frozen=True):
    """Tells a child which tool it runs: a function, or a factory with its arguments, as `module:name`."""

    spec: str
    arguments: dict[str, Any]


class ToolAnswer(msgspec.Struct, frozen=True):
    """The result of a call. `refused`: the tool raised ToolError, with the content as its text."""

    content: str
    reward: float = 0.0
    refused: bool = False


def source_of(tool: Tool) -> ToolSource:
    """Return how a child imports the tool. ConfigError when it has no importable name."""
    made = tool.function
    arguments = {}
    if isinstance(tool.remake, partial):
        made = tool.remake.func
        arguments = tool.remake.keywords
    module = made.__module__
    name = made.__qualname__
    if not name.isidentifier():
        raise ConfigError(f"tool {tool.name!r}: process=True needs a function at the top level of its file")
    if module == "__main__" or module.startswith("asyncrl_user_"):  # not importable by name
        module = os.path.abspath(sys.modules[module].__file__ or "")
    return ToolSource(f"{module}:{name}", arguments)


def _loaded(source: ToolSource) -> Callable[[str], ToolAnswer]:
    """Load the tool, in the child."""
    found = load_object(source.spec, "tool")
    tool = found if isinstance(found, Tool) else found(**source.arguments)
    assert isinstance(tool, Tool)

    def call(arguments: str) -> ToolAnswer:
        try:
            return ToolAnswer(*reply_of(tool.function(**tool.decode(arguments))))
        except ToolError as error:
            return ToolAnswer(within_memory(str(error)), refused=True)

    return call


CALLS = Service("asyncrl.tools.process:CALLS", _loaded, ToolSource, str, ToolAnswer)


# -- limits over all episodes of a worker: how many calls at once, how many per second ---------------------


class CallLimits:
    """`live`: calls that have begun and not really ended. They may outlive the wait for them: threads cannot
    be stopped, and coroutines may ignore cancellation. `pool`: with `process=True`, as many processes as
    calls run side by side."""

    def __init__(self, tool: Tool) -> None:
        self.live: set[object] = set()
        most = tool.concurrency or (os.cpu_count() if tool.process else None)
        self.pool: ProcessPool[ToolSource, str, ToolAnswer] | None = None
        if tool.process:
            self.pool = ProcessPool(
                CALLS,
                source_of(tool),
                name="the process of the tool",
                size=most or 1,
                largest=MAX_ANSWER,
                start_seconds=START_SECONDS,
                env=inherited(tool.env),
            )
        self._places = asyncio.Semaphore(most) if most else None
        self._pause = 1 / tool.rate if tool.rate else 0.0
        self._next = 0.0  # the loop's time at which a call may begin
        self._turn = asyncio.Lock()  # of those that wait for it, in their order
        self._awaited = 0

    @asynccontextmanager
    async def place(self, seconds: float) -> AsyncIterator[None]:
        """The body is one call. CallTimeout when it cannot begin within `seconds`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    if self._places is not None:
                        await stack.enter_async_context(self._places)
                    await self._pace()
            except TimeoutError:
                raise CallTimeout(f"the tool is busy: the call did not begin within {seconds:g} s") from None
            if (abandoned := len(self.live) - self._awaited) >= MAX_ABANDONED:
                raise CallTimeout(f"the tool is out of order: {abandoned} earlier calls have not ended")
            self._awaited += 1
            try:
                yield
            finally:
                self._awaited -= 1

    async def call_process(self, arguments: str) -> tuple[str, float]:
        """(text, reward). ToolError is the tool's own answer; ChildError: it failed, or its process."""
        assert self.pool is not None
        answer = await self.pool.call(arguments)
        if answer.refused:
            raise ToolError(answer.content)
        return answer.content, answer.reward

    async def _pace(self) -> None:
        """Only a call that begins delays the next one; a call that gives up does not."""
        if not self._pause:
            return
        async with self._turn:
            begin = max(asyncio.get_running_loop().time(), self._next)
            await asyncio.sleep(begin - asyncio.get_running_loop().time())
            self._next = begin + self._pause
