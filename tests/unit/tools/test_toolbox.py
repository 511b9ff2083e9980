"""Sessions: what is opened, called, redone and closed, and what a bad tool cannot do to the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncrl.errors import ProtocolError
from asyncrl.tools import Tool, Toolbox, ToolError, tool
from asyncrl.types import Sample, ToolCall, ToolReply


def sample(**extra: Any) -> Sample:
    return Sample(3, "", (), "", extra_info=json.dumps(extra))


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


class Notes:
    """A notepad that remembers everything that happened to it."""

    log: list[str] = []

    async def open(self, sample: Sample, title: str = "untitled") -> None:
        self.lines = [title]
        Notes.log.append(f"open {sample.row}")

    async def call(self, line: str) -> list[str]:
        self.lines.append(line)
        await asyncio.sleep(0)
        return self.lines

    def close(self) -> None:
        Notes.log.append("close")


@pytest.fixture
def log() -> list[str]:
    Notes.log = []
    return Notes.log


async def one_call(box: Toolbox, sample: Sample, *calls: ToolCall) -> list[ToolReply]:
    session = box.session(sample)
    try:
        await session.open()
        return await asyncio.gather(*map(session.call, calls))
    finally:
        await session.close()


def play(tools: list[Tool], sample: Sample, *calls: ToolCall) -> list[ToolReply]:
    return asyncio.run(one_call(Toolbox({tool.name: tool for tool in tools}, 60.0), sample, *calls))


def test_a_class_keeps_state_within_its_episode(log: list[str]) -> None:
    notes = tool(Notes)
    assert notes.name == "notes" and notes.replay == "reapply"
    assert notes.schema["function"]["parameters"]["required"] == ["line"]
    replies = play([notes], sample(), call("notes", line="a"), call("notes", line="b"))
    assert [reply.content for reply in replies] == ['["untitled", "a"]', '["untitled", "a", "b"]']
    assert play([notes], sample(), call("notes", line="c"))[0].content == '["untitled", "c"]'
    assert log == ["open 3", "close"] * 2


@pytest.mark.parametrize("given", [{"create_kwargs": {"title": "poem"}}, {"title": "poem"}])
def test_samples_bring_constructor_arguments(log: list[str], given: dict[str, Any]) -> None:
    reply = play([tool(Notes)], sample(tools_kwargs={"notes": given, "echo": None}), call("notes", line="a"))
    assert reply[0].content == '["poem", "a"]'


def test_samples_choose_their_tools() -> None:
    notes = tool(Notes)
    reply = play([notes, echo], sample(tools=["echo"]), call("notes", line="a"))[0]
    assert reply.error == "unknown tool 'notes'; there are: echo"


def test_a_sample_that_asks_for_an_unknown_tool_fails() -> None:
    with pytest.raises(ToolError, match="asks for the tool 'ekko'; there are: echo"):
        play([echo], sample(tools=["ekko"]))


def test_what_has_to_be_repeated_is_repeated(log: list[str]) -> None:
    async def main() -> None:
        box = Toolbox({"notes": tool(Notes), "echo": echo})
        session = box.session(sample())
        await session.open()
        recorded = [ToolReply(call("notes", line="a"), '["untit'), ToolReply(call("echo", text="x"), "pure")]
        await session.redo(recorded, lambda text: text[:7])
        assert "a" in (await session.call(call("notes", line="b"))).content
        with pytest.raises(ProtocolError, match="another reply"):
            await session.redo(recorded)
        await session.close()

    asyncio.run(main())
