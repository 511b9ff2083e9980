"""Calls of users' code with deadlines: code that hangs or raises does not block or end the caller's loop.

call_user(function, seconds)     sync or async, in this loop, with a deadline
call_without_deadline(function)  sync or async, in the current task; `blocking`: sync, in a thread
to_its_end(function)             sync, in a thread; the call returns only after the thread's work has ended
OwnThread.run(function)          one call after another, always in the same thread
LoopThread.call(function)        coroutines in a second event loop, in a separate thread
exits_raise()                    inside this context os._exit ends the calling call, not the process
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

from asyncrl.errors import AsyncrlError, UserCodeError, fulfil, one_line, users_code, waits_noted

T = TypeVar("T")
log = logging.getLogger("asyncrl.worker")

GRACE_SECONDS = 1.0  # seconds for cancelled work to end
CLOSE_SECONDS = 5.0  # seconds that cancelled work in a LoopThread has to end
SLOW_CALL_SECONDS = 0.1  # a sync function that blocks the event loop for longer is logged as a warning
MAX_ABANDONED_THREADS = 100  # with so many threads in abandoned calls no OwnThread starts
_abandoned_tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps no task alive


class CallTimeout(AsyncrlError):
    """A call missed its deadline. `last_wait`: " (it waits for …)", or ''."""

    last_wait = ""


async def to_its_end(function: Callable[[], T], executor: Executor | None = None) -> T:
    """Call the function in a thread of `executor`; None: of the loop's default executor. A cancelled call
    also waits for the function's end. Everything that the function raises arrives as an Exception."""

    def call() -> T:
        try:
            with users_code():
                return function()
        except StopIteration as problem:  # a future cannot carry it: the caller would wait forever
            raise UserCodeError(one_line(problem)) from problem

    context = contextvars.copy_context()
    result_future = asyncio.get_running_loop().run_in_executor(executor, context.run, call)

    try:
        return await asyncio.shield(result_future)
    finally:
        await asyncio.gather(result_future, return_exceptions=True)
        # The traceback of an error holds this frame, and the future holds the error: a cycle, which would
        # keep the function's data in memory until a garbage collection.
        del result_future


async def call_user(function: Callable[[], Any], seconds: float) -> Any:
    """Call a sync or async function in this loop, with a deadline.

    After `seconds` (`math.inf`: never) the function is cancelled and not waited for: CallTimeout. Everything
    that the function raises arrives as an Exception, also when the function cancels its own task.
    """
    with waits_noted() as waits:
        task = start_guarded(partial(_call_in_loop, function))

    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            cancel_later(task)

    if not task.done():
        current_waits = list(waits.values())
        last_wait = f" (waiting for {current_waits[-1]})" if current_waits else ""
        timeout_error = CallTimeout(f"no reply within {seconds:g} s{last_wait}")
        timeout_error.last_wait = last_wait
        raise timeout_error

    if task.cancelled():
        raise RuntimeError("the call was cancelled")
    return task.result()


async def call_without_deadline(
    function: Callable[[], Any], *, blocking: bool = False, live_calls: set[object] | None = None
) -> Any:
    """Call a sync or async function in the current task. `blocking`: call a sync function in a separate
    thread. Everything that the function raises arrives as an Exception. `live_calls` holds a token until the
    function has really ended, which a thread does perhaps long after this call was cancelled."""
    token = object()
    live_calls = set() if live_calls is None else live_calls
    live_calls.add(token)

    def call_and_discard() -> Any:
        try:
            return function()
        finally:
            live_calls.discard(token)

    if blocking and not inspect.iscoroutinefunction(function):
        return await in_thread(call_and_discard, "tool")

    try:
        with users_code():
            return await _call_in_loop(function)
    finally:
        live_calls.discard(token)


def start_guarded(function: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """Start `function`, users' code, as a task. A BaseException that the code raises by itself ends the task
    as a UserCodeError (see `users_code`). The caller must finally pass the task to `cancel_later`. `function`
    is not called if the task is cancelled before the first step."""

    async def guarded() -> Any:
        with users_code():
            return await function()

    return asyncio.get_running_loop().create_task(guarded())


def cancel_later(task: asyncio.Task[Any]) -> None:
    """Cancel a task without waiting. A coroutine that ignores the cancellation is closed GRACE_SECONDS later,
    as the coroutine would keep the loop from ending."""

    def close_coroutine() -> None:
        if not task.done():
            with suppress(Exception), users_code():  # the coroutine's cleanup is users' code, too
                task.get_coro().close()  # type: ignore[union-attr]
            task.cancel()

    _abandoned_tasks.add(task)
    task.add_done_callback(_abandoned_tasks.discard)
    task.add_done_callback(_retrieve_error)
    task.cancel()
    task.get_loop().call_later(GRACE_SECONDS, close_coroutine)


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Read the error of an abandoned call: asyncio logs errors that were never retrieved."""
    if not future.cancelled():
        future.exception()


async def _call_in_loop(function: Callable[[], Any]) -> Any:
    started_at = time.perf_counter()
    result = function()

    if (blocked_seconds := time.perf_counter() - started_at) > SLOW_CALL_SECONDS:
        called_function = getattr(function, "func", function)
        function_name = getattr(called_function, "__qualname__", repr(called_function))
        log.warning(
            "%s blocked all episodes of the worker for %.1f s; make it async, or set blocking",
            function_name,
            blocked_seconds,
        )

    return await result if inspect.isawaitable(result) else result


@contextmanager
def exits_raise() -> Iterator[None]:
    """Make `os._exit` raise SystemExit inside this context: the exit would end this process with all calls,
    and becomes an error of the calling function instead. A process forked from this process still ends."""
    real_exit = os._exit
    own_pid = os.getpid()

    def refuse_exit(status: int) -> NoReturn:
        if os.getpid() != own_pid:
            real_exit(status)
        raise SystemExit(f"os._exit({status}) was called in a process that other episodes share")

    os._exit = refuse_exit
    try:
        yield
    finally:
        os._exit = real_exit


# -- threads -------------------------------------------------------------------------------------------


async def in_thread(function: Callable[[], Any], name: str) -> Any:
    """Call the function in a separate daemon thread: a function that never returns blocks neither a pool nor
    the end of the process. The function goes on running when this call is cancelled."""
    future: Future[Any] = Future()
    threading.Thread(target=fulfil, args=(future, function), daemon=True, name=name).start()
    return await asyncio.wrap_future(future)


class OwnThread:
    """Run calls one after another in one daemon thread, for objects that are bound to a thread. A call that
    never returns blocks the thread; with MAX_ABANDONED_THREADS blocked threads no further thread starts."""

    _abandoned_threads: ClassVar[set[threading.Thread]] = set()  # threads that are busy with abandoned calls

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return the function's result, or raise its error. The function goes on when this call is cancelled.
        CallTimeout: no new thread may start."""
        thread = self._ensure_thread()
        future: Future[Any] = Future()
        self._calls.put(partial(fulfil, future, function))

        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._abandoned_threads.add(thread)
            raise

    async def end_thread(self, final_call: Callable[[], Any]) -> None:
        """Run `final_call` after all earlier calls, if there were any; then the thread ends."""
        if self._thread is None:
            return

        try:
            await self.run(final_call)
        finally:
            self._calls.put(None)

    def _ensure_thread(self) -> threading.Thread:
        if self._thread is None:
            self._abandoned_threads.difference_update(
                [thread for thread in self._abandoned_threads if not thread.is_alive()]
            )
            if len(self._abandoned_threads) >= MAX_ABANDONED_THREADS:
                raise CallTimeout(
                    f"not available: {len(self._abandoned_threads)} earlier calls are still running"
                )
            self._thread = threading.Thread(target=self._serve_calls, daemon=True, name=self._name)
            self._thread.start()
        return self._thread

    def _serve_calls(self) -> None:
        while (next_call := self._calls.get()) is not None:
            next_call()
            if self._calls.empty():
                self._abandoned_threads.discard(threading.current_thread())


class LoopThread:
    """Run coroutines in a second event loop, in a daemon thread that starts with the first call. Code that
    blocks there delays other calls of this object, never the caller's loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return the function's result, or raise its error. A coroutine function runs in the second loop, a
        sync function in a separate thread. Cancelling this call also cancels the coroutine, which then has
        CLOSE_SECONDS to end."""
        unwrapped: Any = function
        while isinstance(unwrapped, partial):
            unwrapped = unwrapped.func

        if inspect.iscoroutinefunction(inspect.unwrap(unwrapped)):
            return await self._run_in_loop(function)

        result = await in_thread(function, self._name)
        if inspect.isawaitable(result):
            return await self._run_in_loop(partial(_call_in_loop, lambda: result))
        return result

    def close(self) -> None:
        """Let the thread end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _run_in_loop(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        started_tasks: list[asyncio.Task[Any]] = []

        async def run_task() -> Any:
            started_tasks.append(start_guarded(function))
            return await started_tasks[0]

        def cancel_task() -> None:  # one pass of the second loop later `run_task` has started the task
            second_loop.call_soon(lambda: started_tasks[0].cancel())

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name=self._name).start()

        second_loop = self._loop
        result_future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_task(), second_loop))
        result_future.add_done_callback(_retrieve_error)  # the caller may have been cancelled

        try:
            return await asyncio.shield(result_future)
        except asyncio.CancelledError:
            current_task = asyncio.current_task()
            if current_task is not None and not current_task.cancelling():
                raise RuntimeError("the call was cancelled by its own code") from None
            second_loop.call_soon_threadsafe(cancel_task)
            await asyncio.wait([result_future], timeout=CLOSE_SECONDS)
            result_future.cancel()
            raise
