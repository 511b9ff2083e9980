"""A run whose engine notes what it samples, and an agent that never repeats itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from asyncrl.engines.base import Request
from asyncrl.engines.torch.engine import build
from asyncrl.gateway import Endpoint
from asyncrl.types import Generation, Sample
from tests.fakes.agents import message

PLACE = "ASYNCRL_TEST_NOTES"  # variable with the directory of the notes
TURNS = 3


def note(name: str, found: Any) -> None:
    """A line at once: nothing of it is lost with the process."""
    with Path(os.environ[PLACE], name).open("a") as file:
        file.write(json.dumps(found) + "\n")


def notes(folder: Path, name: str) -> list[Any]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def noting_engine(**options: Any) -> Any:
    engine: Any = build(**options)
    generate = engine.generate

    async def noted(request: Request) -> Generation:
        made = await generate(request)
        note("sampled", [list(request.ids), list(made.ids)])
        return made

    engine.generate = noted
    return engine


async def forgetful(sample: Sample, endpoint: Endpoint) -> float:
    """Each prompt has a session id, as Claude Code's has."""
    session = str(uuid4().int)
    history: list[Any] = [f"{session} {sample.prompt[-1].content}"]
    for number in range(TURNS):
        history += [await message(endpoint, *history), "and then?"]
        note("heard", [os.getpid(), session, number])
    return 0.0
