"""Sync rewards in real child processes: whatever they do costs their process and their episode, no more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.isolation.calls import CallTimeout
from asyncrl.rewards import RewardError, RewardInput, RewardSource, load_rewards, process
from asyncrl.rewards.process import RewardPool
from asyncrl.types import Message, RewardResult, Sample, ToolCall

FILE = """
import asyncio, os, signal, subprocess, sys, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, plus: float = 0.0):
    return {"score": float(solution_str) + plus, "components": {"turns": extra_info["num_turns"]}}

async def slept():
    return 0.5

def act(given):
    os.umask(0o022)
    match given.answer.split():
        case ["hang"]:
            time.sleep(1000)
        case ["deaf"]:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        case ["segv"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["leave"]:
            os._exit(3)
        case ["exit"]:
            sys.exit(4)
        case ["raise"]:
            raise KeyError("no key")
        case ["print"]:
            print("x" * 1000)
            os.write(1, b"\\x01\\x00\\x00\\x00\\xc0" * 10)
            sys.stdout.flush()
        case ["read"]:
            return len(sys.stdin.read())
        case ["close"]:
            os.closerange(0, 3)
        case ["garbage"]:
            for number in range(3, 20):
                try:
                    os.write(number, b"\\x05\\x00\\x00\\x00hello")
                except OSError:
                    pass
        case ["flood"]:
            for number in range(3, 20):
                try:
                    os.write(number, b"\\xff\\xff\\xff\\xffhello")
                except OSError:
                    pass
        case ["huge"]:
            return {"score": 1.0, "components": {str(k): 0.0 for k in range(200_000)}}
        case ["big"]:
            return {"score": 1.0, "junk": "x" * 50_000_000}
        case ["nan"]:
            return float("nan")
        case ["loop"]:
            return asyncio.run(slept())
        case ["main"]:
            return threading.current_thread() is threading.main_thread()
        case ["child", path]:
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open(path + "~", "w") as file:
                file.write(str(child.pid))
            os.rename(path + "~", path)
            time.sleep(1000)
        case ["pid"]:
            return os.getpid()
        case ["length"]:
            return len(given.transcript) + len(given.messages[0].tool_calls)
        case ["surrogate"]:
            raise ValueError("\\ud800")
    return 1.0

async def late(given):
    await asyncio.sleep(0)
    return 0.75

class Loads:
    loads = 0

    def load(self):
        Loads.loads += 1

    def __call__(self, given):
        return self.loads

class Patient:
    async def __call__(self, given):
        return 0.75
"""


def pooled(
    tmp_path: Path, body: Callable[[Callable[..., Awaitable[Any]]], Awaitable[Any]], name: str = "act"
) -> Any:
    """Run `body(ask)`; ask(answer, seconds) is the score, or the text of the RewardError."""
    (tmp_path / "mine.py").write_text(FILE)

    async def run() -> Any:
        pool = RewardPool(RewardSource(f"{tmp_path}/mine.py:{name}"), size=1)

        async def ask(answer: str, seconds: float = 30.0) -> float | str:
            try:
                return (await pool.call(RewardInput(SAMPLE, answer), seconds)).score
            except RewardError as error:
                return str(error)

        try:
            return await body(ask)
        finally:
            await pool.close()

    return asyncio.run(run())


SAMPLE = Sample(0, "s", (Message("user", "?"),), '"5"')


def test_a_function_with_options_and_a_typed_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    (reward,) = load_rewards({f"{tmp_path}/mine.py:compute_score": {"plus": 0.5}})
    assert reward.place == "processes"
    message = Message("assistant", "", (ToolCall("add", "{}"),))

    async def main() -> None:
        pool, typed = RewardPool(reward.source), RewardPool(RewardSource(f"{tmp_path}/mine.py:act"))
        try:
            found = await pool.call(RewardInput(SAMPLE, "2", turns=3), 30.0)
            assert found == RewardResult(2.5, (), {"turns": 3.0})
            long = RewardInput(SAMPLE, "length", (message,), transcript="x" * 1_000_000)
            assert (await typed.call(long, 30.0)).score == 1_000_001
        finally:
            await asyncio.gather(pool.close(), typed.close())

    asyncio.run(main())


SURVIVED: dict[str, float | str] = {
    "fine": 1.0,
    "raise": "KeyError: 'no key' (mine.py:27)",
    "exit": "SystemExit: 4 (mine.py:25)",
    "surrogate": "ValueError: ? (mine.py:69)",
    "nan": "ValueError: the reward is nan, which is no finite number",
    "print": 1.0,
    "read": 0.0,
    "close": 1.0,
    "loop": 0.5,
    "main": 1.0,
    "big": 1.0,
    "huge": "the answer has 3088963 bytes, at most 1048576 are allowed",
}
FATAL = {
    "segv": "the reward process was killed by SIGSEGV",
    "leave": "the reward process ended with exit code 3",
    "garbage": "the reward process sent an unreadable answer",
    "flood": "the reward process sent 4294967295 bytes at once",
}


def test_what_a_function_may_do_without_costing_its_process(tmp_path: Path) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        before = await ask("pid")
        assert {answer: await ask(answer) for answer in SURVIVED} == SURVIVED
        assert await ask("pid") == before

    pooled(tmp_path, body)


def test_what_costs_it_is_told_and_the_next_call_gets_another_process(tmp_path: Path) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        pids = {await ask("pid")}
        for answer, why in FATAL.items():
            assert why in str(await ask(answer))
            pids.add(await ask("pid"))
        assert len(pids) == 1 + len(FATAL)

    pooled(tmp_path, body)


@pytest.mark.parametrize("answer", ["hang", "deaf"])
def test_a_late_call_is_killed_and_the_next_one_gets_another_process(tmp_path: Path, answer: str) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        before = await ask("pid")
        with pytest.raises(CallTimeout):
            await ask(answer, 0.2)
        await gone(int(before))
        assert await ask("pid") != before

    pooled(tmp_path, body)


def test_waiting_for_a_process_has_a_deadline_too(tmp_path: Path) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        await ask("fine")
        hung = asyncio.create_task(ask("hang"))
        await asyncio.sleep(0)  # it has the only process now
        assert "was not free for 0.1 s" in str(await ask("fine", 0.01))
        hung.cancel()
        assert await ask("fine") == 1.0

    pooled(tmp_path, body)


def test_children_of_a_function_go_with_it(tmp_path: Path) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        note = tmp_path / "pid"
        call = asyncio.create_task(ask(f"child {note}"))
        await until(lambda: note.exists() or call.done(), "the function started nothing")
        call.cancel()
        await asyncio.wait([call])
        await gone(int(note.read_text()))

    pooled(tmp_path, body)


def test_a_hundred_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)

    async def main() -> list[float]:
        pool = RewardPool(RewardSource(f"{tmp_path}/mine.py:compute_score"), size=2)
        try:
            calls = (pool.call(RewardInput(SAMPLE, str(k)), 30.0) for k in range(100))
            scores = [verdict.score for verdict in await asyncio.gather(*calls)]
            assert len(pool._pool.children) == 2
            return scores
        finally:
            await pool.close()

    assert asyncio.run(main()) == list(range(100))


@pytest.mark.parametrize("name", ["late", "Patient"])
def test_an_async_function_is_awaited_there_too(tmp_path: Path, name: str) -> None:
    assert pooled(tmp_path, lambda ask: ask("any"), name) == 0.75


def test_what_it_loads_is_loaded_once(tmp_path: Path) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        assert [await ask("any"), await ask("any")] == [1.0, 1.0]

    pooled(tmp_path, body, "Loads")


def test_a_function_that_cannot_be_loaded(tmp_path: Path) -> None:
    async def body(ask: Callable[..., Awaitable[Any]]) -> None:
        for _ in range(2):
            assert "has no 'missing'" in str(await ask("any"))

    pooled(tmp_path, body, "missing")


def test_loading_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(process, "LOAD_SECONDS", 0.2)

    async def main() -> None:
        pool = RewardPool(RewardSource(f"{tmp_path}/slow.py:act"))
        with pytest.raises(RewardError, match=r"the reward process was not ready within 0.2 s"):
            await pool.call(RewardInput(SAMPLE, "any"), 30.0)
        await pool.close()

    asyncio.run(main())


def test_processes_start_when_they_are_needed_and_end_with_the_pool(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)

    async def main() -> None:
        pool = RewardPool(RewardSource(f"{tmp_path}/mine.py:act"), size=4)
        assert not pool._pool.children
        given = RewardInput(SAMPLE, "pid")
        pids = {(await pool.call(given, 30.0)).score for _ in range(5)}
        assert len(pids) == 1
        await pool.close()
        await gone(int(pids.pop()))

    asyncio.run(main())


def test_a_process_that_dies_between_calls_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)

    async def main() -> None:
        pool = RewardPool(RewardSource(f"{tmp_path}/mine.py:act"), size=1)
        given = RewardInput(SAMPLE, "pid")
        try:
            before = (await pool.call(given, 30.0)).score
            os.kill(int(before), signal.SIGKILL)
            (process,) = pool._pool.children
            await until(lambda: not process.usable, "it lives")
            assert (await pool.call(given, 30.0)).score != before
        finally:
            await pool.close()

    asyncio.run(main())


def test_closing_ends_calls_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)

    async def main() -> None:
        pool = RewardPool(RewardSource(f"{tmp_path}/mine.py:act"), size=1)
        await pool.call(RewardInput(SAMPLE, "fine"), 30.0)
        hung, waiting = (asyncio.create_task(pool.call(RewardInput(SAMPLE, "hang"), 30.0)) for _ in range(2))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(RewardError, match="SIGKILL"):
            await hung
        with pytest.raises(RewardError, match="pool is closed"):
            await waiting
        assert not pool._pool.children

    asyncio.run(main())


def test_closing_ends_a_start_that_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(begun := tmp_path / "begun")
    (tmp_path / "slow.py").write_text(f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(1000)\n")

    async def main() -> None:
        pool = RewardPool(RewardSource(f"{tmp_path}/slow.py:act"), size=1)
        call = asyncio.create_task(pool.call(RewardInput(SAMPLE, "any"), 30.0))
        await asyncio.to_thread(begun.read_text)
        await pool.close()
        with pytest.raises(RewardError, match="pool is closed"):
            await call

    asyncio.run(main())


async def gone(pid: int) -> None:
    await until(lambda: not alive(pid), f"process {pid} lives")


async def until(reached: Callable[[], bool], complaint: str) -> None:
    limit = time.monotonic() + 10.0
    while not reached():
        assert time.monotonic() < limit, complaint
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """A zombie that nobody has reaped is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
