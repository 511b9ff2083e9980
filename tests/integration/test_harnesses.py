"""Coding agents as people run them lead episodes: Claude Code and Codex, whose model is a script."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.gateway import Endpoint, server
from asyncrl.types import EpisodeEnd, Sample
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call
from tests.fakes.fetched import harness

SECONDS = 50.0
TASK = "write fizz.py, run it, show it"


async def run(program: Path, *words: str, home: Path, **environment: str) -> None:
    """Run it in a directory and a home of its own. AssertionError, with what it said, if it fails."""
    place = home / "place"
    place.mkdir(parents=True)
    made = await asyncio.create_subprocess_exec(
        *(program, *words),
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SECONDS):
            said, _ = await made.communicate()
    finally:
        if made.returncode is None:
            made.kill()
    assert made.returncode == 0, said.decode(errors="replace")[-2000:]


async def claude_code(home: Path, endpoint: Endpoint, **environment: str) -> None:
    words = ("-p", TASK, "--dangerously-skip-permissions", "--output-format", "json")
    environment = {
        "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # or it refuses to work for root
        **environment,
    }
    await run(harness("claude_code/claude"), *words, home=home, **environment)


async def codex(home: Path, endpoint: Endpoint, **settings: int) -> None:
    program = harness("codex/vendor/x86_64-unknown-linux-musl/bin/codex")
    (home / ".codex").mkdir(parents=True)
    lines = {
        "name": "asyncrl",
        "base_url": endpoint.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        **settings,
    }
    text = f'model = "{endpoint.model}"\nmodel_provider = "asyncrl"\n[model_providers.asyncrl]\n'
    text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    (home / ".codex/config.toml").write_text(text)
    words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK)
    await run(program, *words, home=home, OPENAI_API_KEY=endpoint.api_key)


AGENTS: dict[str, tuple[Callable[..., Any], Callable[[str], str]]] = {
    "Claude Code": (claude_code, lambda line: call("Bash", json.dumps({"command": line}))),
    "Codex": (codex, lambda line: call("exec_command", json.dumps({"cmd": line}))),
}
every_agent = pytest.mark.parametrize(("lead", "shell"), AGENTS.values(), ids=AGENTS)


def bench_of(lead: Any, script: Callable[[str], str], home: Path, size: int = 400_000, **options: Any) -> Any:
    """`size`: the tokens of a row; a character is a token here."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        await lead(home, endpoint, **options)

    return AgentBench(agent, script, max_tokens=size, max_turns=32, max_rows=16)


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


@every_agent
def test_a_task_of_four_turns_is_one_row(lead: Any, shell: Any, tmp_path: Path) -> None:
    bench = bench_of(lead, task(shell), tmp_path / "home")
    end = bench.finished()
    assert (end.stats.turns, end.stats.rows, end.stats.tool_calls) == (4, 1, 4)
    assert end.result.end is EpisodeEnd.DONE
    (row,) = bench.rows
    assert row.endswith("all done") and "RUN\n42" in row
    assert all("".join(map(chr, turn.ids[:-1])) in row for turn in bench.turns)
    assert (tmp_path / "home/place/fizz.py").read_text() == "print(6 * 7)\n"


@pytest.mark.parametrize(
    ("lead", "shell", "options"),
    [
        (*AGENTS["Claude Code"], {"API_TIMEOUT_MS": "1500"}),
        (*AGENTS["Codex"], {"stream_idle_timeout_ms": 1500, "stream_max_retries": 0}),
    ],
    ids=AGENTS,
)
def test_a_long_turn_is_waited_for(
    lead: Any, shell: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the client waits for a silent stream."""
    monkeypatch.setattr(server, "BEAT_SECONDS", 0.3)
    bench = bench_of(lead, lambda prompt: "all done", tmp_path / "home", **options)
    generate = bench.engine.generate

    async def held(request: Any) -> Any:
        await asyncio.sleep(3)  # of the client's clock
        return await generate(request)

    monkeypatch.setattr(bench.engine, "generate", held)
    assert bench.finished().stats.turns == 1
    assert not bench.engine.cancelled


def test_a_full_row_makes_claude_code_shorten_its_history(tmp_path: Path) -> None:
    """It asks for a summary, in a row of its own, and goes on with that."""

    def script(prompt: str) -> str:
        if "IT WAS LARGE" in prompt:
            return "all done"
        if "summary" in prompt[-4000:].lower():
            return "<summary>IT WAS LARGE</summary>"
        return call("Bash", json.dumps({"command": "head -c 4000 /dev/zero | tr '\\0' a"}))

    bench = bench_of(claude_code, script, tmp_path / "home", size=60_000)
    end = bench.finished()
    texts = ["".join(map(chr, turn.ids[:-1])) for turn in bench.turns]
    assert texts[-2:] == ["<summary>IT WAS LARGE</summary>", "all done"]
    assert (end.result.end, end.stats.rows) == (EpisodeEnd.DONE, 3)
