"""Limits of a tool over all episodes, in simulated time."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncrl.tools import Toolbox, ToolSession, tool
from asyncrl.types import Sample, ToolCall


class Clock(selectors.DefaultSelector):
    """Waiting takes no time: the clock is put forward instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


def simulate(work: Coroutine[Any, Any, None]) -> None:
    def loop() -> asyncio.AbstractEventLoop:
        simulated_loop = asyncio.SelectorEventLoop(clock := Clock())
        simulated_loop.time = lambda: clock.now  # type: ignore[method-assign]
        return simulated_loop

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work)


def paced(start_times: list[float]) -> ToolSession:
    @tool(rate=10, timeout=1.0)
    async def slow() -> str:
        start_times.append(asyncio.get_running_loop().time())
        return ""

    return Toolbox({"slow": slow}).session(Sample(0, "", (), ""))


CALL = ToolCall("slow", "{}")


def test_a_rate_is_used_in_full_when_more_is_asked_for() -> None:
    async def main() -> None:
        start_times: list[float] = []
        session = paced(start_times)
        await session.open()
        calls = []
        for _ in range(500):  # 25 per second, of which 10 may begin
            calls.append(asyncio.create_task(session.call(CALL)))
            await asyncio.sleep(0.04)
        replies = await asyncio.gather(*calls)
        assert sum(reply.error is None for reply in replies) == len(start_times)
        assert 199 <= len(start_times) <= 211
        assert all(0.0999 < after - before < 0.1001 for before, after in itertools.pairwise(start_times))
        assert {reply.error for reply in replies} == {
            None,
            "the tool is busy: the call did not start within 1 s",
        }

    simulate(main())


def test_calls_that_are_given_up_take_no_place() -> None:
    async def main() -> None:
        start_times: list[float] = []
        session = paced(start_times)
        await session.open()
        calls = [asyncio.create_task(session.call(CALL)) for _ in range(9)]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        assert (await session.call(CALL)).error is None
        assert start_times == [0.0, 0.1]

    simulate(main())


@pytest.mark.parametrize("options", [{"concurrency": 1}, {"rate": 0.1}])
def test_a_call_waits_for_its_place_no_longer_than_for_its_reply(options: dict[str, Any]) -> None:
    @tool(**options)
    async def slow() -> str:
        await asyncio.sleep(5.0)
        return "done"

    async def main() -> None:
        box = Toolbox({"slow": slow}, 8.0)
        session = box.session(Sample(0, "", (), ""))
        await session.open()
        first = asyncio.create_task(session.call(CALL))
        await asyncio.sleep(1.0)
        box.timeout = 3.0
        late_reply = await session.call(CALL)
        assert late_reply.error == "the tool is busy: the call did not start within 3 s"
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)
        assert (await first).content == "done"

    simulate(main())
