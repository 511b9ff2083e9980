from __future__ import annotations

import asyncio
import threading
from typing import Any, Literal

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import Rewarded, Tool, call_tool, tool, unknown_tool
from asyncrl.types import ToolCall, ToolReply


def run(subject: Tool, arguments: str, timeout: float = 60.0) -> ToolReply:
    return asyncio.run(call_tool(subject, ToolCall(subject.name, arguments), timeout))


@tool
def lookup(word: str, kind: Literal["noun", "verb"] = "noun", limit: int = 3) -> list[str]:
    """Look a word up.

    Longer explanation that the model is spared.

    Args:
        word: what to look up
        limit (int): how many
    """
    return [f"{kind} {word}"] * limit


def test_schema_comes_from_signature_and_docstring() -> None:
    assert lookup.name == "lookup"
    assert lookup.schema == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"description": "what to look up", "type": "string"},
                    "kind": {"enum": ["noun", "verb"], "default": "noun"},
                    "limit": {"description": "how many", "type": "integer", "default": 3},
                },
                "required": ["word"],
            },
        },
    }


def test_results_are_text_or_json() -> None:
    assert run(lookup, '{"word": "run", "limit": "2"}').content == '["noun run", "noun run"]'


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("{}", "missing required field `word`"),
        ('{"word": 3}', "Expected `str`"),
        ('{"word": "a", "kind": "verse"}', "Invalid enum value 'verse'"),
        ('{"word": "a", "wrod": "b"}', "unknown field `wrod`"),
        ("nonsense", "malformed"),
    ],
)
def test_bad_arguments_are_a_reply(arguments: str, complaint: str) -> None:
    reply = run(lookup, arguments)
    assert reply.error is not None
    assert complaint in reply.error
    assert reply.error.endswith("it takes word: string, kind?: noun | verb, limit?: integer")
    assert reply.content == f"error: {reply.error}"


def test_an_exception_is_a_reply() -> None:
    @tool
    async def broken() -> str:
        raise RuntimeError("out of\npaper")

    reply = run(broken, "{}")
    assert reply.content == "error: RuntimeError: out of paper"
    line = broken.function.__code__.co_firstlineno + 2
    assert reply.error == f"RuntimeError: out of paper (test_base.py:{line})"


def test_the_tools_own_timeout_error_is_not_the_deadline() -> None:
    @tool
    def impatient() -> str:
        raise TimeoutError("remote host")

    assert run(impatient, "{}").content == "error: TimeoutError: remote host"


def test_deadline_of_the_tool_wins_over_the_default() -> None:
    @tool(timeout=0.01)
    async def forever() -> str:
        await asyncio.Event().wait()
        return "never"

    assert run(forever, "{}", timeout=100).error == "no reply within 0.01 s"


def test_deadline_abandons_a_blocking_tool() -> None:
    release = threading.Event()

    @tool(blocking=True)
    def stuck() -> str:
        release.wait(30)
        return "late"

    assert run(stuck, "{}", timeout=0.01).error == "no reply within 0.01 s"
    release.set()


def test_an_error_that_no_future_carries_is_a_reply_at_once() -> None:
    @tool(blocking=True)
    def exhausted() -> str:
        return next(iter(()))

    assert "StopIteration" in (run(exhausted, "{}").error or "")


def test_a_blocking_tool_cannot_end_the_worker() -> None:
    @tool(blocking=True)
    def quitter() -> str:
        raise SystemExit(3)

    assert "SystemExit: 3" in (run(quitter, "{}").error or "")


def test_a_blocking_tool_gives_back_its_result_or_its_error() -> None:
    @tool(blocking=True)
    def half(x: int) -> float:
        return 1 / x

    assert run(half, '{"x": 2}').content == "0.5"
    assert run(half, '{"x": 0}').content == "error: ZeroDivisionError: division by zero"


async def test_cancellation_travels_on() -> None:
    @tool
    async def forever() -> str:
        await asyncio.Event().wait()
        return "never"

    task = asyncio.create_task(call_tool(forever, ToolCall("forever", "{}")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_unknown_tools_are_answered_with_the_known_ones() -> None:
    reply = unknown_tool(ToolCall("add", "{}"), ["sub", "mul"])
    assert reply.content == "error: unknown tool 'add'; available: mul, sub"
    assert reply.error


@pytest.mark.parametrize(
    ("value", "content", "reward"),
    [(Rewarded({"found": 3}, 0.25), '{"found": 3}', 0.25), ("text", "text", 0.0)],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_reward_goes_beside_the_reply(value: Any, content: str, reward: float, blocking: bool) -> None:
    @tool(blocking=blocking)
    def give() -> Any:
        return value

    reply = run(give, "{}")
    assert (reply.content, reply.reward, reply.error) == (content, reward, None)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_a_reward_that_is_no_number_is_an_error_reply(reward: Any) -> None:
    @tool
    def give() -> Any:
        return Rewarded("text", reward)

    reply = run(give, "{}")
    assert reply.reward == 0.0
    assert reply.error is not None and str(reward) in reply.error


def test_tools_need_annotations_and_named_parameters() -> None:
    with pytest.raises(ConfigError, match="'x' needs a type annotation"):
        tool(lambda x: x)
    with pytest.raises(ConfigError, match="cannot be passed by name"):

        @tool
        def variadic(*numbers: int) -> int:
            return sum(numbers)
