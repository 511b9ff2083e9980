from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import ToolCall


@pytest.mark.parametrize(("op", "result"), [("plus", "9"), ("minus", "5"), ("times", "14")])
def test_one_operation(op: str, result: str) -> None:
    call = ToolCall("calculator", f'{{"a": 7, "op": "{op}", "b": 2}}')
    reply = asyncio.run(call_tool(load_tool("calculator"), call))
    assert (reply.content, reply.error) == (result, None)


def test_unknown_operation_is_a_reply() -> None:
    call = ToolCall("calculator", '{"a": 7, "op": "over", "b": 2}')
    assert "over" in (asyncio.run(call_tool(load_tool("calculator"), call)).error or "")


def test_simulated_latency_has_the_mean_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def record(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    random.seed(0)
    calculator = load_tool("calculator", latency_mean=0.3, latency_sigma=1.0)

    async def calls() -> None:
        for _ in range(4000):
            await call_tool(calculator, ToolCall("calculator", '{"a": 1, "op": "plus", "b": 1}'))

    asyncio.run(calls())
    assert statistics.fmean(waits) == pytest.approx(0.3, rel=0.1)
    assert max(waits) > 3  # a heavy tail


def test_negative_latency_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        load_tool("calculator", latency_mean=-1)
