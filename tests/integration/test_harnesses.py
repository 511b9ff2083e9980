"""Coding agents as people run them lead episodes: Claude Code and Codex, whose model is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.gateway import load_agent, server
from asyncrl.types import EpisodeEnd, Message
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call
from tests.fakes.fetched import harness

TASK = "write fizz.py, run it, show it"
PROGRAMS = {
    "claude_code": "claude_code/claude",
    "codex": "codex/vendor/x86_64-unknown-linux-musl/bin/codex",
}
SHELLS: dict[str, Callable[[str], str]] = {
    "claude_code": lambda line: call("Bash", json.dumps({"command": line})),
    "codex": lambda line: call("exec_command", json.dumps({"cmd": line})),
}
every_harness = pytest.mark.parametrize("name", PROGRAMS)


def bench_of(name: str, script: Callable[[str], str], size: int = 400_000, **options: Any) -> AgentBench:
    """`size`: the tokens of a row; a character is a token here."""
    agent = load_agent({name: {"program": str(harness(PROGRAMS[name])), **options}})
    bench = AgentBench(agent, script, max_tokens=size, max_turns=32, max_rows=16)
    bench.sample = replace(bench.sample, prompt=(Message("user", TASK),))
    return bench


def task(shell: Callable[[str], str]) -> Callable[[str], str]:
    """The turns of TASK, by what the prompt shows already: the third makes two calls at once."""

    def script(prompt: str) -> str:
        if "[SHOWN" in prompt:
            return "all done"
        if "[RUN" in prompt:
            return "I show it. " + shell("echo SHOWN; cat fizz.py") + shell("ls")
        if "[WRITTEN" in prompt:
            return "I run it. " + shell("echo RUN; python3 fizz.py")
        return "I write it. " + shell("echo 'print(6 * 7)' > fizz.py; echo WRITTEN")

    def unified(prompt: str) -> str:
        """Codex puts its own lines before what a command said."""
        for mark in ("WRITTEN", "RUN", "SHOWN"):
            prompt = prompt.replace(f"\n{mark}\n", f"[{mark}\n")
        return script(prompt)

    return unified


@every_harness
def test_a_task_of_four_turns_is_one_row(name: str) -> None:
    bench = bench_of(name, task(SHELLS[name]))
    end = bench.finished()
    assert (end.stats.turns, end.stats.rows, end.stats.tool_calls) == (4, 1, 4)
    assert end.result.end is EpisodeEnd.DONE
    (row,) = bench.rows
    assert row.endswith("all done") and "RUN\n42" in row and "SHOWN\nprint(6 * 7)" in row
    assert all("".join(map(chr, turn.ids[:-1])) in row for turn in bench.turns)


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
    ids=PROGRAMS,
)
def test_a_long_turn_is_waited_for(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the client waits for a silent stream."""
    monkeypatch.setattr(server, "BEAT_SECONDS", 0.3)
    bench = bench_of(name, lambda prompt: "all done", **options)
    generate = bench.engine.generate

    async def held(request: Any) -> Any:
        await asyncio.sleep(3)  # of the client's clock
        return await generate(request)

    monkeypatch.setattr(bench.engine, "generate", held)
    assert bench.finished().stats.turns == 1
    assert not bench.engine.cancelled


def test_a_full_row_makes_claude_code_shorten_its_history() -> None:
    """It asks for a summary, in a row of its own, and goes on with that."""

    def script(prompt: str) -> str:
        if "IT WAS LARGE" in prompt:
            return "all done"
        if "summary" in prompt[-4000:].lower():
            return "<summary>IT WAS LARGE</summary>"
        return call("Bash", json.dumps({"command": "head -c 4000 /dev/zero | tr '\\0' a"}))

    bench = bench_of("claude_code", script, size=60_000)
    end = bench.finished()
    texts = ["".join(map(chr, turn.ids[:-1])) for turn in bench.turns]
    assert texts[-2:] == ["<summary>IT WAS LARGE</summary>", "all done"]
    assert (end.result.end, end.stats.rows) == (EpisodeEnd.DONE, 3)
