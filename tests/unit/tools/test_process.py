"""Tools in processes of their own, with real processes; what these may do otherwise: test_pool.py of
tests/unit/isolation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import Toolbox, call_tool, load_tool, load_tools, tool
from asyncrl.tools.base import MAX_REPLY_BYTES
from asyncrl.types import Sample, ToolCall, ToolReply
from tests.fakes.processes import wait_until_gone

FILE = Path(__file__).with_name("process_tools.py")
WORK = load_tool(f"{FILE}:work")


def call(command: str) -> ToolCall:
    return ToolCall("work", json.dumps({"command": command}))


def play(*turns: list[str], **options: float) -> list[list[ToolReply]]:
    """Turns of calls that run side by side. Calls of `hang` have 0.1 s."""

    async def main() -> list[list[ToolReply]]:
        box = Toolbox({"work": dataclasses.replace(WORK, timeout=None, **options)})
        session = box.session(Sample(0, "", (), ""))
        await session.open()
        replies = []
        try:
            for turn in turns:
                box.timeout = 0.1 if turn == ["hang"] else 20.0
                replies.append(await asyncio.gather(*(session.call(call(command)) for command in turn)))
            return replies
        finally:
            await session.close()
            await box.close()

    return asyncio.run(main())


def test_processes_are_kept_for_further_calls() -> None:
    first, second = play(["a", "b"], ["a", "b", "c"])
    pids = {reply.content for reply in first}
    assert len(pids) == 2 and str(os.getpid()) not in pids
    assert {reply.content for reply in second} == pids  # the third call waited for one of them
    assert [reply.reward for reply in second] == [0.5] * 3


def test_what_runs_past_its_deadline_is_killed_with_its_children() -> None:
    [child], [hung], [after] = play(["child"], ["hang"], ["a"], concurrency=1)
    assert (hung.error, after.error) == ("no reply within 0.1 s", None)
    asyncio.run(wait_until_gone(int(child.content)))


def test_a_process_sees_the_variables_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model leads what a tool does: keys of the launcher are not for it to read."""
    monkeypatch.setenv("SEARCH_KEY", "for the tool")
    monkeypatch.setenv("WANDB_API_KEY", "for the trainer")
    monkeypatch.setenv("HF_TOKEN", "for the launcher")
    monkeypatch.setenv("HF_HOME", "/where/models/are")
    [[reply]] = play(["variables"])
    names = {*reply.content.split()}
    assert {"PATH", "SEARCH_KEY", "HF_HOME"} <= names and not {"WANDB_API_KEY", "HF_TOKEN"} & names


def test_what_a_tool_says_itself_is_final_and_other_failures_are_tried_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    tried = tmp_path / "tried.txt"
    [polite], [retried_reply], [dead] = play([f"polite {calls}"], [str(tried)], ["die"], retries=1)
    assert polite.error == "No city is called so." and calls.read_text() == "x"
    assert retried_reply.error is None  # in a new process
    assert dead.error == "the tool's process exited with code 7"


def test_large_replies_are_cut_before_they_travel() -> None:
    reply = play(["large"])[0][0]
    assert MAX_REPLY_BYTES <= len(reply.content) <= MAX_REPLY_BYTES + 10


def test_a_factory_is_found_with_its_arguments() -> None:
    (scale,) = load_tools([f"{FILE}:scaled"], {f"{FILE}:scaled": {"by": 5}}).values()
    assert asyncio.run(call_tool(scale, ToolCall("scale", '{"x": 3}'))).content == "15"


def test_a_function_without_a_name_of_its_own_is_refused() -> None:
    """Else a child could not find it."""

    @tool(process=True)
    def local() -> str:
        return ""

    with pytest.raises(ConfigError, match="top level"):
        Toolbox({"local": local})
