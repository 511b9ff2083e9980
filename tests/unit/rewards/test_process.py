"""Sync rewards in real child processes; what these may do otherwise: tests/unit/isolation/test_pool.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.isolation.calls import CallTimeout
from asyncrl.rewards import RewardError, RewardInput, RewardSource, load_rewards, process
from asyncrl.rewards.process import RewardPool
from asyncrl.types import Message, RewardResult, Sample, ToolCall

pytestmark = pytest.mark.slow

FILE = """
import asyncio, os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, plus: float = 0.0):
    return {"score": float(solution_str) + plus, "components": {"turns": extra_info["num_turns"]}}

async def slept():
    return 0.5

def act(given):
    match given.answer:
        case "hang":
            time.sleep(1000)
        case "leave":
            os._exit(3)
        case "exit":
            sys.exit(4)
        case "raise":
            raise KeyError("no key")
        case "surrogate":
            raise ValueError("\\ud800")
        case "huge":
            return {"score": 1.0, "components": {str(k): 0.0 for k in range(200_000)}}
        case "big":
            return {"score": 1.0, "junk": "x" * 50_000_000}
        case "nan":
            return float("nan")
        case "loop":
            return asyncio.run(slept())
        case "length":
            return len(given.transcript) + len(given.messages[0].tool_calls)
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


class Asked(RewardPool):
    """A pool; `ask` gives the score, or the text of the RewardError."""

    async def ask(self, answer: str, seconds: float = 30.0) -> float | str:
        try:
            return (await self.call(RewardInput(SAMPLE, answer), seconds)).score
        except RewardError as error:
            return str(error)


def pooled(
    tmp_path: Path,
    body: Callable[[Asked], Awaitable[Any]],
    name: str = "act",
    text: str = FILE,
    **options: float,
) -> Any:
    """What `body` returns of a pool for the function `name` of a file with this text."""
    (tmp_path / "mine.py").write_text(text)

    async def run() -> Any:
        pool = Asked(RewardSource(f"{tmp_path}/mine.py:{name}", dict(options)), 1)
        try:
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_a_function_with_options_and_a_typed_one(tmp_path: Path) -> None:
    message = Message("assistant", "", (ToolCall("add", "{}"),))
    long = RewardInput(SAMPLE, "length", (message,), transcript="x" * 1_000_000)
    outcomes = pooled(
        tmp_path, lambda pool: pool.call(RewardInput(SAMPLE, "2", turns=3), 30.0), "compute_score", plus=0.5
    )
    assert outcomes == RewardResult(2.5, (), {"turns": 3.0})
    assert pooled(tmp_path, lambda pool: pool.call(long, 30.0)).score == 1_000_001
    (reward,) = load_rewards({f"{tmp_path}/mine.py:compute_score": {"plus": 0.5}})
    assert reward.location == "processes"


ANSWERED: dict[str, float | str] = {
    "fine": 1.0,
    "raise": "KeyError: 'no key' (mine.py:19)",
    "exit": "SystemExit: 4 (mine.py:17)",
    "surrogate": "ValueError: ? (mine.py:21)",
    "nan": "ValueError: the reward is nan, which is not a finite number",
    "loop": 0.5,
    "big": 1.0,
    "huge": "the answer has 3088963 bytes, but at most 1048576 are allowed",
    "leave": "the reward process exited with code 3",
}


def test_what_a_function_does_is_a_score_or_an_error_that_names_its_line(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        assert {answer: await pool.ask(answer) for answer in ANSWERED} == ANSWERED

    pooled(tmp_path, body)


def test_a_call_has_a_deadline_and_a_wait_ten_of_them(tmp_path: Path) -> None:
    async def body(pool: Asked) -> None:
        await pool.ask("fine")
        hung = asyncio.create_task(pool.ask("hang", 0.3))
        await asyncio.sleep(0)  # it has the only process now
        assert "was busy for 0.1 s" in str(await pool.ask("fine", 0.01))
        with pytest.raises(CallTimeout):
            await hung

    pooled(tmp_path, body)


@pytest.mark.parametrize(("name", "score"), [("late", 0.75), ("Patient", 0.75), ("Loads", 1.0)])
def test_async_functions_are_awaited_and_what_is_loaded_is_loaded_once(
    tmp_path: Path, name: str, score: float
) -> None:
    async def body(pool: Asked) -> Any:
        return [await pool.ask("any"), await pool.ask("any")]

    assert pooled(tmp_path, body, name) == [score, score]


SLOW = "import time\ntime.sleep(1000)\n"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [("missing", FILE, "has no 'missing'"), ("act", SLOW, "the reward process was not ready within 0.2 s")],
)
def test_what_cannot_be_loaded_in_time_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, why: str
) -> None:
    if text == SLOW:
        monkeypatch.setattr(process, "LOAD_SECONDS", 0.2)

    async def body(pool: Asked) -> Any:
        return [await pool.ask("any") for _ in range(2)]

    assert all(why in str(outcome) for outcome in pooled(tmp_path, body, name, text=text))
