"""Turns what a tool gave back into text. Only memory is bounded here: the episode cuts replies, in tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.values import finite

MAX_REPLY = 1 << 18
"""Bytes of a reply, more than a model can read: a tool may return a gigabyte."""


@dataclass(frozen=True)
class Rewarded:
    """A tool returns this to reward the turn that called it: its reply, and the reward beside it, which the
    model does not read. The rewards of an episode add up, the reward function's included."""

    content: Any
    reward: float


def reply_of(value: Any) -> tuple[str, float]:
    """(text, reward) of what a tool returned: text as it stands, other values as JSON. ValueError for a
    reward that is no finite number."""
    given = value if isinstance(value, Rewarded) else Rewarded(value, 0.0)
    reward = finite("the tool's reward", given.reward)
    text = given.content if isinstance(given.content, str) else _json(given.content)
    return within_memory(text), reward


def within_memory(text: str) -> str:
    """The text as UTF-8 can hold it, or its two ends where it has more than MAX_REPLY bytes. As quick for any
    length."""
    data = text[: MAX_REPLY + 1].encode(errors="replace")
    if len(data) <= MAX_REPLY:
        return data.decode()
    half = MAX_REPLY // 2
    end = text[-half:].encode(errors="replace")[-half:]
    return f"{data[:half].decode(errors='ignore')}\n[...]\n{end.decode(errors='ignore')}"


_encoder = json.JSONEncoder(ensure_ascii=False, default=msgspec.to_builtins)


def _json(value: Any) -> str:
    """Write JSON, but no further than a quarter of MAX_REPLY: a character has up to four bytes."""
    text = ""
    for chunk in _encoder.iterencode(value):
        text += chunk
        if len(text) > MAX_REPLY // 4:
            return text[: MAX_REPLY // 4 - 5] + "[...]"
    return text
