"""Engines that note what they sample, an agent that never repeats itself, and a script for coding agents."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import AutoTokenizer

from asyncrl.engines.base import Request
from asyncrl.engines.torch.engine import build
from asyncrl.gateway import Endpoint
from asyncrl.types import Generation, Sample, StopReason, VersionSpan
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, WeightsRef
from tests.fakes.agents import message
from tests.fakes.chat import call
from tests.fakes.engine import ScriptedEngine

PLACE = "ASYNCRL_TEST_NOTES"  # variable with the directory of the notes
TURNS = 3
MARKS = ("WRITTEN", "SHOWN")  # words that the commands of a coding agent print
SHELLS = (("exec_command", "cmd"), ("Bash", "command"))  # the tools that run one, with an argument


def note(name: str, value: Any) -> None:
    """Append a line to the file at once, so that the line survives the process. One call writes the line: a
    buffered file writes long lines in pieces, between which another process writes, or this one is killed."""
    line = f"{json.dumps(value)}\n".encode()
    with Path(os.environ[PLACE], name).open("ab", buffering=0) as file:
        assert file.write(line) == len(line)


def notes(folder: Path, name: str) -> list[Any]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def noting_engine(**options: Any) -> Any:
    return noting(build(**options))


def coding_engine(model_path: str, version: int = 0, **options: Any) -> Any:
    return noting(Coder(model_path, version))


def noting(engine: Any) -> Any:
    generate = engine.generate

    async def noted(request: Request) -> Generation:
        generation = await generate(request)
        if not request.session.startswith("probe-"):  # sampled for the trainer's test of the engine
            note("sampled", [list(request.ids), list(generation.ids)])
        return generation

    engine.generate = noted
    return engine


async def forgetful(sample: Sample, endpoint: Endpoint) -> float:
    """Leads an episode whose first prompt has a new session id, so that no attempt repeats its requests."""
    session = str(uuid4().int)
    history: list[Any] = [f"{session} {sample.prompt[-1].content}"]
    for number in range(TURNS):
        history += [await message(endpoint, *history), "and then?"]
        note("heard", [os.getpid(), session, number])
    return 0.0


class Coder(ScriptedEngine):
    """Writes turns that make a coding agent run a command after another, and then an answer.

    No two turns are equal.
    """

    def __init__(self, model_path: str, version: int) -> None:
        super().__init__(lambda request: "", version)
        self._tokens: Any = AutoTokenizer.from_pretrained(model_path)

    async def generate(self, request: Request) -> Generation:
        prompt = self._tokens.decode(request.ids)
        unique = uuid4().hex
        shown_marks = [mark for mark in MARKS if prompt.count(mark) > prompt.count(f"echo {mark}")]
        done = len(shown_marks)
        text = f"all done {unique}"
        if done:  # the earlier requests are durable
            note("heard", [os.getpid(), request.session, done if done == TURNS - 1 else done - 1])

        if done < TURNS - 1:
            tool, argument = next(names for names in SHELLS if f'"{names[0]}"' in prompt)
            line = {argument: f"echo {MARKS[done]}; sleep 1", "description": "It runs a command."}
            text = f"{unique} {call(tool, json.dumps(line))}"

        ids = (*self._tokens.encode(text), request.sampling.stop_ids[0])
        spans = (VersionSpan(0, len(ids), self.version, self.version),)
        self.tokens += len(ids)

        return Generation(ids, (-1.0,) * len(ids), spans, StopReason.STOP)

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        return ()  # a script has no log-probs that the trainer's could be compared with

    async def load(self, ref: WeightsRef) -> Manifest:
        manifest, _ = await asyncio.to_thread(disk.read_tensors, ref)
        self._version = ref.version.step
        return manifest
