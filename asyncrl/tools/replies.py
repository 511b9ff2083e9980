"""What a tool gave back, as text of a bounded size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.values import finite


@dataclass(frozen=True)
class Rewarded:
    """What a tool returns to reward the turn that called it: its reply, and the reward beside it, which the
    model does not read. The rewards of an episode add up, the reward function's included."""

    content: Any
    reward: float


def reply_of(value: Any, limit: int) -> tuple[str, float]:
    """(text of at most `limit` characters, reward) of what a tool returned."""
    given = value if isinstance(value, Rewarded) else Rewarded(value, 0.0)
    reward = finite("the tool's reward", given.reward)
    return (
        cut(given.content, limit) if isinstance(given.content, str) else _json(given.content, limit)
    ), reward


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, saying so where the middle was lost. Costs the same for any length."""
    if len(text) <= limit:
        return text
    note = f" [cut: {len(text)} characters] "
    room = limit - len(note)
    return text[: room - room // 2] + note + text[len(text) - room // 2 :]


_encoder = json.JSONEncoder(ensure_ascii=False, default=msgspec.to_builtins)


def _json(value: Any, limit: int) -> str:
    """JSON, written only as far as it is read: a tool may return much more than anybody wants."""
    text = ""
    for chunk in _encoder.iterencode(value):
        text += chunk
        if len(text) > limit:
            return text[: limit - 6] + " [cut]"
    return text
