"""Cutting text to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.conversation.commands import Cut
from asyncrl.values import encodable

CHARACTERS = 16  # per token at most, as far as anybody reads on: a reply of megabytes is not tokenised
COMMON = 4  # characters per token of most texts: tried first
HALF = "\ufffd"  # what bytes of a character that was cut decode to
NOTE = "\n[... {} characters cut ...]\n"


class Codec(Protocol):
    """The part of a tokenizer that cutting needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...


def shorten(codec: Codec, text: str, limit: int, where: Cut, missing: int = 0) -> str:
    """At most `limit` tokens of the text: all of it, or what is left when its head, middle or tail is cut,
    with a note of how much is missing (where the limit leaves room for one). Halves of surrogate pairs, which
    no tokenizer takes, become question marks. `missing`: characters cut out of the middle before."""
    text = encodable(text)
    if len(text.encode()) <= limit:
        return text  # no token is shorter than a byte
    if _fits(codec, text, limit):
        return text
    room = limit - _count(codec, NOTE.format(len(text)))
    noted = room > 0
    room = room if noted else limit
    while room > 0:
        first = {"head": 0, "middle": room - room // 2, "tail": room}[where]
        head, tail = _ends(codec, text, first, room - first)
        cut = len(text) + missing - len(head) - len(tail)
        short = f"{head}{NOTE.format(cut) if noted else ''}{tail}"
        excess = _count(codec, short) - limit
        if excess <= 0:
            return short
        room -= excess  # texts apart have other tokens than together
    return ""


def _count(codec: Codec, text: str) -> int:
    return len(codec.encode(text, add_special_tokens=False))


def _fits(codec: Codec, text: str, limit: int) -> bool:
    """Whether all of it may be shown. Of a text that is far too long, only the beginning is tokenised."""
    size = COMMON * limit
    if size < len(text) and _count(codec, text[:size]) > limit:
        return False
    return len(text) <= CHARACTERS * limit and _count(codec, text) <= limit


def _enough(codec: Codec, piece: Callable[[int], str], count: int) -> list[int]:
    """Tokens of so many characters that there are `count` of them, if there can be."""
    size, ids = COMMON * count, codec.encode(piece(COMMON * count), add_special_tokens=False)
    while len(ids) < count and size < CHARACTERS * count:
        size *= 2
        ids = codec.encode(piece(size), add_special_tokens=False)
    return ids


def _ends(codec: Codec, text: str, first: int, last: int) -> tuple[str, str]:
    """About the first and the last so many tokens of the text, never half a character."""
    start = _enough(codec, lambda size: text[:size], first)[:first]
    end = _enough(codec, lambda size: text[max(0, len(text) - size) :], last)
    shown = len(_decode(codec, start).rstrip(HALF))
    rest = len(_decode(codec, end[max(0, len(end) - last) :]).lstrip(HALF))
    return text[:shown], text[max(shown, len(text) - rest) :]


def _decode(codec: Codec, ids: list[int]) -> str:
    text: str = codec.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
