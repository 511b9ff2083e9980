"""A tool may reward the turn that called it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.tools import Rewarded, call_tool, tool
from asyncrl.types import ToolCall, ToolReply


def run(value: Any, blocking: bool = False) -> ToolReply:
    @tool(blocking=blocking)
    def give() -> Any:
        """Give."""
        return value

    return asyncio.run(call_tool(give, ToolCall("give", "{}"), 60.0))


@pytest.mark.parametrize("blocking", [False, True])
def test_a_reward_goes_beside_the_reply(blocking: bool) -> None:
    reply = run(Rewarded({"found": 3}, reward=0.25), blocking)
    assert (reply.content, reply.reward, reply.error) == ('{"found": 3}', 0.25, None)


def test_a_plain_reply_has_none() -> None:
    assert run("text").reward == 0.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_a_reward_that_is_no_number_is_an_error_reply(reward: Any) -> None:
    reply = run(Rewarded("text", reward))
    assert reply.reward == 0.0
    assert reply.error is not None and str(reward) in reply.error
