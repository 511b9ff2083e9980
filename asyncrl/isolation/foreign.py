"""Running foreign code so that it can neither hold nor hurt those who wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from asyncrl.errors import AsyncrlError, one_line

log = logging.getLogger("asyncrl.worker")

GRACE = 1.0  # seconds for cancelled work to end
SLOW = 0.1  # seconds that a sync function may hold the event loop before the log says so
MOST_STRAYS = 100  # threads in calls that were left behind; with more no OwnThread begins
_abandoned: set[asyncio.Task[Any]] = set()  # the loop itself keeps no task alive


class Late(AsyncrlError):
    """A deadline passed."""


async def bounded(work: Coroutine[Any, Any, Any], seconds: float, running: set[asyncio.Task[Any]]) -> Any:
    """The result of `work`. After `seconds` it is cancelled, and not waited for: Late. It is in `running` as
    long as it is waited for. What it raises is an Exception, whatever it was."""
    task = begin(work)
    running.add(task)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        running.discard(task)
        if not task.done():
            abandon(task)
    if not task.done():
        raise Late(f"no reply within {seconds:g} s")
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()


def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task whose errors are Exceptions, whatever is raised. To be abandoned by whoever began it."""
    return asyncio.get_running_loop().create_task(_tame(work))


def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel it; what ignores that is closed after a while. It would keep the loop from ending."""
    _abandoned.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    task.get_loop().call_later(GRACE, _force, task)


def _force(task: asyncio.Task[Any]) -> None:
    if not task.done():
        with contextlib.suppress(Exception):  # what it does at its end is foreign code, too
            task.get_coro().close()  # type: ignore[union-attr]
        task.cancel()


def _forget(task: asyncio.Task[Any]) -> None:
    """Nobody asks any more how it ended; asyncio would complain."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


async def _tame(work: Coroutine[Any, Any, Any]) -> Any:
    """A SystemExit would end the event loop."""
    try:
        return await work
    except SystemExit as problem:
        raise RuntimeError(one_line(problem)) from None


async def finish(function: Callable[[], Any], blocking: bool = False, live: set[object] | None = None) -> Any:
    """Call a sync or async function; `blocking`: in a thread of its own. Something is in `live` until
    it really ends."""
    live = set() if live is None else live
    token = object()
    live.add(token)
    if blocking:
        return await in_thread(function, "tool", lambda: live.discard(token))
    try:
        return await _inline(function)
    finally:
        live.discard(token)


async def _inline(function: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = function()
    if (held := time.perf_counter() - started) > SLOW:
        what = getattr(function, "func", function)
        name = getattr(what, "__qualname__", repr(what))
        log.warning(
            "%s held up all episodes of the worker for %.1f s; make it async, or blocking", name, held
        )
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[[], Any], name: str, ended: Callable[[], None] = lambda: None) -> Any:
    """Run foreign code in a daemon thread of its own: when it never returns it costs that thread, neither a
    place in a pool nor the end of the process. `ended` is called in the loop when it has really returned,
    which may be long after this coroutine was cancelled."""
    call = _Call(function, ended)
    threading.Thread(target=call.work, daemon=True, name=name).start()
    return await call.future


class OwnThread:
    """A daemon thread for what bears one thread only: it runs one call after another. One that never
    returns costs the thread; with MOST_STRAYS of those no other one is begun."""

    _strays: ClassVar[set[threading.Thread]] = set()  # in calls that nobody waits for any more

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """What it returns, or raises; when this is cancelled it runs on. Late: there are too many strays."""
        thread = self._begun()
        call = _Call(function)
        self._calls.put(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._strays.add(thread)
            raise

    async def end(self, last: Callable[[], Any]) -> None:
        """Run this after all else, if anything was run; then the thread ends."""
        if self._thread is None:
            return
        try:
            await self.run(last)
        finally:
            self._calls.put(None)

    def _begun(self) -> threading.Thread:
        if self._thread is None:
            self._strays.difference_update([thread for thread in self._strays if not thread.is_alive()])
            if len(self._strays) >= MOST_STRAYS:
                raise Late(f"out of order: {len(self._strays)} earlier calls have not ended")
            self._thread = threading.Thread(target=self._serve, daemon=True, name=self._name)
            self._thread.start()
        return self._thread

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.work()
            if self._calls.empty():
                self._strays.discard(threading.current_thread())


class _Call:
    """A function to be run in a thread, and the `future` that is awaited in the loop where it was made."""

    def __init__(self, function: Callable[[], Any], ended: Callable[[], None] = lambda: None) -> None:
        self._function, self._ended = function, ended
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def work(self) -> None:
        """In the thread."""
        result: Any = None
        error: Exception | None = None
        try:
            result = self._function()
        except BaseException as problem:  # a SystemExit ends the thread, and must not leave anybody waiting
            error = _carried(problem)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: Exception | None) -> None:
        self._ended()
        if self.future.done():  # abandoned at the deadline
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def _carried(problem: BaseException) -> Exception:
    """What a future can carry out of a thread."""
    if isinstance(problem, Exception) and not isinstance(problem, StopIteration):
        return problem
    return RuntimeError(one_line(problem))
