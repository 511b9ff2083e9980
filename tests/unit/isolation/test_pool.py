"""Children of a pool, in real processes: whatever they do costs their process and their call, no more."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.isolation import child, pool
from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import ChildError
from asyncrl.isolation.pool import ProcessPool
from tests.fakes.processes import until, wait_until_gone, written_line

from .acts import ACTS

pytestmark = pytest.mark.slow
LARGEST = 1 << 20


class Asked(ProcessPool[str, str, str]):
    """A pool; `ask` gives the answer, or the text of the ChildError."""

    async def ask(self, what: str, seconds: float = 30.0, patience: float = 300.0) -> str:
        try:
            return await self.call(what, seconds, patience)
        except ChildError as error:
            return str(error)

    async def given_up(self) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await self.call("pid")


@asynccontextmanager
async def pooled(first: str = "", size: int = 1, start_seconds: float = 60.0) -> AsyncIterator[Asked]:
    pool = Asked(
        ACTS, first, name="the child", size=size, max_answer_bytes=LARGEST, start_seconds=start_seconds
    )
    try:
        yield pool
    finally:
        await pool.close()


SURVIVED = {
    "fine": "fine",
    "raise": "KeyError: 'no key'",
    "exit": "SystemExit: 4",
    "surrogate": "ValueError: ?",
    "print": "print",
    "read": "",
    "close": "close",
    "main": "True",
    "huge": "the answer has 2097159 bytes, but at most 1048576 are allowed",
}
FATAL = {
    "segv": "the child was killed by SIGSEGV",
    "leave": "the child exited with code 3",
    "garbage": "the child sent an unreadable answer",
    "flood": "the child sent an answer of 4294967295 bytes",
    "hang": "",
    "deaf": "",
}


async def test_what_a_function_may_do_without_costing_its_process() -> None:
    async with pooled() as pool:
        before = await pool.ask("pid")
        assert {what: await pool.ask(what) for what in SURVIVED} == SURVIVED
        assert await pool.ask("pid") == before


async def test_what_ends_a_process_is_reported_and_the_next_call_gets_another_process() -> None:
    """A child that is late is killed, too, though it ignores signals, and so is what each has started."""
    async with pooled() as pool:
        pids = [await pool.ask("pid")]
        for what, why in FATAL.items():
            started = await pool.ask("child")
            if why:
                assert why in await pool.ask(what)
            else:
                with pytest.raises(CallTimeout, match=r"no reply within 0\.1 s"):
                    await pool.ask(what, 0.1)
            await wait_until_gone(int(pids[-1]))
            await wait_until_gone(int(started))
            pids.append(await pool.ask("pid"))
        assert len({*pids}) == 1 + len(FATAL)


async def test_a_call_that_is_cancelled_ends_its_process_with_all_that_it_started() -> None:
    async with pooled() as pool:
        started = int(await pool.ask("child"))
        call = asyncio.create_task(pool.ask("hang"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await wait_until_gone(started)


@pytest.mark.parametrize("how", ["stop", "stop always"])
async def test_a_function_that_stops_what_watches_it_leaves_no_process(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "KILL_SECONDS", 0.2 if how == "stop always" else 20.0)
    async with pooled() as asked:
        stopped = int(await asked.ask(how))
    await wait_until_gone(stopped)


async def test_waiting_for_a_process_has_a_bound() -> None:
    async with pooled() as pool:
        await pool.ask("fine")
        hung = asyncio.create_task(pool.ask("hang"))
        await asyncio.sleep(0)  # it has the only process now
        assert await pool.ask("fine", patience=0.1) == "the child was busy for 0.1 s"
        hung.cancel()
        assert await pool.ask("fine") == "fine"


async def test_processes_start_when_they_are_needed_are_kept_and_end_with_the_pool() -> None:
    async with pooled(size=2) as pool:
        assert not pool.children
        pids = {await pool.ask("pid") for _ in range(5)}
        assert len(pids) == 1
        words = [str(k) for k in range(100)]
        assert await asyncio.gather(*map(pool.ask, words)) == words
        assert len(pool.children) == 2
        await pool.close()
        await wait_until_gone(int(pids.pop()))


@pytest.mark.parametrize(
    ("first", "seconds", "why"),
    [
        ("refuse", 60.0, "the child cannot start: ValueError: no such model"),
        ("await {}", 0.2, "the child was not ready within 0.2 s"),
    ],
)
async def test_what_cannot_be_loaded_in_time_is_reported(
    tmp_path: Path, first: str, seconds: float, why: str
) -> None:
    os.mkfifo(tmp_path / "gate")
    async with pooled(first.format(tmp_path / "gate"), start_seconds=seconds) as pool:
        assert [await pool.ask("any") for _ in range(2)] == [why] * 2


async def test_what_can_never_begin_is_not_tried_for_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = tmp_path / "tries"
    async with pooled(f"refuse {tries}") as children:
        answers = {await children.ask("any") for _ in range(20)}
        assert answers == {"the child cannot start: ValueError: no such model"}
        assert len(tries.read_text()) == pool.MAX_REFUSALS
        monkeypatch.setattr(children, "_next_try", 0.0)
        assert {await children.ask("any")} == answers and len(tries.read_text()) == pool.MAX_REFUSALS + 1


async def test_a_process_that_dies_before_it_is_ready_is_tried_again() -> None:
    async with pooled("leave") as children:
        for _ in range(pool.MAX_REFUSALS + 1):
            await children.ask("any")
        assert children._refusals == 0


async def test_a_process_that_dies_between_calls_costs_nothing() -> None:
    async with pooled() as pool:
        before = await pool.ask("pid")
        os.kill(int(before), signal.SIGKILL)
        (process,) = pool.children
        await until(lambda: not process.is_usable, "it lives")
        assert (after := await pool.ask("pid")).isdigit() and after != before


@pytest.mark.parametrize("before", [True, False])
async def test_a_start_counts_and_goes_on_for_the_next_call(tmp_path: Path, before: bool) -> None:
    """It may end before that call or during it."""
    os.mkfifo(path := tmp_path / "gate")
    gate = os.open(path, os.O_RDWR)
    async with pooled(f"await {path}") as pool:
        for _ in range(3):
            await pool.given_up()
        (start,) = pool.starts
        waits = asyncio.ensure_future(asyncio.wait([start]) if before else pool.ask("pid"))
        os.write(gate, b"x")  # one process may start, and no second one
        await waits
        assert (await pool.ask("pid")).isdigit() and pool.children == {start.result()}
    os.close(gate)


async def test_closing_ends_calls_and_starts_nothing() -> None:
    async with pooled() as pool:
        await pool.ask("fine")
        hung, waiting = (asyncio.create_task(pool.ask("hang")) for _ in range(2))
        await asyncio.sleep(0)
        await pool.close()
        assert "SIGKILL" in await hung and "pool is closed" in await waiting
        assert not pool.children


async def test_closing_ends_a_start_that_is_waited_for(tmp_path: Path) -> None:
    start_file = tmp_path / "begun"
    async with pooled(f"say {start_file}") as pool:
        call = asyncio.create_task(pool.ask("any"))
        assert await written_line(start_file) == "begun\n"
        await pool.close()
        assert "pool is closed" in await call


async def test_a_process_that_comes_after_the_end_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    spawn = child._spawn
    spawned = list[int]()

    def late(*about: Any) -> subprocess.Popen[bytes]:
        held.wait(20)
        made = spawn(*about)
        spawned.append(made.pid)
        return made

    monkeypatch.setattr(child, "_spawn", late)
    async with pooled() as pool:
        await pool.given_up()
        starts = list(pool.starts)
        await pool.close()
        held.set()
        await asyncio.wait(starts, timeout=20)
        await until(lambda: bool(spawned), "nothing was started")
        await wait_until_gone(spawned[0])
