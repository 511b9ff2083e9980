"""gpt-oss: a turn is a series of messages, each with a channel, and with a recipient if it is a call.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from asyncrl.conversation.parsers.base import Draft, Parsed, assemble, parsers, settled
from asyncrl.conversation.parsers.values import Malformed, object_at, quote

_MESSAGE, _ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_TAGS = ("<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class _Part(NamedTuple):
    header: str
    body: str | None  # None: the header was not finished

    @property
    def recipient(self) -> str:
        found = _RECIPIENT.search(self.header)
        return found[1] if found else ""

    @property
    def reasoning(self) -> bool:
        return _ANALYSIS.search(self.header) is not None


class Harmony:
    """A parser. Channels say what is content, so nothing depends on how the prompt ended."""

    def __call__(self, text: str) -> Parsed:
        parts = _parts(text)
        calls = [_call(part) for part in parts if part.recipient]
        said = [part for part in parts if not part.recipient]
        content = _joined(part.body for part in said if not part.reasoning)
        return assemble(content, _joined(part.body for part in said if part.reasoning), calls, "call_{}")

    def visible(self, text: str, thinking: bool) -> str:
        """See `visible`: once a header is finished, it says what the body is, whatever comes later."""
        whole = settled(text, _TAGS)
        return self(whole).content if _MESSAGE in whole or _END.search(whole) else ""


def _parts(text: str) -> list[_Part]:
    """The messages. A model without channels just speaks: what begins the turn without any tag is content."""
    parts: list[_Part] = []
    for number, chunk in enumerate(_END.split(text)):
        header, tag, body = chunk.partition(_MESSAGE)
        plain = number == 0 and not any(tag in chunk for tag in _TAGS) and not _RECIPIENT.search(chunk)
        parts.append(_Part("", chunk) if plain else _Part(header, body if tag else None))
    return parts


def _call(part: _Part) -> Draft | Malformed:
    name = part.recipient
    if part.body is None:
        return Malformed(f"the call of {quote(name)} has no {_MESSAGE}")
    try:
        arguments, end = object_at(part.body, 0, name)
    except Malformed as error:
        return error
    if part.body[end:].strip():
        return Malformed(f"only the arguments of {quote(name)} belong between {_MESSAGE} and <|call|>")
    return Draft(name, arguments)


def _joined(bodies: Iterable[str | None]) -> str:
    return "\n".join(body.strip() for body in bodies if body and body.strip())


harmony = parsers.register("harmony")(Harmony())
