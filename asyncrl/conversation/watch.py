"""The text of a turn while it is sampled: does it end at a text, and what may be read of it already.

    ids so far --decode what is new--> text --a stop text in it?--> the turn ends with this id
                                        └--what is certain of its content and reasoning--> on_text

A turn that ends at a text keeps the whole token in which the text ends: every id of the row was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.parsers import parse_turn
from asyncrl.conversation.parsers.base import CallFormat, think_tags
from asyncrl.errors import users_code

OnText = Callable[[str, str], None]
"""Called with the new text of a turn's reasoning and of its content; both together are never empty."""

_UNFINISHED = "\ufffd"  # at the end of a text: a character of which not all bytes are there
_BYTES = 8  # tokens after which bytes that make no character are text all the same
_MARKS = "<[{"  # a call begins with one of these in every format
_MARK = 64  # characters within which a mark is known to begin a call, or not
_SHARE = 256  # a text is parsed again when it has grown by 1 / _SHARE, so that all parses are n log n


def before(text: str, stops: Iterable[str]) -> str:
    """The text in front of the first of `stops` in it; all of it if there is none."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(found)] if found else text


class GrowingText:
    """The text of ids that come one by one. Only the last few are decoded again: they may share a
    character, or begin with a space that a tokenizer drops at the beginning of a text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = ""
        self._decode = decode
        self._from = self._read = 0

    def grow(self, ids: Sequence[int]) -> None:
        """Take in the ids after those read before."""
        known = self._decode(ids[self._from : self._read])
        text = self._decode(ids[self._from :])
        whole = not text.endswith(_UNFINISHED) or len(ids) - self._read >= _BYTES
        if whole and len(text) > len(known):
            self.text += text[len(known) :]
            self._from = self._read
            self._read = len(ids)


class TurnWatch:
    """A `Watch` (engines/base.py) of one turn: ends it at the first of the texts `stops`. `prompt`: the end
    of the turn's prompt; `on_text`, if given, is called as the turn grows."""

    def __init__(
        self,
        rules: Rules,
        tools: tuple[str, ...],
        stops: tuple[str, ...],
        prompt: str,
        on_text: OnText | None,
    ) -> None:
        self._rules = rules
        self._tools = tools
        self._stops = stops
        self._prompt = prompt
        self._on_text = on_text
        self._longest = max(map(len, stops), default=0)
        self._count = 0
        self._text = GrowingText(rules.chat.decode)
        self._parsed = 0
        self._reasoning = ""
        self._content = ""
        parser = rules.parse
        self._own = isinstance(parser, CallFormat) and not tools  # then its text has no marks but of thoughts
        self._held_back = (*stops, *think_tags(parser))

    def __call__(self, ids: Sequence[int]) -> bool:
        if len(ids) <= self._count:  # the ids since then were lost
            self._text = GrowingText(self._rules.chat.decode)
        self._count = len(ids)
        known = len(self._text.text)
        self._text.grow(ids)
        text = self._text.text
        since = max(0, known - self._longest + 1)
        ended = any(text.find(stop, since) >= 0 for stop in self._stops)
        if self._on_text is not None and not ended:
            self._tell(text[: self._certain(text)], self._on_text)
        return ended

    def _certain(self, text: str) -> int:
        """Count the characters of the text that are neither the beginning of a stop text nor, perhaps, of a
        tag or a call."""
        size = min(len(text) - _overlap(text, held) for held in self._held_back)
        if not self._own:
            marks = [text.rfind(mark, max(0, len(text) - _MARK)) for mark in _MARKS]
            size = min([size, *(at for at in marks if at >= 0)])
        return size

    def _tell(self, text: str, on_text: OnText) -> None:
        if len(text) - self._parsed <= len(text) // _SHARE:
            return
        self._parsed = len(text)
        try:
            with users_code():
                parsed = parse_turn(self._rules.parse, text, self._tools, self._prompt)
        except Exception:  # a parser of the user's; that of a whole turn is reported
            self._on_text = None
            return
        new = parsed.reasoning.removeprefix(self._reasoning), parsed.content.removeprefix(self._content)
        grown = parsed.reasoning.startswith(self._reasoning) and parsed.content.startswith(self._content)
        if grown and any(new):
            self._reasoning = parsed.reasoning
            self._content = parsed.content
            on_text(*new)


def _overlap(text: str, held: str) -> int:
    """The length of the longest end of the text that is a beginning of `held`, but not all of it."""
    most = min(len(text), len(held) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(held[:size])), 0)
