"""Agents and tools work on tasks: in the task's image, and what they change there reaches the reward."""

from __future__ import annotations

import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.data.tasks import Task
from asyncrl.errors import ConfigError, SetupError
from asyncrl.gateway import Command, CommandError, Endpoint, Gateway, TimeUp
from asyncrl.gateway.harnesses import CLAUDE_CODE
from asyncrl.isolation.sandbox.changes import read_entries
from asyncrl.isolation.wrapper import descendants
from asyncrl.rewards import RewardInput
from asyncrl.tools import Toolbox, load_tools
from asyncrl.types import EpisodeEnd, FailReason, Message, Sample, ToolCall
from tests.fakes.agents import AgentBench
from tests.fakes.checked import Given, assert_found
from tests.fakes.hosts import FakeHost
from tests.fakes.images import small_image
from tests.fakes.tasks import bare_image, task_folder
from tests.integration.test_sandbox_exec import SHORT_OF_MEMORY

ENDPOINT = Endpoint("http://127.0.0.1:9/v1", "")


@pytest.fixture
def task(images: Path) -> Task:
    small_image(images, "small-python", python=True, packages=("pytest",))
    return Task("fizz", "small-python", "/root/repo", environment={"WORD": "hello"})


def sample_of(task: Task) -> Sample:
    return Sample(
        0, "t", (Message("user", "q"),), "1", extra_info_json=json.dumps({"task": msgspec.to_builtins(task)})
    )


def changed(result: Any) -> dict[str, bytes]:
    return {one.path: one.content for one in read_entries(base64.b64decode(result["changes"]))}


def script(path: Path, text: str, **options: Any) -> Command:
    file = path / "agent.sh"
    file.write_text(text)
    return Command(line=f"sh {file}", sandbox="jail", **options)


async def test_a_program_works_in_the_image_and_leaves_what_it_changed(tmp_path: Path, task: Task) -> None:
    """Its own result stays beside that; what it writes elsewhere is not of the workspace."""
    agent = script(
        tmp_path,
        """
echo $WORD > a.txt; mkdir -p sub/.git __pycache__; echo x > sub/.git/x; echo y > __pycache__/y
echo $PATH > sub/path; echo z > ~/z; ls /work /var/tmp/asyncrl-* 2>/dev/null; pwd > where
printf '{"score": 0.5, "changes": "forged", "failed": "no"}'
""",
    )
    result = await agent(sample_of(task), ENDPOINT)
    found = changed(result)
    assert (result["score"], "failed" in result) == (0.5, False)
    assert found == {
        "root/repo": b"",
        "root/repo/a.txt": b"hello\n",
        "root/repo/sub": b"",
        "root/repo/sub/path": b"/usr/bin:/bin\n",
        "root/repo/where": b"/root/repo\n",
    }


async def test_a_program_that_fails_leaves_what_it_changed(tmp_path: Path, task: Task) -> None:
    with pytest.raises(CommandError, match="sh exited with code 3: no") as caught:
        await script(tmp_path, "echo a > a.txt; echo no >&2; exit 3")(sample_of(task), ENDPOINT)
    assert changed(caught.value.result)["root/repo/a.txt"] == b"a\n"


ASKS = """
import json, os, time, urllib.request
open("a.txt", "w").write("begun")
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request).read()
open("b.txt", "w").write("asked")
"""
SLEEPS = "time.sleep(600)\n"
ENDS = {
    "it is killed": ("os.system('kill -9 $PPID')", "python exited with code -9"),
    "it fails": ("raise SystemExit('no')", "python exited with code 1: no"),
    "it takes too much memory": ("kept = b'x' * (300 << 20)\ntime.sleep(600)", "used more than 200 MiB"),
}


@pytest.mark.parametrize("of", ["option", "task", "episode"])
async def test_a_program_whose_time_is_up_leaves_what_it_changed(tmp_path: Path, task: Task, of: str) -> None:
    (tmp_path / "agent.py").write_text(ASKS + SLEEPS)
    given = msgspec.structs.replace(task, seconds=0.5) if of == "task" else task
    seconds = 0.5 if of == "option" else 0.0
    agent = Command(line=f"python {tmp_path}/agent.py", sandbox="jail", seconds=seconds)
    gateway = Gateway()
    await gateway.start()
    try:
        async with gateway.admit_episode(FakeHost()) as endpoint:
            if of == "episode":
                endpoint = msgspec.structs.replace(endpoint, seconds=4.0)
            with pytest.raises(TimeUp, match=r"python was stopped .* when its time limit expired") as caught:
                await agent(sample_of(given), endpoint)
    finally:
        await gateway.close()
    assert changed(caught.value.result)["root/repo/a.txt"] == b"begun"
    assert changed(caught.value.result)["root/repo/b.txt"] == b"asked"


@pytest.mark.parametrize(("how", "asks"), [*((how, True) for how in ENDS), ("it is killed", False)])
def test_a_program_that_the_model_can_have_ended_is_judged_by_what_it_changed(
    tmp_path: Path, task: Task, how: str, asks: bool
) -> None:
    """Before the first turn it is nothing that the model did."""
    code, why = ENDS[how]
    (tmp_path / "agent.py").write_text((ASKS if asks else "import os, time\n") + code)
    seen = list[RewardInput]()

    def reward(given: RewardInput) -> float:
        seen.append(given)
        return 0.0

    agent = Command(line=f"python {tmp_path}/agent.py", sandbox="jail", memory_mb=200)
    bench = AgentBench(agent, reward=reward)
    bench.sample = sample_of(task)
    if not asks:
        assert bench.failed().reason is FailReason.AGENT_ERROR and not seen
        return
    assert bench.finished().result.end is EpisodeEnd.DONE
    assert changed(seen[0].result)["root/repo/b.txt"] == b"asked"
    assert why in seen[0].result["ended"]


def test_a_sandbox_that_is_killed_from_outside_is_no_fault_of_the_model(tmp_path: Path, task: Task) -> None:
    (tmp_path / "agent.py").write_text(ASKS + SLEEPS)

    def script(_: str) -> str:
        for pid in descendants(os.getpid()):
            if b"sandbox.guard" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        return "42"

    bench = AgentBench(Command(line=f"python {tmp_path}/agent.py", sandbox="jail"), script)
    bench.sample = sample_of(task)
    failures = bench.failed()
    assert (
        failures.reason is FailReason.SETUP_FAILED
        and "task fizz: the program's sandbox stopped unexpectedly" in failures.detail
    )


def test_a_sandbox_that_ends_as_the_machine_has_no_memory_is_no_fault_of_the_model(
    tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.isolation.sandbox.jail.GUARD_PROGRAM", SHORT_OF_MEMORY)
    (tmp_path / "agent.py").write_text(ASKS + SLEEPS)
    bench = AgentBench(Command(line=f"python {tmp_path}/agent.py", sandbox="jail"))
    bench.sample = sample_of(task)
    failed = bench.failed()
    assert failed.reason is FailReason.SETUP_FAILED
    assert "this machine was nearly out of memory; lower rollout.slots" in failed.detail


async def test_more_changes_than_a_result_may_have_are_said(tmp_path: Path, task: Task) -> None:
    result = await script(tmp_path, "head -c 800000 /dev/urandom > big")(sample_of(task), ENDPOINT)
    assert list(result) == ["failed"] and "more than 700000 bytes" in result["failed"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"line": "no-such-agent"},
            "the program 'no-such-agent' is neither in the image nor on this machine",
        ),
        (
            {"line": "make x"},
            "the program 'make' is not in the image, and make from this machine cannot be used",
        ),
        ({"line": "true", "files": "."}, "task fizz has an image, so files cannot be used"),
        ({"line": "true", "sandbox": "none"}, "task fizz has an image, so sandbox: none cannot be used"),
    ],
)
async def test_what_cannot_be_in_an_image_is_a_failed_setup(
    tmp_path: Path, task: Task, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=why):
        await Command(**{"sandbox": "jail", **options})(sample_of(task), ENDPOINT)


async def test_an_image_that_is_gone_is_a_failed_setup(task: Task) -> None:
    gone = msgspec.structs.replace(task, image="gone")
    with pytest.raises(SetupError, match="task fizz: no image named 'gone'"):
        await Command(line="true", sandbox="jail")(sample_of(gone), ENDPOINT)


@pytest.mark.parametrize("of", ["task", "option"])
async def test_tools_work_in_the_image_and_leave_what_they_changed(task: Task, of: str) -> None:
    options = {"workspace": {"image": "small-python"}} if of == "option" else {}
    session = Toolbox(load_tools(["workspace"], options)).session(
        sample_of(task) if of == "task" else Sample(0, "t", (), "1")
    )
    try:
        await session.open()
        commands = "pwd; echo $WORD > a.txt; test ! -e /work", "open('b.txt', 'w').write('b')"
        shell = ToolCall("shell", json.dumps({"command": commands[0]}))
        python = ToolCall("python", json.dumps({"code": commands[1]}))
        replies = [(await session.call(call)).content for call in (shell, python)]
        result = changed(await session.result())
    finally:
        await session.close()
    top = "root/repo/" if of == "task" else ""
    assert replies == ["/root/repo" if of == "task" else "/", "1"]
    assert result[f"{top}a.txt"] == (b"hello\n" if of == "task" else b"\n")
    assert result[f"{top}b.txt"] == b"b"


async def test_a_sandbox_that_cannot_be_opened_for_a_tool_is_a_failed_setup(task: Task) -> None:
    session = Toolbox(load_tools(["shell"], {})).session(
        sample_of(msgspec.structs.replace(task, image="gone"))
    )
    with pytest.raises(SetupError, match="task fizz: no image named 'gone'"):
        await session.open()
    await session.close()


def test_an_unknown_image_of_a_tool_is_said_before_the_start() -> None:
    with pytest.raises(ConfigError, match="tool 'shell': no image named 'gone'"):
        load_tools(["shell"], {"shell": {"image": "gone"}})


@pytest.mark.parametrize(
    ("agent", "expected", "why"),
    [
        ({"claude_code": {}}, "ok: agent", f"claude_code {CLAUDE_CODE.tested} in a sandbox"),
        (
            {"claude_code": {"program": "/no/claude"}},
            "error: agent",
            "the program 'claude' is neither in the image nor on this machine",
        ),
        (
            {"claude_code": {"sandbox": "none"}},
            "error: agent",
            "has an image, so sandbox: none cannot be used",
        ),
    ],
)
def test_a_program_is_looked_for_in_the_images_of_tasks_before_the_start(
    given: Given, task: Task, tmp_path: Path, agent: dict[str, Any], expected: str, why: str
) -> None:
    given.program("claude", f"echo {CLAUDE_CODE.tested}")
    for name in ("one", "two", "three", "four"):
        text = '[environment]\ndocker_image = "small-python"\nworkdir = "/root"\n'
        task_folder(tmp_path / "tasks" / name, text)
    spoils = {
        "rollout.agent": agent,
        "data.train": str(tmp_path / "tasks"),
        "rollout.reward": "tests",
    }
    assert_found(given, expected, [spoils], why)


@pytest.mark.parametrize(
    ("first_line", "why"),
    [
        ("#!/usr/bin/env no-node", "'no-node', named in the first line of .*/agent, is not on the PATH"),
        (
            "#!/opt/no/python",
            "the interpreter '/opt/no/python', named in the first line of .*/agent, does not exist",
        ),
        (
            "\x7fELF\2\1\1" + "\0" * 9 + "\2\0\x2a\0" + "\0" * 44,
            r"/agent' is built for another architecture \(ELF machine 42\)",
        ),
    ],
)
def test_a_program_that_an_image_cannot_execute_is_refused_before_the_start(
    given: Given, task: Task, tmp_path: Path, first_line: str, why: str
) -> None:
    Path(given.program("agent", "")).write_text(f"{first_line}\n")
    for name in ("one", "two", "three", "four"):
        text = '[environment]\ndocker_image = "small-python"\nworkdir = "/root"\n'
        task_folder(tmp_path / "tasks" / name, text)
    spoils = {
        "rollout.agent": {"command": {"line": "agent --task={prompt}", "sandbox": "jail"}},
        "data.train": str(tmp_path / "tasks"),
        "rollout.reward": "tests",
    }
    assert_found(
        given,
        "error: agent",
        [spoils],
        rf"rollout\.agent\.command: task \w+: image .* cannot run the program: .*{why}.*; correct the image",
    )


def test_an_image_that_starts_no_shell_is_said_before_the_start(
    given: Given, images: Path, tmp_path: Path
) -> None:
    bare_image(images, "empty", "app")
    for name in ("one", "two", "three", "four"):
        task_folder(tmp_path / "tasks" / name, '[environment]\ndocker_image = "empty"\nworkdir = "/app"\n')
    spoils = {"rollout.tools": ["shell"], "data.train": str(tmp_path / "tasks"), "rollout.reward": "tests"}
    assert_found(given, "error: tasks", [spoils], r"task \w+: image .* has no shell")
