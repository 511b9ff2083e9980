"""Sync rewards in real child processes: whatever they do costs their process and their episode, no more."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.isolation.calls import CallTimeout
from asyncrl.rewards import RewardError, RewardInput, RewardSource, load_rewards, process
from asyncrl.rewards.process import RewardPool
from asyncrl.types import Message, RewardResult, Sample, ToolCall
from tests.fakes.processes import gone, until

pytestmark = pytest.mark.slow

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


SAMPLE = Sample(0, "s", (Message("user", "?"),), '"5"')
Body = Callable[["Asked"], Awaitable[Any]]


class Asked(RewardPool):
    """A pool; `ask` gives the score, or the text of the RewardError."""

    async def ask(self, answer: str, seconds: float = 30.0) -> float | str:
        try:
            return (await self.call(RewardInput(SAMPLE, answer), seconds)).score
        except RewardError as error:
            return str(error)


def pooled(
    tmp_path: Path, body: Body, name: str = "act", size: int = 1, text: str = FILE, **options: float
) -> Any:
    """What `body` returns of a pool for the function `name` of a file with this text."""
    (tmp_path / "mine.py").write_text(text)

    async def run() -> Any:
        pool = Asked(RewardSource(f"{tmp_path}/mine.py:{name}", dict(options)), size)
        try:
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_a_function_with_options_and_a_typed_one(tmp_path: Path) -> None:
    message = Message("assistant", "", (ToolCall("add", "{}"),))
    long = RewardInput(SAMPLE, "length", (message,), transcript="x" * 1_000_000)
    found = pooled(
        tmp_path, lambda pool: pool.call(RewardInput(SAMPLE, "2", turns=3), 30.0), "compute_score", plus=0.5
    )
    assert found == RewardResult(2.5, (), {"turns": 3.0})
    assert pooled(tmp_path, lambda pool: pool.call(long, 30.0)).score == 1_000_001
    (reward,) = load_rewards({f"{tmp_path}/mine.py:compute_score": {"plus": 0.5}})
    assert reward.place == "processes"


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
    "hang": "",
    "deaf": "",
}


def test_what_a_function_may_do_without_costing_its_process(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        before = await pool.ask("pid")
        assert {answer: await pool.ask(answer) for answer in SURVIVED} == SURVIVED
        assert await pool.ask("pid") == before

    pooled(tmp_path, body)


def test_what_costs_it_is_told_and_the_next_call_gets_another_process(tmp_path: Path) -> None:
    """Whoever is late is killed, too, though it ignores signals."""

    async def body(pool: Asked) -> None:
        pids = [await pool.ask("pid")]
        for answer, why in FATAL.items():
            if why:
                assert why in str(await pool.ask(answer))
            else:
                with pytest.raises(CallTimeout):
                    await pool.ask(answer, 0.2)
            await gone(int(pids[-1]))
            pids.append(await pool.ask("pid"))
        assert len({*pids}) == 1 + len(FATAL)

    pooled(tmp_path, body)


def test_waiting_for_a_process_has_a_deadline_too(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        await pool.ask("fine")
        hung = asyncio.create_task(pool.ask("hang"))
        await asyncio.sleep(0)  # it has the only process now
        assert "was not free for 0.1 s" in str(await pool.ask("fine", 0.01))
        hung.cancel()
        assert await pool.ask("fine") == 1.0

    pooled(tmp_path, body)


def test_children_of_a_function_go_with_it(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        note = tmp_path / "pid"
        call = asyncio.create_task(pool.ask(f"child {note}"))
        await until(lambda: note.exists() or call.done(), "the function started nothing")
        call.cancel()
        await asyncio.wait([call])
        await gone(int(note.read_text()))

    pooled(tmp_path, body)


def test_a_hundred_at_once(tmp_path: Path) -> None:
    async def body(pool: Asked) -> list[float | str]:
        scores = await asyncio.gather(*(pool.ask(str(k)) for k in range(100)))
        assert len(pool._pool.children) == 2
        return scores

    assert pooled(tmp_path, body, "compute_score", size=2) == list(range(100))


@pytest.mark.parametrize(("name", "scores"), [("late", 0.75), ("Patient", 0.75), ("Loads", 1.0)])
def test_async_functions_are_awaited_and_what_is_loaded_is_loaded_once(
    tmp_path: Path, name: str, scores: float
) -> None:
    async def body(pool: Asked) -> Any:
        return [await pool.ask("any"), await pool.ask("any")]

    assert pooled(tmp_path, body, name) == [scores, scores]


SLOW = "import time\ntime.sleep(1000)\n"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [("missing", FILE, "has no 'missing'"), ("act", SLOW, "the reward process was not ready within 0.2 s")],
)
def test_what_cannot_be_loaded_in_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, why: str
) -> None:
    if text == SLOW:
        monkeypatch.setattr(process, "LOAD_SECONDS", 0.2)

    async def body(pool: Asked) -> Any:
        return [await pool.ask("any") for _ in range(2)]

    assert all(why in str(said) for said in pooled(tmp_path, body, name, text=text))


def test_processes_start_when_they_are_needed_and_end_with_the_pool(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        assert not pool._pool.children
        pids = {await pool.ask("pid") for _ in range(5)}
        assert len(pids) == 1
        await pool.close()
        await gone(int(pids.pop()))

    pooled(tmp_path, body, size=4)


def test_a_process_that_dies_between_calls_costs_nothing(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        before = await pool.ask("pid")
        os.kill(int(before), signal.SIGKILL)
        (process,) = pool._pool.children
        await until(lambda: not process.usable, "it lives")
        assert await pool.ask("pid") != before

    pooled(tmp_path, body)


def test_closing_ends_calls_and_starts_nothing(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        await pool.ask("fine")
        hung, waiting = (asyncio.create_task(pool.ask("hang")) for _ in range(2))
        await asyncio.sleep(0)
        await pool.close()
        assert "SIGKILL" in str(await hung) and "pool is closed" in str(await waiting)
        assert not pool._pool.children

    pooled(tmp_path, body)


def test_closing_ends_a_start_that_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(begun := tmp_path / "begun")

    async def body(pool: Asked) -> None:
        call = asyncio.create_task(pool.ask("any"))
        await asyncio.to_thread(begun.read_text)
        await pool.close()
        assert "pool is closed" in str(await call)

    pooled(tmp_path, body, text=f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(1000)\n")
