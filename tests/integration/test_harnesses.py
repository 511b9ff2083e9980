"""Coding agents lead episodes as people run them, by their name and nothing else. A script in place of the
model answers by what a prompt shows."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.config import RolloutConfig
from asyncrl.config.composition import config_root
from asyncrl.conversation.turns import rows_of, without_untrained
from asyncrl.gateway import Command, load_agent, load_untrained, server
from asyncrl.types import EpisodeEnd, Message
from asyncrl.vision.files import prepare_image
from asyncrl.vision.image_ids import find_runs
from tests.fakes import episodes
from tests.fakes.agents import AgentBench
from tests.fakes.chat import IMAGE_LAYOUT, FakeChat, call
from tests.fakes.episodes import read
from tests.fakes.fetched import IN_THE_GATE, harness
from tests.fakes.image_data import image_file

TASK = "write fizz.py, run it, show it"
FULL = 400_000  # tokens of a row; a character is a token here


@pytest.fixture(autouse=True)
def time_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give episodes more time: Node takes ten seconds to start even when nothing else runs."""
    monkeypatch.setattr(episodes, "SECONDS", 200.0)


class Client(NamedTuple):
    """Describes a coding agent. `shell`: the tool that runs a command, with its argument; `viewer`: the tool
    that shows an image file to the model; `end`: what the model writes last, with `end_calls` calls; `side`:
    the number of turns that are not trained."""

    program: str
    shell: tuple[str, str]
    viewer: tuple[str, str] = ("", "")
    end: str = "all done"
    end_calls: int = 0
    side: int = 0

    def runs(self, line: str) -> str:
        tool, argument = self.shell
        return call(tool, json.dumps({argument: line, "description": "It runs a command."}))


CLIENTS = {
    "claude_code": Client("claude_code/claude", ("Bash", "command"), ("Read", "file_path")),
    "codex": Client(
        "codex/vendor/x86_64-unknown-linux-musl/bin/codex", ("exec_command", "cmd"), ("view_image", "path")
    ),
    "opencode": Client("opencode/bin/opencode", ("bash", "command"), side=1),
    "qwen_code": Client("qwen_code/cli-entry.js", ("run_shell_command", "command")),
    "mini_swe_agent": Client(
        f"{sys.prefix}/bin/mini",
        ("bash", "command"),
        end="all done" + call("bash", json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
        end_calls=1,
    ),
}
every_client = pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.full) for name in CLIENTS]
)


def agent_of(name: str, **options: Any) -> Command:
    program = str(harness(CLIENTS[name].program))
    # A program in Python may import for a minute when other tests have the processors.
    agent = load_agent({name: {"program": program, "setup_seconds": 300, **options}})
    assert isinstance(agent, Command) and agent.sandbox == "jail"
    return agent


def bench_of(
    name: str,
    script: Callable[[str], str],
    task: str = TASK,
    size: int = FULL,
    chat: FakeChat | None = None,
    **options: Any,
) -> AgentBench:
    """Limits and side requests are those that the name brings, but for `size`. It runs in a sandbox."""
    text = (config_root() / "configs" / "agent" / f"{name}.yaml").read_text()
    config = msgspec.convert(msgspec.yaml.decode(text)["rollout"], RolloutConfig)
    bench = AgentBench(
        agent_of(name, **options),
        script,
        untrained=load_untrained(config.untrained_agents),
        max_tokens=size,
        max_turns=config.max_turns,
        max_rows=config.max_rows,
        chat=chat,
    )
    bench.sample = replace(bench.sample, prompt=(Message("user", task),))
    return bench


def rows(bench: AgentBench) -> list[str]:
    """The rows that are trained, in any order."""
    return [read(ids) for ids in rows_of(without_untrained(bench.turns))]


def texts(bench: AgentBench) -> Sequence[str]:
    return ["".join(map(chr, turn.generation.ids[:-1])) for turn in without_untrained(bench.turns)]


def solves(client: Client) -> Callable[[str], str]:
    """The turns of TASK: the third makes two calls at once. A request without tools is for a title."""

    def script(prompt: str) -> str:
        shown_marks = [
            mark for mark in ("WRITTEN", "RUN", "SHOWN") if prompt.count(mark) > prompt.count(f"echo {mark}")
        ]
        match shown_marks:
            case ["WRITTEN", "RUN", "SHOWN"]:
                return client.end
            case ["WRITTEN", "RUN"]:
                return "I show it. " + client.runs("echo SHOWN; cat fizz.py") + client.runs("ls")
            case ["WRITTEN"]:
                return "I run it. " + client.runs("echo RUN; python3 fizz.py")
        if not prompt.startswith("{"):
            return "A file is written"
        return "I write it. " + client.runs("echo 'print(6006 * 7)' > fizz.py; echo WRITTEN")

    return script


@every_client
def test_its_version_is_found_in_a_sandbox(name: str) -> None:
    agent = agent_of(name)
    assert asyncio.run(agent.version()) == agent.harness.tested


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.viewer[0]])
def test_the_model_reads_an_image_that_its_tool_shows(name: str) -> None:
    client = CLIENTS[name]
    path = "/sandbox/work/red.png"
    file = image_file(64, 48, "red")

    def script(prompt: str) -> str:
        if f'"{path}"' in prompt:  # the arguments of the tool that shows images
            return client.end
        if prompt.count("WRITTEN") > prompt.count("echo WRITTEN"):
            tool, argument = client.viewer
            return call(tool, json.dumps({argument: path}))
        return client.runs(f"echo {base64.b64encode(file).decode()} | base64 -d > {path}; echo WRITTEN")

    bench = bench_of(name, script, chat=FakeChat(image_layout=IMAGE_LAYOUT))
    bench.finished()
    digests = [run.digest for run in find_runs(bench.engine.requests[-1].ids)]
    assert digests == [prepare_image(file, IMAGE_LAYOUT).ref.digest]


@every_client
def test_a_task_of_four_turns_is_one_row(name: str) -> None:
    client = CLIENTS[name]
    bench = bench_of(name, solves(client))
    end = bench.finished()
    stats = end.stats
    assert (stats.turns, stats.rows, stats.tool_calls) == (4, 1, 4 + client.end_calls)
    assert (end.result.end, stats.untrained_turns) == (EpisodeEnd.DONE, client.side)
    (row,) = rows(bench)
    assert row.endswith(client.end) and "42042" in row
    assert all(text in row for text in texts(bench))


def test_what_claude_code_fills_in_begins_no_row() -> None:
    """It repeats calls with defaults that the model left out: of Edit, replace_all."""

    def script(prompt: str) -> str:
        file = {"file_path": "/sandbox/work/a.py"}
        if "I change it" in prompt:
            return "all done"
        if "I write it" in prompt:
            return "I change it. " + call("Edit", json.dumps({**file, "old_string": "1", "new_string": "2"}))
        return "I write it. " + call("Write", json.dumps({**file, "content": "x = 1"}))

    stats = bench_of("claude_code", script).finished().stats
    assert (stats.turns, stats.rows) == (3, 1)


def test_a_search_of_claude_code_is_not_trained() -> None:
    """The tool asks the model for what it would find."""

    def script(prompt: str) -> str:
        if not prompt.startswith("{"):
            return "I made it up"
        if "I made it up" in prompt:
            return "all done"
        return "I search. " + call("WebSearch", json.dumps({"query": "asynchronous trainers"}))

    bench = bench_of("claude_code", script)
    stats = bench.finished().stats
    assert (stats.turns, stats.untrained_turns, stats.rows) == (2, 1, 1)


def test_sub_agents_of_claude_code_are_rows() -> None:
    """Both run at once; the prompt of each shows its own part."""

    def script(prompt: str) -> str:
        parts = [part for part in ("PART ONE", "PART TWO") if part in prompt]
        if len(parts) == 1:
            return f"{parts[0]} is done"
        if "PART ONE is done" in prompt and "PART TWO is done" in prompt:
            return "all done"
        options = {"description": "a part", "subagent_type": "general-purpose", "run_in_background": False}
        asks = ({**options, "prompt": f"Do PART {number}."} for number in ("ONE", "TWO"))
        return "".join(call("Agent", json.dumps(ask)) for ask in asks)

    bench = bench_of("claude_code", script)
    stats = bench.finished().stats
    assert (stats.turns, stats.rows) == (4, 3)
    ends = ("all done", "PART ONE is done", "PART TWO is done")
    assert {next(end for end in ends if row.endswith(end)) for row in rows(bench)} == set(ends)


def test_a_compaction_of_codex_is_a_row_and_begins_one() -> None:
    """Of a history that nearly fills a row, it asks for a summary, and goes on with that."""

    def script(prompt: str) -> str:
        if "IT WAS LARGE" in prompt:
            return "all done"
        if not prompt.startswith("{"):
            return "IT WAS LARGE"
        return CLIENTS["codex"].runs("head -c 6000 /dev/zero | tr '\\0' a")

    bench = bench_of("codex", script, size=60_000)
    end = bench.finished()
    assert (end.result.end, end.stats.rows) == (EpisodeEnd.DONE, 3)
    assert texts(bench)[-2:] == ["IT WAS LARGE", "all done"]
    assert sorted(row.count("a" * 6000) > 1 for row in rows(bench)) == [False, True, True]


def test_a_full_row_makes_claude_code_shorten_its_history() -> None:
    """It asks for a summary, in a row of its own, and goes on with that."""

    def script(prompt: str) -> str:
        if "IT WAS LARGE" in prompt:
            return "all done"
        if "summary" in prompt[-4000:].lower():
            return "<summary>IT WAS LARGE</summary>"
        return CLIENTS["claude_code"].runs("head -c 4000 /dev/zero | tr '\\0' a")

    bench = bench_of("claude_code", script, size=120_000)
    end = bench.finished()
    assert texts(bench)[-2:] == ["<summary>IT WAS LARGE</summary>", "all done"]
    assert (end.result.end, end.stats.rows) == (EpisodeEnd.DONE, 3)


@pytest.mark.full
def test_upkeep_of_qwen_code_is_not_trained() -> None:
    """It comes after the answer, with other instructions."""
    bench = bench_of("qwen_code", lambda prompt: "hello", task="say hello")
    end = bench.finished()
    assert (end.stats.turns, end.stats.untrained_turns) == (1, 1)
    assert end.result.turn_rewards == (1.0,)
    (row,) = rows(bench)
    assert "say hello" in row
    assert bench.turns[-1].untrained


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("claude_code", {"env": "API_TIMEOUT_MS=1500"}),
        (
            "codex",
            {
                "arguments": "-c model_providers.asyncrl.stream_idle_timeout_ms=1500 "
                "-c model_providers.asyncrl.stream_max_retries=0"
            },
        ),
    ],
    ids=IN_THE_GATE,
)
def test_a_long_turn_is_waited_for(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the client waits for a silent stream."""
    monkeypatch.setattr(server, "HEARTBEAT_SECONDS", 0.3)
    bench = bench_of(name, lambda prompt: "all done", **options)
    generate = bench.engine.generate

    async def generate_late(request: Any) -> Any:
        await asyncio.sleep(3)  # of the client's clock
        return await generate(request)

    monkeypatch.setattr(bench.engine, "generate", generate_late)
    assert bench.finished().stats.turns == 1
    assert not bench.engine.cancelled
