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
"""Called with the new reasoning and the new content of a turn; never with both empty."""

_PARTIAL_CHARACTER = "\ufffd"  # ends a text whose last character lacks bytes
_MAX_PARTIAL_TOKENS = 8  # tokens after which incomplete bytes count as text
_CALL_STARTS = "<[{"  # in every format, a call begins with one of these characters
_MAX_MARK_CHARACTERS = 64  # after this many characters a mark has begun a call, or is text
_GROWTH_DIVISOR = 256  # a text is parsed again after growing by 1 / _GROWTH_DIVISOR: all parses are n log n


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

    def read_new_ids(self, ids: Sequence[int]) -> None:
        """Read the ids after the first `_read_count` ids."""
        known_text = self._decode(ids[self._decode_start : self._read_count])
        decoded_text = self._decode(ids[self._decode_start :])
        is_complete = (
            not decoded_text.endswith(_PARTIAL_CHARACTER)
            or len(ids) - self._read_count >= _MAX_PARTIAL_TOKENS
        )

        if is_complete and len(decoded_text) > len(known_text):
            self.text += decoded_text[len(known_text) :]
            self._decode_start = self._read_count
            self._read_count = len(ids)


class TurnStopCheck:
    """A `StopCheck` (engines/base.py) of one turn, which ends at the first of the texts `stops`. `prompt`:
    the end of the turn's prompt; `on_text`, if given, is called as the turn grows."""

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
        self._prompt_end = prompt
        self._on_text = on_text
        self._longest_stop = max(map(len, stops), default=0)

        self._id_count = 0
        self._growing_text = GrowingText(rules.chat.decode)
        self._parsed_length = 0
        self._reasoning = ""
        self._content = ""
        parser = rules.parse

        # Without calls only tags of thoughts are special.
        self._never_calls = isinstance(parser, CallFormat) and not tools
        self._held_back_texts = (*stops, *think_tags(parser))

    def __call__(self, ids: Sequence[int]) -> bool:
        if len(ids) <= self._id_count:  # an engine was lost, and with it the newest ids
            self._growing_text = GrowingText(self._rules.chat.decode)

        self._id_count = len(ids)
        known_length = len(self._growing_text.text)
        self._growing_text.read_new_ids(ids)
        text = self._growing_text.text
        search_start = max(0, known_length - self._longest_stop + 1)
        turn_ended = any(text.find(stop, search_start) >= 0 for stop in self._stops)
        if self._on_text is not None and not turn_ended:
            self._report_text(text[: self._certain_length(text)], self._on_text)

        return turn_ended

    def _certain_length(self, text: str) -> int:
        """Count the characters of the text that cannot belong to a stop text, a tag or a call at the end."""
        certain_length = min(len(text) - _overlap(text, held_text) for held_text in self._held_back_texts)
        if not self._never_calls:
            mark_positions = [
                text.rfind(mark, max(0, len(text) - _MAX_MARK_CHARACTERS)) for mark in _CALL_STARTS
            ]
            certain_length = min(
                [certain_length, *(position for position in mark_positions if position >= 0)]
            )

        return certain_length

    def _report_text(self, text: str, on_text: OnText) -> None:
        if len(text) - self._parsed_length <= len(text) // _GROWTH_DIVISOR:
            return

        self._parsed_length = len(text)
        try:
            with users_code():
                parsed = parse_turn(self._rules.parse, text, self._tools, self._prompt_end)
        except Exception:  # a parser of the user; its error on the whole turn is reported later
            self._on_text = None
            return

        new_texts = parsed.reasoning.removeprefix(self._reasoning), parsed.content.removeprefix(self._content)
        has_grown = parsed.reasoning.startswith(self._reasoning) and parsed.content.startswith(self._content)
        if has_grown and any(new_texts):
            self._reasoning = parsed.reasoning
            self._content = parsed.content
            on_text(*new_texts)


def _overlap(text: str, held_text: str) -> int:
    """The length of the longest end of the text that is a beginning of `held_text`, but not all."""
    max_length = min(len(text), len(held_text) - 1)
    return next((length for length in range(max_length, 0, -1) if text.endswith(held_text[:length])), 0)
