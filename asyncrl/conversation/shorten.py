"""Cutting text to a number of tokens."""

from __future__ import annotations

from asyncrl.conversation.chat_render import Tokenizer
from asyncrl.conversation.commands import Cut
from asyncrl.values import encodable

CHARACTERS = 16  # per token: text beyond that is never tokenised, so that megabytes cost no time
COMMON = 4  # characters per token of most texts: tried first
PARTIAL = "\ufffd"  # what the bytes of a character that was cut decode to
NOTE = "\n[... {} characters cut ...]\n"


def shorten(tokenizer: Tokenizer, text: str, limit: int, where: Cut, missing: int = 0) -> str:
    """At most `limit` tokens of the text: all of it, or what is left when its head, middle or tail is cut,
    with a note of how many characters are missing (where the limit leaves room for one). `missing`:
    characters that the caller has cut out of the middle before."""
    text = encodable(text)
    if _fits(tokenizer, text, limit):
        return text
    note = NOTE
    room = limit - _count(tokenizer, NOTE.format(len(text)))
    if room <= 0:  # one end only: both together could make a control token
        note, room, where = "", limit, "tail" if where == "middle" else where
    while room > 0:
        first = {"head": 0, "middle": room - room // 2, "tail": room}[where]
        head, tail = _ends(tokenizer, text, first, room - first)
        short = head + note.format(len(text) + missing - len(head) - len(tail)) + tail
        excess = _count(tokenizer, short) - limit
        if excess <= 0:
            return short
        room -= excess  # the parts together have more tokens than apart
    return ""


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(_encode(tokenizer, text))


def _fits(tokenizer: Tokenizer, text: str, limit: int) -> bool:
    """True if the whole text may be shown. Of one that is far too long, only the beginning is tokenised."""
    if len(text.encode()) <= limit:
        return True  # no token is shorter than a byte
    size = COMMON * limit
    if size < len(text) and _count(tokenizer, text[:size]) > limit:
        return False
    return len(text) <= CHARACTERS * limit and _count(tokenizer, text) <= limit


def _ends(tokenizer: Tokenizer, text: str, first: int, last: int) -> tuple[str, str]:
    """About the first and the last so many tokens of the text, never half a character."""
    head = _tokens(tokenizer, text, first, from_end=False)[:first]
    tail = _tokens(tokenizer, text, last, from_end=True)
    shown = len(_decode(tokenizer, head).rstrip(PARTIAL))
    rest = len(_decode(tokenizer, tail[max(0, len(tail) - last) :]).lstrip(PARTIAL))
    return text[:shown], text[max(shown, len(text) - rest) :]


def _tokens(tokenizer: Tokenizer, text: str, count: int, *, from_end: bool) -> list[int]:
    """Tokens of one end of the text that is long enough for `count` of them, if the text is."""
    size = COMMON * count
    while True:
        ids = _encode(tokenizer, text[max(0, len(text) - size) :] if from_end else text[:size])
        if len(ids) >= count or size >= min(len(text), CHARACTERS * count):
            return ids
        size *= 2


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
