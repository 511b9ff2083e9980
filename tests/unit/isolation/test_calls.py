"""Users' code in other threads: what is cancelled there, and when."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncrl.isolation import calls
from asyncrl.isolation.calls import LoopThread, call_user


def never_awaited(main: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """Run it; the warnings about coroutines that were made and then forgotten."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    return [text for one in warned if "never awaited" in (text := str(one.message))]


def test_a_call_that_is_cancelled_while_its_loop_is_blocked_never_begins() -> None:
    blocked, go_on = threading.Event(), threading.Event()
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
        thread, running = LoopThread("test"), threading.Event()

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

    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        asyncio.run(call_user(leaving, math.inf))
