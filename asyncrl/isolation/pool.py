"""A pool of children that do the same: started when they are needed, kept, and replaced when they break.

call ──► wait for a place ──► an idle child, or a new one ──► ask ──► idle again, or killed
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import Child, ChildError, Service

KILL_SECONDS = 5.0  # that `close` waits for the end of the children
MAX_REFUSALS = 3  # children that could not begin, where none ever could; after them tries are far apart
RETRY_SECONDS = 30.0  # between those tries; calls in between are told the last refusal at once

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")


class ProcessPool(Generic[S, Q, A]):
    """Up to `size` children of a service, each begun with `first` within `start_seconds`. `name` is what
    errors call a child, `largest` how many bytes it may answer at once, `env` its environment variables
    (None: ours). It belongs to one event loop.

    A start that its call stops waiting for goes on, for the next call. Where no child could ever begin, each
    try may read a model for a minute before it fails: after MAX_REFUSALS they are RETRY_SECONDS apart.
    """

    def __init__(
        self,
        service: Service[S, Q, A],
        first: S,
        *,
        name: str,
        size: int,
        largest: int,
        start_seconds: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._service = service
        self._first = first
        self._name = name
        self._largest = largest
        self._env = env
        self._start_seconds = start_seconds
        self._places = asyncio.Semaphore(size)
        self._warming = asyncio.Lock()
        self._warm = False  # a child has been ready
        self._refusals = 0  # of children that said why they cannot begin, until one is ready
        self._last_refusal = ""
        self._next_try = 0.0  # the loop's time
        self._closed = False
        self._idle: list[Child[S, Q, A]] = []
        self._spare: list[asyncio.Task[Child[S, Q, A]]] = []  # starts that no call waits for
        self.children: set[Child[S, Q, A]] = set()  # but for those that have ended
        self.starts: set[asyncio.Task[Child[S, Q, A]]] = set()  # under way

    async def call(self, request: Q, seconds: float = math.inf, patience: float = math.inf) -> A:
        """The answer of a child, which may take `seconds` from when it is asked; the call waits for a place
        at most `patience`. CallTimeout when the answer is, and ChildError."""
        try:
            async with asyncio.timeout(None if math.isinf(patience) else patience):
                await self._places.acquire()
        except TimeoutError:
            raise ChildError(f"{self._name} was not free for {patience:g} s") from None
        try:
            child = await self._take()
            try:
                return await child.ask(request, seconds)
            finally:
                self._put(child)
        finally:
            self._places.release()

    async def warm(self) -> None:
        """Return when a child has been ready: one starts, and all wait for it. ChildError."""
        try:
            async with asyncio.timeout(self._start_seconds), self._warming:
                if not self._warm:
                    self._put(await self._take())
        except TimeoutError:
            raise self._late() from None

    async def close(self) -> None:
        """Kill all children, busy ones too, and start no more; wait for their end, but not for ever."""
        self._closed = True
        for start in self.starts:
            start.cancel()
        for child in self.children:
            child.kill()
        if ends := [asyncio.ensure_future(child.gone()) for child in self.children]:
            await asyncio.wait(ends, timeout=KILL_SECONDS)
        for child in self.children:
            child.kill(last=True)
        self.children.clear()

    def _put(self, child: Child[S, Q, A]) -> None:
        if child.usable:
            self._idle.append(child)
        else:
            child.kill()

    async def _take(self) -> Child[S, Q, A]:
        """Return an idle child, or a new one."""
        while self._idle:
            if (child := self._idle.pop()).usable:
                return child
            child.kill()
        start = self._next_start()
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if start.cancelled():
                raise self._closed_error() from None
            self._spare.append(start)
            raise

    def _next_start(self) -> asyncio.Task[Child[S, Q, A]]:
        """A start whose call stopped waiting, or a new one."""
        while self._spare:
            start = self._spare.pop()
            if not start.done() or (not _failed(start) and start.result().usable):
                return start
        start = asyncio.create_task(self._start())
        self.starts.add(start)
        start.add_done_callback(self.starts.discard)
        start.add_done_callback(_failed)  # else asyncio logs an error that no call waits for
        return start

    async def _start(self) -> Child[S, Q, A]:
        if self._closed:
            raise self._closed_error()
        now = asyncio.get_running_loop().time
        if not self._warm and self._refusals >= MAX_REFUSALS and now() < self._next_try:
            raise ChildError(self._last_refusal)
        child = await Child.start(self._service, self._name, self._largest, self._env)
        self.children = {child} | {other for other in self.children if not other.ended}
        try:
            await child.open(self._first, self._start_seconds)
        except CallTimeout:
            raise self._late() from None
        except ChildError as error:
            text = f"{self._name} cannot start: {error}"
            if child.usable:  # it answered; one that was killed says nothing about the next one
                self._refusals += 1
                self._last_refusal = text
                self._next_try = now() + RETRY_SECONDS
            child.kill()
            raise ChildError(text) from None
        self._warm = True
        return child

    def _closed_error(self) -> ChildError:
        return ChildError(f"{self._name} does not start any more: its pool is closed")

    def _late(self) -> ChildError:
        return ChildError(f"{self._name} was not ready within {self._start_seconds:g} s")


def _failed(start: asyncio.Task[Any]) -> bool:
    return start.cancelled() or start.exception() is not None
