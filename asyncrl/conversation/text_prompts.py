"""Reads prompts without a template: texts, or ids, that the model continues; finds the rows they continue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrl.conversation.chat import Chat
from asyncrl.conversation.requests import TokenRow

TextPrompt = str | tuple[int, ...]

NEAR = 8  # ids that are decoded again with those behind them: they may share a character


class TextRows:
    """Keeps the texts of rows, and decodes only what is new: all of 20,000 ids would take some 5 ms."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: dict[int, tuple[int, str]] = {}  # by session: a number of ids, and their text

    def rest(self, prompt: TextPrompt, rows: Iterable[tuple[int, TokenRow]]) -> tuple[int | None, TextPrompt]:
        """Find the row that the prompt continues, and what it adds; None, and all of it, if there is none. It
        is the longest of those that the prompt begins with. A text never begins with a row that ends with the
        end of a turn: no text has that token."""
        found, size = None, 0
        for number, row in rows:
            ended = isinstance(prompt, str) and row.ids[-1] in self._chat.stop_ids
            if row.request.prompt is None or ended:
                continue
            shown: Any = self._text(row.session, row.ids) if isinstance(prompt, str) else row.ids
            if isinstance(prompt, str) and not prompt.startswith(shown):  # its beginning is the tokenizer's
                shown = shown.removeprefix(self._chat.decode(self._chat.text_ids("", True)))
            if len(shown) > size and prompt[: len(shown)] == shown:
                found, size = number, len(shown)
        return found, prompt[size:]

    def _text(self, session: int, ids: tuple[int, ...]) -> str:
        count, text = self._known.get(session, (0, ""))
        if count < len(ids):
            decode, start = self._chat.decode, max(0, count - NEAR)
            near, both = decode(ids[start:count]), decode(ids[start:])
            whole = both.startswith(near) and not near.endswith("\ufffd")  # no character is split there
            text = text + both[len(near) :] if whole else decode(ids)
            self._known[session] = len(ids), text
        return text
