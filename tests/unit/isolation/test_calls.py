"""Users' code in other threads: what is cancelled there, and when."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import UserCodeError
from asyncrl.isolation import calls
from asyncrl.isolation.calls import LoopThread, call_user, call_without_deadline, to_its_end
from asyncrl.rollout import worker
from asyncrl.wire.sockets import Endpoints


def never_awaited(main: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """Run it; the warnings about coroutines that were made and then forgotten."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    return [text for one in warned if "never awaited" in (text := str(one.message))]


def test_a_call_that_is_cancelled_while_its_loop_is_blocked_never_begins() -> None:
    blocked = threading.Event()
    go_on = threading.Event()
    begun: list[str] = []

    async def blocking() -> None:
        blocked.set()
        go_on.wait(60)

    async def late() -> None:
        begun.append("late")

    async def main() -> None:
        thread = LoopThread("test")
        first = asyncio.create_task(thread.call(blocking))
        await asyncio.to_thread(blocked.wait, 60)
        second = asyncio.create_task(thread.call(late))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([first, second])
        assert second.cancelled()
        thread.close()

    assert never_awaited(main) == [] == begun


def test_a_call_may_be_cancelled_after_the_end_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CLOSE_SECONDS", 0.0)

    async def main() -> None:
        thread = LoopThread("test")
        running = threading.Event()

        async def endless() -> None:
            running.set()
            await asyncio.Event().wait()

        call = asyncio.create_task(thread.call(endless))
        await asyncio.to_thread(running.wait, 60)
        (own,) = [other for other in threading.enumerate() if other.name == "test"]
        thread.close()
        await asyncio.to_thread(own.join, 60)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    assert never_awaited(main) == []


def test_without_a_limit_an_exit_is_an_error_still() -> None:
    async def leaving() -> None:
        raise SystemExit(3)

    with pytest.raises(UserCodeError, match="SystemExit: 3"):
        asyncio.run(call_user(leaving, math.inf))


def leave() -> None:
    os._exit(7)


async def leave_in_the_loop() -> None:
    os._exit(7)


def fork_and_leave() -> int:
    if (pid := os.fork()) == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_ends_its_process_ends_its_call() -> None:
    """And may end a process that it has forked."""

    async def main() -> None:
        for function, blocking in ((leave, False), (leave, True), (leave_in_the_loop, False)):
            with pytest.raises(
                UserCodeError,
                match=r"SystemExit: os._exit\(7\) was called in a process that other episodes share",
            ):
                await call_user(lambda: call_without_deadline(function, blocking=blocking), 60.0)  # noqa: B023
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # a fork beside threads
            assert await call_user(fork_and_leave, 60.0) == 7

    end = os._exit
    with calls.exits_raise():
        asyncio.run(main())
    assert os._exit is end


def test_a_vital_thread_ends_such_a_process_all_the_same() -> None:
    code = (
        "from asyncrl.errors import vital_thread; from asyncrl.isolation.calls import exits_raise\n"
        "with exits_raise():\n    vital_thread('gate', lambda: 1 / 0).join()\nprint('goes on')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and not ended.stdout
    *log, last_line = ended.stderr.splitlines()
    assert last_line == ("thread 'gate' failed; exiting: ZeroDivisionError: division by zero")
    assert "Traceback (most recent call last):" in log


def test_a_worker_is_such_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(config: RunConfig) -> None:
        os._exit(7)

    monkeypatch.setattr(worker, "EpisodeParts", prepare)
    config = parse(
        {"name": "x", "model": {"path": "none"}, "data": {"train": "none"}, "launch": {"threads": 1}}
    )
    with pytest.raises(SystemExit, match=r"os._exit\(7\)"):
        worker.run(config, Endpoints("", ""), 0, "")


def test_the_data_of_a_failed_call_leave_memory_at_once() -> None:
    """Not with the next garbage collection: they may be large."""

    class Body:
        pass

    def read(body: Body) -> None:
        raise ValueError

    async def main() -> None:
        body = Body()
        reference = weakref.ref(body)
        with suppress(ValueError):
            await to_its_end(partial(read, body))
        del body
        async with asyncio.timeout(10):
            while reference() is not None:  # the thread forgets its work just after it ends  # noqa: ASYNC110
                await asyncio.sleep(0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_stop_iteration_reaches_the_caller() -> None:
    """As another error: asyncio's futures refuse it, and the caller would wait forever."""

    async def main() -> None:
        async with asyncio.timeout(10):  # otherwise a lost error would block asyncio.run's clean-up, too
            await to_its_end(partial(next, iter(())))

    with pytest.raises(UserCodeError, match="StopIteration"):
        asyncio.run(main())
