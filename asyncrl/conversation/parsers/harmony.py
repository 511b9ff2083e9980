"""gpt-oss: a turn is a series of messages, each with a channel, and with a recipient if it is a call.

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
        found = _RECIPIENT.search(self.header)
        return found[1] if found and found[0] != "to=user" else ""

    @property
    def reasoning(self) -> bool:
        return _ANALYSIS.search(self.header) is not None


@parsers.register("harmony")
def harmony(text: str, tools: tuple[str, ...] = ()) -> Parsed:
    """Return a parser. The channels say what is content, so nothing depends on how the prompt ended."""
    parts = _parts(text)
    calls = [_call(part) for part in parts if part.recipient]
    texts = [part for part in parts if not part.recipient]
    content = _joined(part.body for part in texts if not part.reasoning)
    return assemble(content, _joined(part.body for part in texts if part.reasoning), calls, tools)


def _parts(text: str) -> list[_HarmonyMessage]:
    """The messages of a turn. Text at its beginning without any tag is content."""
    parts: list[_HarmonyMessage] = []
    for number, chunk in enumerate(_END.split(text)):
        header, tag, body = chunk.partition(_MESSAGE)
        plain = number == 0 and not any(tag in chunk for tag in _TAGS) and not _RECIPIENT.search(chunk)
        parts.append(_HarmonyMessage("", chunk) if plain else _HarmonyMessage(header, body if tag else None))
    return parts


def _call(part: _HarmonyMessage) -> RawCall | Malformed:
    name = part.recipient
    if part.body is None:
        return Malformed(f"the call of {quote(name)} has no {_MESSAGE}")
    try:
        arguments, end = object_at(part.body, 0, name)
    except Malformed as error:
        return error
    if part.body[end:].strip():
        return Malformed(f"only the arguments of {quote(name)} belong between {_MESSAGE} and <|call|>")
    return RawCall(name, arguments)


def _joined(bodies: Iterable[str | None]) -> str:
    return "\n".join(body.strip() for body in bodies if body and body.strip())
