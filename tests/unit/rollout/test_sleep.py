"""An episode's time does not pass while its engine sleeps, or a scorer has no server."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from asyncrl.rollout.episode_run import EpisodeRun
from asyncrl.runtime.activity import ASLEEP
from asyncrl.tools import tool
from asyncrl.types import EpisodeEnd
from asyncrl.wire.messages.worker import Finished
from tests.fakes.episodes import TurnBench, look
from tests.fakes.loop import settle


async def test_an_episode_whose_engine_sleeps_is_off_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that is, beside a wait for a scorer too; and its time is up when it would have been."""
    loop = asyncio.get_running_loop()
    passed = 0.0
    monkeypatch.setattr(loop, "time", lambda: passed)
    bench = TurnBench([], episode_timeout=20.0)
    limit = asyncio.timeout(20.0)
    with suppress(TimeoutError):
        async with limit:
            await settle()
            run = EpisodeRun(bench.context, bench.assign(), bench.sampler, limit)
            passed = 4.0
            with run.clock.paused():
                passed = 90.0
                with run.clock.paused(), run.clock.paused():
                    passed = 500.0
                    await settle()
                assert (run.clock.seconds, limit.when()) == (4.0, None)
            assert (run.clock.seconds, run.clock.seconds_left) == (4.0, 16.0)
            with run.clock.paused():
                passed = 507.0
                with run.clock.paused():
                    passed = 607.0
                passed = 608.0
            assert (run.clock.seconds, run.clock.seconds_left) == (4.0, 16.0)
            passed = 624.0
            assert run.clock.seconds == 20.0
            await settle()
    assert limit.expired()
    with run.clock.paused():
        passed = 700.0
    assert run.clock.seconds == 20.0


def test_a_turn_is_off_the_clock_while_its_engine_sleeps() -> None:
    """An episode of 20 s whose engine sleeps for 30."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        passed = 0.0
        clock, loop.time = loop.time, lambda: clock() + passed  # type: ignore[method-assign]
        bench = TurnBench(["it is 42"], episode_timeout=20.0)
        bench.engine.gate.clear()
        task = asyncio.create_task(bench.run())
        while not bench.engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await bench.sampler.sleep()
        passed = 30.0
        await settle()
        bench.sampler.sleeps.set_asleep(False)
        bench.engine.gate.set()
        await task
        end = bench.sent[-1]
        assert isinstance(end, Finished) and end.result.end is EpisodeEnd.ANSWERED and end.stats.seconds < 20

    asyncio.run(main())


def test_the_time_of_a_tool_passes_while_the_engine_sleeps() -> None:
    """The engine falls asleep while the tool runs, and the second turn waits for it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        passed = 0.0
        tool_called = asyncio.Event()
        clock, loop.time = loop.time, lambda: clock() + passed  # type: ignore[method-assign]

        @tool(name="look")
        async def slow(what: str = "") -> str:
            """Look."""
            nonlocal passed
            await bench.sampler.sleep()
            passed += 7.0
            tool_called.set()
            return "seen"

        bench = TurnBench([look("left"), "it is 42"], episode_timeout=20.0)
        bench.tools = {"look": slow}
        task = asyncio.create_task(bench.run())
        await tool_called.wait()
        while not any(name == ASLEEP for _, name, _ in bench.waits._open_waits.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        passed += 30.0
        await settle()
        bench.sampler.sleeps.set_asleep(False)
        bench.sampler.changed.notify()
        await task
        end = bench.sent[-1]
        assert isinstance(end, Finished) and 7 <= end.stats.seconds < 20

    asyncio.run(main())
