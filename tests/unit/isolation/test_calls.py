"""Users' code in other threads: what is cancelled there, and when."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from asyncrl.isolation.calls import LoopThread, call_user


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
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

    asyncio.run(main())
    assert begun == []


def test_without_a_limit_an_exit_is_an_error_still() -> None:
    async def leaving() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        asyncio.run(call_user(leaving, math.inf))
