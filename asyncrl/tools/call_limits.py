"""Limits of one tool over all episodes of a worker: how many calls at once, how many per second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from asyncrl.isolation.calls import CallTimeout
from asyncrl.tools.base import Tool
from asyncrl.tools.process import ToolPool

MAX_ABANDONED = 100  # calls of one tool that still run after their deadlines; with more it is not called


class CallLimits:
    """`live`: calls that have begun and not really ended. They may outlive the wait for them: threads cannot
    be stopped, and coroutines may ignore cancellation."""

    def __init__(self, tool: Tool) -> None:
        self.live: set[object] = set()
        most = tool.concurrency or (os.cpu_count() if tool.process else None)
        self.processes = ToolPool(tool, most or 1) if tool.process else None
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
            stack.callback(self._leave)
            yield

    def _leave(self) -> None:
        self._awaited -= 1

    async def _pace(self) -> None:
        """Only a call that begins delays the next one; a call that gives up does not."""
        if not self._pause:
            return
        async with self._turn:
            begin = max(asyncio.get_running_loop().time(), self._next)
            await asyncio.sleep(begin - asyncio.get_running_loop().time())
            self._next = begin + self._pause
