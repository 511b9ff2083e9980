"""Scores of reasoning-gym: each task judges its own answers, in parts where it can."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import text_in_tag
from asyncrl.rewards.base import RewardInput, rewards

EXTRA_KEY = "reasoning_gym"  # key of extra_info: {"task": name, "entry": entry in JSON's types, as text}


@rewards.register("reasoning_gym")
class ReasoningGym:
    """Gives the score, 0 to 1, by the sample's task of the last `<answer>…</answer>`, or of the whole answer
    if the tag is missing. `tag`: another tag, or '': always the whole answer."""

    def __init__(self, *, tag: str = "answer") -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("reasoning-gym is not installed; pip install 'asyncrl[reasoning-gym]'")
        self._tag = tag

    def load(self) -> None:
        """Import reasoning-gym, which takes a second."""
        import reasoning_gym  # noqa: F401

    def __call__(self, episode: RewardInput) -> float:
        row = episode.sample.extra_info.get(EXTRA_KEY)
        if not isinstance(row, dict) or not {"task", "entry"} <= row.keys():
            raise ValueError(
                f"extra_info.{EXTRA_KEY} is missing; prepare the rows with asyncrl data reasoning_gym:TASK"
            )
        entry = unpack_entry(json.loads(row["entry"]))
        tagged_answer = text_in_tag(episode.answer, self._tag)
        answer = episode.answer if tagged_answer is None else tagged_answer
        return float(_scorer_of_task(row["task"])(answer.strip(), entry))


@functools.cache
def _scorer_of_task(task: str) -> Callable[[str, dict[str, Any]], float]:
    """Return the scoring function of a task. ValueError for an unknown task."""
    import reasoning_gym as gym

    return gym.get_score_answer_fn(task)


def pack_entry(value: Any) -> Any:
    """Convert an entry to JSON's types. `unpack_entry` restores the entry exactly, including tuples and keys
    that are numbers, which some tasks compare with."""
    match value:
        case dict():
            return {"of": [[pack_entry(key), pack_entry(item)] for key, item in value.items()]}
        case tuple():
            return {"tuple": [pack_entry(item) for item in value]}
        case list():
            return [pack_entry(item) for item in value]
        case str():
            return str(value)  # numpy's, too
        case bool() | int() | float() | None:
            return value

    raise ValueError(f"{type(value).__name__} cannot be written as JSON")


def unpack_entry(value: Any) -> Any:
    """Restore an entry that was converted to JSON's types."""
    if isinstance(value, list):
        return [unpack_entry(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(unpack_entry, value["tuple"]))
    return {unpack_entry(key): unpack_entry(item) for key, item in value["of"]}
