"""A pool of children of one service: started on demand, reused, and replaced when they break.

call ──► wait for a slot ──► an idle child, or a new child ──► ask ──► idle again, or killed
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import Child, ChildError, Service

KILL_SECONDS = 5.0  # `close` waits so long for the end of the children
MAX_REFUSALS = 3  # after so many children that could not start, if none ever could, tries are far apart
RETRY_SECONDS = 30.0  # between tries that are far apart; calls in between fail at once with the last refusal

SetupT = TypeVar("SetupT")
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class ProcessPool(Generic[SetupT, RequestT, AnswerT]):
    """Keep up to `size` children of a service, each opened with `first_message` within `start_seconds`.
    `name`: the name of a child in errors; `max_answer_bytes`: the bytes of an answer at most; `env`: the
    environment variables of the children (None: ours). A pool belongs to one event loop.

    A start whose call stops waiting goes on for the next call. If no child could ever start, each try may
    read a model for a minute before failing: after MAX_REFUSALS, tries are RETRY_SECONDS apart.
    """

    def __init__(
        self,
        service: Service[SetupT, RequestT, AnswerT],
        first_message: SetupT,
        *,
        name: str,
        size: int,
        max_answer_bytes: int,
        start_seconds: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._service = service
        self._first_message = first_message
        self._name = name
        self._max_answer_bytes = max_answer_bytes
        self._env = env
        self._start_seconds = start_seconds

        self._free_slots = asyncio.Semaphore(size)
        self._warm_lock = asyncio.Lock()
        self._was_ready = False  # a child has been ready
        self._refusals = 0  # children that answered why they cannot start; 0 again when one is ready
        self._last_refusal = ""
        self._next_try = 0.0  # the loop's time
        self._closed = False

        self._idle_children: list[Child[SetupT, RequestT, AnswerT]] = []
        self._unclaimed_starts: list[
            asyncio.Task[Child[SetupT, RequestT, AnswerT]]
        ] = []  # starts that no call waits for
        self.children: set[Child[SetupT, RequestT, AnswerT]] = set()  # some may have ended
        self.starts: set[asyncio.Task[Child[SetupT, RequestT, AnswerT]]] = set()  # under way

    async def call(
        self, request: RequestT, seconds: float = math.inf, slot_seconds: float = math.inf
    ) -> AnswerT:
        """Return the answer of a child, which has `seconds` from the request on; the call waits for a free
        slot at most `slot_seconds`. CallTimeout: the answer is late. ChildError: no slot became free, no
        child can start, or see Child.ask."""
        try:
            async with asyncio.timeout(None if math.isinf(slot_seconds) else slot_seconds):
                await self._free_slots.acquire()
        except TimeoutError:
            raise ChildError(f"{self._name} was busy for {slot_seconds:g} s") from None

        try:
            child = await self._take_child()
            try:
                return await child.ask(request, seconds)
            finally:
                self._put_child_back(child)
        finally:
            self._free_slots.release()

    async def warm(self) -> None:
        """Return once a child has been ready: one child starts, and all callers wait. ChildError."""
        try:
            async with asyncio.timeout(self._start_seconds), self._warm_lock:
                if not self._was_ready:
                    self._put_child_back(await self._take_child())
        except TimeoutError:
            raise self._timeout_error() from None

    async def close(self) -> None:
        """Kill all children, also busy children, and start no more; wait up to KILL_SECONDS for the end."""
        self._closed = True

        for start in self.starts:
            start.cancel()
        for child in self.children:
            child.kill()

        if child_exits := [asyncio.ensure_future(child.wait_for_exit()) for child in self.children]:
            await asyncio.wait(child_exits, timeout=KILL_SECONDS)

        for child in self.children:
            child.kill(without_wrapper=True)
        self.children.clear()

    def _put_child_back(self, child: Child[SetupT, RequestT, AnswerT]) -> None:
        if child.is_usable:
            self._idle_children.append(child)
        else:
            child.kill()

    async def _take_child(self) -> Child[SetupT, RequestT, AnswerT]:
        """Return an idle child, or a new child."""
        while self._idle_children:
            if (child := self._idle_children.pop()).is_usable:
                return child
            child.kill()

        child_start = self._next_start()
        try:
            return await asyncio.shield(child_start)
        except asyncio.CancelledError:
            if child_start.cancelled():
                raise self._closed_error() from None
            self._unclaimed_starts.append(child_start)
            raise

    def _next_start(self) -> asyncio.Task[Child[SetupT, RequestT, AnswerT]]:
        """Return a start whose call stopped waiting, or a new start."""
        while self._unclaimed_starts:
            child_start = self._unclaimed_starts.pop()
            if not child_start.done() or (not _has_failed(child_start) and child_start.result().is_usable):
                return child_start

        child_start = asyncio.create_task(self._start_child())
        self.starts.add(child_start)
        child_start.add_done_callback(self.starts.discard)
        # Reads the error: asyncio logs errors that were never retrieved
        child_start.add_done_callback(_has_failed)
        return child_start

    async def _start_child(self) -> Child[SetupT, RequestT, AnswerT]:
        if self._closed:
            raise self._closed_error()

        loop_time = asyncio.get_running_loop().time
        if not self._was_ready and self._refusals >= MAX_REFUSALS and loop_time() < self._next_try:
            raise ChildError(self._last_refusal)

        child = await Child.start(self._service, self._name, self._max_answer_bytes, self._env)
        self.children = {child} | {
            running_child for running_child in self.children if not running_child.has_ended
        }

        try:
            await child.open(self._first_message, self._start_seconds)
        except CallTimeout:
            raise self._timeout_error() from None
        except ChildError as error:
            refusal_text = f"{self._name} cannot start: {error}"
            if child.is_usable:  # the child answered; a killed child says nothing about the next child
                self._refusals += 1
                self._last_refusal = refusal_text
                self._next_try = loop_time() + RETRY_SECONDS
            child.kill()
            raise ChildError(refusal_text) from None

        self._was_ready = True
        return child

    def _closed_error(self) -> ChildError:
        return ChildError(f"{self._name} cannot be started, because its pool is closed")

    def _timeout_error(self) -> ChildError:
        return ChildError(f"{self._name} was not ready within {self._start_seconds:g} s")


def _has_failed(start: asyncio.Task[Any]) -> bool:
    return start.cancelled() or start.exception() is not None
