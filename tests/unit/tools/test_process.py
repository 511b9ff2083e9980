"""Tools in processes of their own, with real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.errors import ConfigError
from asyncrl.isolation import child, pool
from asyncrl.tools import Toolbox, ToolSession, load_tool, load_tools, tool
from asyncrl.tools.base import MAX_REPLY
from asyncrl.types import Sample, ToolCall, ToolReply
from tests.fakes.processes import gone, until

FILE = Path(__file__).with_name("process_tools.py")
WORK = load_tool(f"{FILE}:work")


def call(what: str) -> ToolCall:
    return ToolCall("work", json.dumps({"what": what}))


def play(*turns: list[str], **options: float) -> list[list[ToolReply]]:
    """Turns of calls that run side by side."""

    async def main() -> list[list[ToolReply]]:
        box = Toolbox({"work": dataclasses.replace(WORK, **options)})
        session = box.session(Sample(0, "", (), ""))
        await session.open()
        try:
            return [await asyncio.gather(*(session.call(call(what)) for what in turn)) for turn in turns]
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


@pytest.mark.parametrize("how", ["stop", "stop always"])
def test_a_tool_that_stops_what_watches_it_leaves_no_process(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "KILL_SECONDS", 0.2 if how == "stop always" else 20.0)
    ((stopped,),) = play([how])
    assert stopped.error is None
    asyncio.run(gone(int(stopped.content)))


def with_deadlines(play: Callable[[Toolbox, ToolSession], Awaitable[None]]) -> None:
    """In an episode whose tool has the deadline of its toolbox."""

    async def main() -> None:
        box = Toolbox({"work": dataclasses.replace(WORK, timeout=None, concurrency=1)}, 20.0)
        session = box.session(Sample(0, "", (), ""))
        await session.open()
        try:
            await play(box, session)
        finally:
            await session.close()
            await box.close()

    asyncio.run(main())


def test_what_runs_past_its_deadline_is_killed_with_its_children() -> None:
    async def play(box: Toolbox, session: ToolSession) -> None:
        child = await session.call(call("child"))
        box.timeout = 0.1
        assert (await session.call(call("hang"))).error == "no reply within 0.1 s"
        box.timeout = 20.0
        assert (await session.call(call("a"))).error is None
        await gone(int(child.content))

    with_deadlines(play)


def test_a_process_sees_the_variables_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model leads what a tool does: keys of the launcher are not for it to read."""
    monkeypatch.setenv("SEARCH_KEY", "for the tool")
    monkeypatch.setenv("WANDB_API_KEY", "for the trainer")
    monkeypatch.setenv("HF_TOKEN", "for the launcher")
    monkeypatch.setenv("HF_HOME", "/where/models/are")
    [[reply]] = play(["variables"])
    names = {*reply.content.split()}
    assert {"PATH", "SEARCH_KEY", "HF_HOME"} <= names and not {"WANDB_API_KEY", "HF_TOKEN"} & names


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Processes of the tool are ready when something was written to it."""
    os.mkfifo(path := tmp_path / "gate")
    monkeypatch.setenv("PROCESS_TOOLS_GATE", str(path))
    end = os.open(path, os.O_RDWR)
    yield end
    os.close(end)


Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were started: their wrappers."""
    pids: list[int] = []
    spawn: Spawn = child._spawn

    def counted(*about: Any) -> subprocess.Popen[bytes]:
        pids.append((made := spawn(*about)).pid)
        return made

    monkeypatch.setattr(child, "_spawn", counted)
    return pids


def program_of(wrapper: int) -> int:
    return psutil.Process(wrapper).children()[0].pid


def starts_of(box: Toolbox) -> list[asyncio.Task[Any]]:
    processes = box.call_limits["work"].processes
    assert processes is not None
    return list(processes.pool.starts)


@pytest.mark.parametrize("before", [True, False])
def test_a_start_counts_and_goes_on_for_the_next_call(gate: int, spawned: list[int], before: bool) -> None:
    """Whether it ends before that call or during it."""

    async def play(box: Toolbox, session: ToolSession) -> None:
        box.timeout = 0.05
        for _ in range(3):
            assert (await session.call(call("a"))).error == "no reply within 0.05 s"
        box.timeout = 20.0
        starts = starts_of(box)
        waits = asyncio.create_task(asyncio.wait(starts) if before else session.call(call("a")))
        os.write(gate, b"x")  # one process may start, and no second one
        await waits
        assert (await session.call(call("a"))).content == str(program_of(spawned[0]))
        assert len(starts) == len(spawned) == 1

    with_deadlines(play)


def test_a_process_that_comes_after_the_end_ends_too(
    monkeypatch: pytest.MonkeyPatch, spawned: list[int]
) -> None:
    held, spawn = threading.Event(), child._spawn

    def late(*about: Any) -> subprocess.Popen[bytes]:
        held.wait(20)
        return spawn(*about)

    monkeypatch.setattr(child, "_spawn", late)

    async def play(box: Toolbox, session: ToolSession) -> None:
        box.timeout = 0.05
        await session.call(call("a"))
        starts = starts_of(box)
        await box.close()
        held.set()
        await asyncio.wait(starts, timeout=20)
        await until(lambda: bool(spawned), "nothing was started")
        await gone(spawned[0])

    with_deadlines(play)


def test_what_a_tool_says_itself_is_not_dressed_up_and_final(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    reply = play([f"polite {calls}"], retries=2)[0][0]
    assert reply.error == "No city is called so."
    assert calls.read_text() == "x"


def test_a_call_is_tried_again_in_a_new_process(tmp_path: Path) -> None:
    first_dies = str(tmp_path / "tried.txt")
    assert play([first_dies], retries=1)[0][0].error is None
    assert play(["die"], retries=1)[0][0].error == "the process of the tool ended with exit code 7"


def test_large_replies_are_cut_before_they_travel() -> None:
    reply = play(["large"])[0][0]
    assert MAX_REPLY <= len(reply.content) <= MAX_REPLY + 10


def test_a_factory_is_found_with_its_arguments() -> None:
    async def main() -> str:
        box = Toolbox(load_tools([f"{FILE}:scaled"], {f"{FILE}:scaled": {"by": 5}}))
        session = box.session(Sample(0, "", (), ""))
        await session.open()
        reply = await session.call(ToolCall("scale", '{"x": 3}'))
        await box.close()
        return reply.content

    assert asyncio.run(main()) == "15"


def test_a_function_without_a_name_of_its_own_is_refused() -> None:
    """Else a child could not find it."""

    @tool(process=True)
    def local() -> str:
        return ""

    with pytest.raises(ConfigError, match="top level"):
        Toolbox({"local": local})
