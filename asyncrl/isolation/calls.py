"""Calls of users' code with deadlines: code that hangs or raises does not block or end the caller's loop.

call_user(function, seconds)   sync or async, in this loop or in a thread, with a deadline
to_its_end(function)           sync, in a thread, which is over when the call is
OwnThread.run(function)        one call after another, always in the same thread
exits_raise()                  in its body os._exit ends the call that makes it, not the process
LoopThread.call(function)      coroutines in a second event loop, in a thread of its own
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

from asyncrl.errors import AsyncrlError, fulfil, users_code, waits_noted

T = TypeVar("T")
log = logging.getLogger("asyncrl.worker")

GRACE = 1.0  # seconds for cancelled work to end
CLOSE_SECONDS = 5.0  # seconds that cancelled work in a LoopThread has to end
SLOW = 0.1  # seconds that a sync function may block the event loop before a warning is logged
MAX_ABANDONED = 100  # threads in abandoned calls; with more no OwnThread starts
_abandoned: set[asyncio.Task[Any]] = set()  # the loop itself keeps no task alive


class CallTimeout(AsyncrlError):
    """A deadline passed. `last_wait`: " (it waits for …)", or ''."""

    last_wait = ""


async def to_its_end(function: Callable[[], T]) -> T:
    """Call it in a thread. A cancelled call waits for the end of the thread, too. All that the function
    raises is an Exception."""

    def call() -> T:
        with users_code():
            return function()

    job = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(job)
    finally:
        await asyncio.gather(job, return_exceptions=True)


async def call_user(
    function: Callable[[], Any],
    seconds: float | None = None,
    *,
    blocking: bool = False,
    live: set[object] | None = None,
) -> Any:
    """Call a sync or async function; `blocking`: a sync one, called in a thread of its own.

    After `seconds` it is cancelled, and not waited for: CallTimeout. All that it raises is an Exception; with
    a deadline (`math.inf` is one), also where it cancels its own task. Something is in `live` until the
    function has really ended, which may be later.
    """
    work = partial(_run_counted, function, blocking, live if live is not None else set())
    if seconds is None:
        return await work()
    with waits_noted() as waits:
        task = start(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            cancel_later(task)
    if not task.done():
        current_waits = list(waits.values())
        last_wait = f" (it waits for {current_waits[-1]})" if current_waits else ""
        late = CallTimeout(f"no reply within {seconds:g} s{last_wait}")
        late.last_wait = last_wait
        raise late
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()


def start(work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """Start a task whose errors are Exceptions. The caller must `cancel_later` it in the end. `work` is not
    called if the task is cancelled before it has begun."""

    async def guarded() -> Any:
        with users_code():
            return await work()

    return asyncio.get_running_loop().create_task(guarded())


def cancel_later(task: asyncio.Task[Any]) -> None:
    """Cancel it, and do not wait; a coroutine that ignores this is closed GRACE seconds later, as it would
    keep the loop from ending."""

    def close() -> None:
        if not task.done():
            with suppress(Exception), users_code():  # its cleanup is users' code, too
                task.get_coro().close()  # type: ignore[union-attr]
            task.cancel()

    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    task.add_done_callback(_retrieve)
    task.cancel()
    task.get_loop().call_later(GRACE, close)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Read the error of an abandoned call, or asyncio would log it as never retrieved."""
    if not future.cancelled():
        future.exception()


async def _run_counted(function: Callable[[], Any], blocking: bool, live: set[object]) -> Any:
    """Call the function; a token of it is in `live` until it has really ended, in its thread, too."""
    live.add(token := object())

    def call() -> Any:
        try:
            return function()
        finally:
            live.discard(token)

    if blocking:
        return await in_thread(call, "tool")
    try:
        with users_code():
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


@contextmanager
def exits_raise() -> Iterator[None]:
    """Make `os._exit` in the body, which would end this process with all its calls, raise SystemExit: an
    error of the call that made it. A process that was forked from this one it still ends."""
    end = os._exit
    here = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != here:
            end(status)
        raise SystemExit(f"os._exit({status}) in a process that it shares with other episodes")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end


# -- threads -------------------------------------------------------------------------------------------


async def in_thread(function: Callable[[], Any], name: str) -> Any:
    """Call it in a daemon thread of its own: if it never returns, it blocks neither a pool nor the end of the
    process. It goes on running when this is cancelled."""
    future: Future[Any] = Future()
    threading.Thread(target=fulfil, args=(future, function), daemon=True, name=name).start()
    return await asyncio.wrap_future(future)


class OwnThread:
    """A daemon thread for objects that may be used in one thread only: it runs one call after another. A call
    that never returns blocks the thread; with MAX_ABANDONED such threads no other one is started."""

    _abandoned: ClassVar[set[threading.Thread]] = set()  # in abandoned calls

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what it returns, or raise; it goes on when this is cancelled. CallTimeout: no new thread."""
        thread = self._started()
        future: Future[Any] = Future()
        self._calls.put(partial(fulfil, future, function))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._abandoned.add(thread)
            raise

    async def end(self, last: Callable[[], Any]) -> None:
        """Run this after all else, if anything was run; then the thread ends."""
        if self._thread is None:
            return
        try:
            await self.run(last)
        finally:
            self._calls.put(None)

    def _started(self) -> threading.Thread:
        if self._thread is None:
            self._abandoned.difference_update([thread for thread in self._abandoned if not thread.is_alive()])
            if len(self._abandoned) >= MAX_ABANDONED:
                raise CallTimeout(f"out of order: {len(self._abandoned)} earlier calls have not ended")
            self._thread = threading.Thread(target=self._serve, daemon=True, name=self._name)
            self._thread.start()
        return self._thread

    def _serve(self) -> None:
        while (one := self._calls.get()) is not None:
            one()
            if self._calls.empty():
                self._abandoned.discard(threading.current_thread())


class LoopThread:
    """A second event loop, in a daemon thread that starts with the first call. Code that blocks there delays
    other calls of this object, never the caller's loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, or raise. A coroutine function runs in that loop, another in a
        thread of its own. When this is cancelled the coroutine is, too, and has CLOSE_SECONDS to end."""
        called: Any = function
        while isinstance(called, partial):
            called = called.func
        if inspect.iscoroutinefunction(inspect.unwrap(called)):
            return await self._beside(function)
        result = await in_thread(function, self._name)
        return await self._beside(partial(_inline, lambda: result)) if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Let the thread end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _beside(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        tasks: list[asyncio.Task[Any]] = []

        async def work() -> Any:
            tasks.append(start(function))
            return await tasks[0]

        def cancel() -> None:  # a turn of that loop later, it finds what `work` has begun
            there.call_soon(lambda: tasks[0].cancel())

        there = self._started()
        done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), there))
        done.add_done_callback(_retrieve)  # the caller may have been cancelled
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if here is not None and not here.cancelling():
                raise RuntimeError("it was cancelled by its own code") from None
            there.call_soon_threadsafe(cancel)
            await asyncio.wait([done], timeout=CLOSE_SECONDS)
            done.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name=self._name).start()
        return self._loop
