from __future__ import annotations

import asyncio
import json
import math
import random

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import ToolCall, ToolReply


@pytest.mark.parametrize(("op", "result"), [("plus", "9"), ("minus", "5"), ("times", "14")])
def test_one_operation(op: str, result: str) -> None:
    call = ToolCall("calculator", f'{{"a": 7, "op": "{op}", "b": 2}}')
    reply = asyncio.run(call_tool(load_tool("calculator"), call))
    assert (reply.content, reply.error) == (result, None)


def test_unknown_operation_is_a_reply() -> None:
    call = ToolCall("calculator", '{"a": 7, "op": "over", "b": 2}')
    assert "over" in (asyncio.run(call_tool(load_tool("calculator"), call)).error or "")


def test_simulated_latency_has_the_mean_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    monkeypatch.setattr(random, "lognormvariate", lambda *arguments: drawn.append(arguments) or 0.0)
    calculator = load_tool("calculator", latency_mean=0.3, latency_sigma=2.0)
    asyncio.run(call_tool(calculator, ToolCall("calculator", '{"a": 1, "op": "plus", "b": 1}')))
    ((center, sigma),) = drawn
    assert sigma == 2.0
    assert math.exp(center + sigma**2 / 2) == pytest.approx(0.3)  # the mean of a log-normal variable


def test_negative_latency_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        load_tool("calculator", latency_mean=-1)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("37 * 58", "2146"),
        (" (1 + 2) * -3 ", "-9"),
        ("7 / 2", "3.5"),
        ("2 ** 10 % 7 // 1", "2"),
        ("6 / 3", "2"),
    ],
)
def test_an_expression_is_computed(expression: str, expected: str) -> None:
    assert expressed(expression).content == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("", "(1 + 2", "1 / 0", "x + 1", "abs(1)", "__import__('os')", "'a' * 3", "True + 1", "[1]"),
        *("9 ** 9 ** 99", "10 ** 99 * 10 ** 99", "1e400", "(-8) ** 0.5", "1e300 ** 9", "1" * 300, "(" * 150),
    ],
)
def test_what_is_no_expression_gets_an_error_reply(expression: str) -> None:
    error = expressed(expression).error
    assert error and ("cannot compute" in error or "longer than" in error)


def expressed(expression: str) -> ToolReply:
    call = ToolCall("calculator", json.dumps({"expression": expression}))
    return asyncio.run(call_tool(load_tool("expression_calculator"), call))
