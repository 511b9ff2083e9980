"""A rollout worker in a thread of the test, with an engine and a tool that the test can watch and hold."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from asyncrl.config import RunConfig, parse
from asyncrl.engines.base import Request
from asyncrl.rollout.worker import run
from asyncrl.tools import Tool, tool
from asyncrl.types import Generation, Message, Sample, StopReason, VersionSpan
from asyncrl.wire.sockets import Endpoints
from tests.fakes.engine import ScriptedEngine

LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


class Seams:
    """The parts of a worker that a test can touch, reset for each test."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.looks: list[str] = []
        self.tool_gate = threading.Event()
        self.tool_gate.set()


seams = Seams()


class CallingEngine(ScriptedEngine):
    """Writes a call of `look` in the first turn and 42 in the second, with a real tokenizer."""

    calls = [LOOK]

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(lambda request: "")
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        seams.engines.append(self)

    async def generate(self, request: Request) -> Generation:
        nothing = await super().generate(request)
        replies = self._tokenizer.decode(list(request.ids)).count("<|im_start|>tool")
        text = self.calls[replies] if replies < len(self.calls) else "42"
        ids = self._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        self.tokens += len(ids) - len(nothing.ids)
        span = VersionSpan(0, len(ids), self.version, self.version)
        return Generation(tuple(ids), (-0.5,) * len(ids), (span,), StopReason.STOP)


def run_shell(command: str) -> str:
    return f'<tool_call>{{"name": "shell", "arguments": {json.dumps({"command": command})}}}</tool_call>'


class ShellEngine(CallingEngine):
    """Writes a command per turn. Each command leaves a line, and its reply cannot be foretold."""

    calls = [
        *(
            run_shell(f"sleep 0.{n}; echo {n} >> log; tee -a ids < /proc/sys/kernel/random/uuid")
            for n in range(5)
        ),
        run_shell("cat log ids"),
    ]


class CountingEngine(CallingEngine):
    """Writes a command per turn. Each command leaves a line."""

    calls = [
        *(run_shell(f"sleep 0.0{n}; echo {n} >> log; wc -l < log") for n in range(5)),
        run_shell("cat log"),
    ]


def looker() -> Tool:
    """A factory, as a user would write it."""

    @tool(name="look", blocking=True)
    def look() -> str:
        """Look."""
        seams.looks.append("looked")
        assert seams.tool_gate.wait(60)
        return "seen"

    return look


def config(model_path: str, run_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run whose worker has the calling engine.

    Keyword arguments are sections.
    """
    rollout = {"tools": ["tests.fakes.worker:looker"], "slots": 4, **sections.pop("rollout", {})}
    launch = {"lease": 1.0, "start_timeout": 60.0, **sections.pop("launch", {})}
    engine = {"name": "tests.fakes.worker:CallingEngine", **sections.pop("engine", {})}
    return parse(
        {
            "name": "t",
            "run_dir": str(run_dir),
            "model": {"path": model_path, "dtype": "float32"},
            "data": {"train": "unused"},
            "rollout": rollout,
            "launch": launch,
            "engine": engine,
            **sections,
        }
    )


def sample() -> Sample:
    return Sample(0, "test", (Message("user", "look, then answer"),), "42")


class WorkerThread(threading.Thread):
    """A worker in a thread. `code`: the exit code, after the end."""

    def __init__(self, config: RunConfig, endpoints: Endpoints) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.endpoints = endpoints
        self.code: int | None = None

    def run(self) -> None:
        self.code = run(self.config, self.endpoints, 0, "incarnation")

    def wait_for_end(self, timeout: float = 60.0) -> int | None:
        self.join(timeout)
        assert not self.is_alive(), "the worker did not end"
        return self.code
