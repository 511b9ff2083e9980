"""Reads the format of gpt-oss: a turn is a series of messages, each with a channel; calls have a recipient.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from asyncrl.conversation.parsers.base import Parsed, RawCall, assemble, parsers
from asyncrl.conversation.parsers.values import Malformed, object_at, quote

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_TAGS = ("<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class _HarmonyMessage(NamedTuple):
    header: str
    body: str | None  # None: the header was not finished

    @property
    def recipient(self) -> str:
        match = _RECIPIENT.search(self.header)
        return match[1] if match and match[0] != "to=user" else ""

    @property
    def reasoning(self) -> bool:
        return _ANALYSIS.search(self.header) is not None


@parsers.register("harmony")
def harmony(text: str, tools: tuple[str, ...] = ()) -> Parsed:
    """Parse a turn of gpt-oss. The channels mark content, so nothing depends on how the prompt ended."""
    messages = _split_messages(text)
    calls = [_read_call(message) for message in messages if message.recipient]
    text_messages = [message for message in messages if not message.recipient]
    content = _join_bodies(message.body for message in text_messages if not message.reasoning)
    return assemble(
        content, _join_bodies(message.body for message in text_messages if message.reasoning), calls, tools
    )


def _split_messages(text: str) -> list[_HarmonyMessage]:
    """Split a turn into messages. Text at the beginning without any tag is content."""
    messages: list[_HarmonyMessage] = []
    for position, chunk in enumerate(_END.split(text)):
        header, tag, body = chunk.partition(_MESSAGE)
        is_plain = position == 0 and not any(tag in chunk for tag in _TAGS) and not _RECIPIENT.search(chunk)
        messages.append(
            _HarmonyMessage("", chunk) if is_plain else _HarmonyMessage(header, body if tag else None)
        )

    return messages


def _read_call(message: _HarmonyMessage) -> RawCall | Malformed:
    name = message.recipient
    if message.body is None:
        return Malformed(f"the call to {quote(name)} has no {_MESSAGE}")

    try:
        arguments, end = object_at(message.body, 0, name)
    except Malformed as error:
        return error

    if message.body[end:].strip():
        return Malformed(f"only the arguments of {quote(name)} may appear between {_MESSAGE} and <|call|>")

    return RawCall(name, arguments)


def _join_bodies(bodies: Iterable[str | None]) -> str:
    return "\n".join(body.strip() for body in bodies if body and body.strip())
