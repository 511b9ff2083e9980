"""Plays environments as an episode does: a reset, and a step for each turn of the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from asyncrl.config import Options
from asyncrl.environments import load_environment
from asyncrl.types import Message, Observation, Sample


def row(number: int = 0, *prompt: Message, **extra: Any) -> Sample:
    return Sample(number, "game", prompt, "null", extra_info_json=json.dumps(extra))


async def talk(plugin: dict[str, Options], sample: Sample, turns: Sequence[str | Message]) -> Any:
    """What the environment says at first and to each turn, until it is done; and its own tools."""
    world = load_environment(plugin)()
    try:
        heard = [await world.reset(sample)]
        for turn in turns:
            heard.append(await world.step(Message("assistant", turn) if isinstance(turn, str) else turn))
            if heard[-1].done:
                break
        return heard, list(world.tools)
    finally:
        await world.close()


def play(plugin: dict[str, Options], sample: Sample, turns: Sequence[str | Message]) -> list[Observation]:
    heard: list[Observation] = asyncio.run(talk(plugin, sample, turns))[0]
    return heard


def text(observation: Observation) -> str:
    """Return the text of the observation's only message, of a user."""
    (message,) = observation.messages
    assert message.role == "user"
    return message.content


def summary_of(observation: Observation) -> tuple[str, float, bool]:
    return text(observation), observation.reward, observation.done
