"""Scores of reasoning-gym: each task judges its own answers, in parts where it can."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import tagged
from asyncrl.rewards.base import RewardInput, rewards

KEY = "reasoning_gym"  # of extra_info: {"task": its name, "entry": `packed` entry, as JSON text}


@rewards.register("reasoning_gym")
class ReasoningGym:
    """The score that the task of the sample gives to the last `<answer>…</answer>`, or to the whole answer
    where there is none; 0 to 1. `tag`: another tag, or '': always the whole answer."""

    def __init__(self, *, tag: str = "answer") -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning-gym is not installed; pip install 'asyncrl[reasoning-gym]'")
        self._tag = tag

    def load(self) -> None:
        """Import it, which takes a second."""
        import reasoning_gym  # noqa: F401

    def __call__(self, given: RewardInput) -> float:
        row = json.loads(given.sample.extra_info).get(KEY)
        if not isinstance(row, dict) or not {"task", "entry"} <= row.keys():
            raise ValueError(f"extra_info.{KEY} is missing; asyncrl data reasoning_gym:TASK writes such rows")
        entry = unpacked(json.loads(row["entry"]))
        found = tagged(given.answer, self._tag)
        answer = given.answer if found is None else found
        return float(_scorer(row["task"])(answer.strip(), entry))


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """ValueError: no such task."""
    import reasoning_gym as gym

    return gym.get_score_answer_fn(task)


def packed(value: Any) -> Any:
    """An entry in JSON's types; `unpacked` gives the same again, tuples and keys that are numbers included,
    which some tasks compare with."""
    match value:
        case dict():
            return {"of": [[packed(key), packed(item)] for key, item in value.items()]}
        case tuple():
            return {"tuple": [packed(item) for item in value]}
        case list():
            return [packed(item) for item in value]
        case str():
            return str(value)  # numpy's, too
        case bool() | int() | float() | None:
            return value
    raise ValueError(f"{type(value).__name__} has no JSON")


def unpacked(value: Any) -> Any:
    """See `packed`."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(unpacked, value["tuple"]))
    return {unpacked(key): unpacked(item) for key, item in value["of"]}
