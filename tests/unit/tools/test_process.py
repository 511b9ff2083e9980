"""Tools in processes of their own, with real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import ConfigError
from asyncrl.tools import Toolbox, load_tool, load_tools, tool
from asyncrl.tools.process import Answer, Pool, Start, _encode
from asyncrl.types import Sample, ToolCall, ToolReply

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


def gone(pid: int) -> bool:
    """Within seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_processes_are_kept_for_further_calls() -> None:
    first, second = play(["a", "b"], ["a", "b", "c"])
    pids = {reply.content for reply in first}
    assert len(pids) == 2 and str(os.getpid()) not in pids
    assert {reply.content for reply in second} == pids  # the third call waited for one of them
    assert [reply.reward for reply in second] == [0.5] * 3


def test_what_runs_past_its_deadline_is_killed_with_its_children() -> None:
    (child,), (late,), (again,) = play(["child"], ["hang"], ["a"], timeout=1.0, concurrency=1)
    assert late.error == "no reply within 1 s"
    assert again.error is None
    assert gone(int(child.content))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("die", "the process of the tool ended with code 7"),
        ("quit", "SystemExit: 3"),
        ("garbage", "the process of the tool gave 4294967295 bytes"),
    ],
)
def test_a_process_that_breaks_is_replaced(what: str, error: str) -> None:
    (broken,), (fine,) = play([what], ["a"], concurrency=1)
    assert broken.error == error
    assert fine.error is None


def test_a_call_is_tried_again_in_a_new_process(tmp_path: Path) -> None:
    first_dies = str(tmp_path / "tried.txt")
    assert play([first_dies], retries=1)[0][0].error is None
    assert play(["die"], retries=1)[0][0].error == "the process of the tool ended with code 7"


def test_large_replies_are_cut_before_they_travel() -> None:
    reply = play(["large"])[0][0]
    assert len(reply.content) == WORK.max_chars and "[cut: 10000000 characters]" in reply.content


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
    @tool(process=True)
    def local() -> str:
        return ""

    with pytest.raises(ConfigError, match="top level"):
        Toolbox({"local": local})


def test_a_child_ends_with_its_worker() -> None:
    """Even one that hangs in a call, when the worker is killed."""
    code = (
        "import asyncio, sys; from asyncrl.tools import load_tool; from asyncrl.tools.process import Pool\n"
        "async def main():\n"
        f"    async with Pool(load_tool({f'{FILE}:work'!r})).lease() as lease:\n"
        "        print(lease.child.pid, flush=True)\n"
        '        await lease.ask(\'{"what": "hang"}\')\n'
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_messages_are_plain_data() -> None:
    assert b"module:name" in _encode(Start("module:name", {}, 64))
    assert Pool(WORK)._origin.spec == f"{FILE}:work"
    assert b"error" in _encode(Answer(error="e"))
