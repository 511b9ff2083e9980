"""Watches the text of a turn that is being sampled: finds the stop text, and streams the text that is
certain.

    ids so far --decode new ids--> text --a stop text in it?--> the turn ends with this id
                                        └--certain content and reasoning--> on_text

A turn that ends at a stop text keeps the whole token in which the stop text ends: every id of the row was
sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.parsers import parse_turn
from asyncrl.conversation.parsers.base import CallFormat, think_tags
from asyncrl.errors import users_code

OnText = Callable[[str, str], None]
"""A function of the new text of a turn's reasoning and content, of which at least one is not empty."""

_UNFINISHED = "\ufffd"  # ends a text whose last character lacks bytes
_BYTES = 8  # tokens after which incomplete bytes count as text
_MARKS = "<[{"  # in every format, a call begins with one of these characters
_MARK = 64  # after this many characters a mark has begun a call, or is text
_SHARE = 256  # a text is parsed again after growing by 1 / _GROWTH_DIVISOR: all parses are n log n


def text_before(text: str, stops: Iterable[str]) -> str:
    """Return the text in front of the first of the texts `stops`; the whole text if it contains none."""
    positions = [position for position in map(text.find, stops) if position >= 0]
    return text[: min(positions)] if positions else text


class GrowingText:
    """The text of ids that come one by one. Only the last few ids are decoded again: neighbours may share a
    character, or begin with a space that a tokenizer drops at the beginning of a text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = ""
        self._decode = decode
        self._decode_start = 0
        self._read_count = 0

    def grow(self, ids: Sequence[int]) -> None:
        """Read the ids after the first `_read_count` ids."""
        known_text = self._decode(ids[self._decode_start : self._read_count])
        decoded_text = self._decode(ids[self._decode_start :])
        is_complete = not decoded_text.endswith(_UNFINISHED) or len(ids) - self._read_count >= _BYTES
        if is_complete and len(decoded_text) > len(known_text):
            self.text += decoded_text[len(known_text) :]
            self._decode_start = self._read_count
            self._read_count = len(ids)


class TurnWatch:
    """A `Watch` (engines/base.py) of one turn, which ends at the first of the texts `stops`. `prompt`: the
    end of the turn's prompt; `on_text`, if given, is called as the turn grows."""

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
        self._own = isinstance(parser, CallFormat) and not tools  # then only tags of thoughts are special
        self._held_back = (*stops, *think_tags(parser))

    def __call__(self, ids: Sequence[int]) -> bool:
        if len(ids) <= self._count:  # an engine was lost, and with it the newest ids
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
        """Count the characters of the text that cannot belong to a stop text, a tag or a call at the end."""
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
        except Exception:  # a parser of the user; its error on the whole turn is reported later
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
