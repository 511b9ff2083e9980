"""Limits of one tool over all episodes of a worker: how many calls at once, how many per second."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from asyncrl.foreign import Late
from asyncrl.tools.base import Tool
from asyncrl.tools.process import Lease, Pool

MOST_STRAYS = 100  # calls of one tool left behind at their deadlines; with more it is not called


class Gate:
    """`live`: calls that have begun and not really ended. They may outlive the wait for them: threads cannot
    be stopped, and coroutines may ignore cancellation."""

    def __init__(self, tool: Tool) -> None:
        self.live: set[object] = set()
        self.pool = Pool(tool) if tool.process else None
        most = tool.concurrency or (os.cpu_count() if tool.process else None)
        self._places = asyncio.Semaphore(most) if most else None
        self._pause = 1 / tool.rate if tool.rate else 0.0
        self._next = 0.0
        self._awaited = 0

    @asynccontextmanager
    async def place(self, seconds: float) -> AsyncIterator[Lease | None]:
        """The body is one call. Late when it cannot begin within `seconds`."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    if self._places is not None:
                        await stack.enter_async_context(self._places)
                    await self._pace()
            except TimeoutError:
                raise Late(f"the tool is busy: the call could not begin within {seconds:g} s") from None
            if (strays := len(self.live) - self._awaited) >= MOST_STRAYS:
                raise Late(f"the tool is out of order: {strays} earlier calls have not ended")
            self._awaited += 1
            stack.callback(self._leave)
            yield await stack.enter_async_context(self.pool.lease()) if self.pool else None

    def _leave(self) -> None:
        self._awaited -= 1

    async def _pace(self) -> None:
        if self._pause:
            now = time.monotonic()
            begin, self._next = self._next, max(now, self._next) + self._pause
            await asyncio.sleep(begin - now)
