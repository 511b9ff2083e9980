"""Describes the requests of an agent, the rows and placements of the answers, and limits that refuse
requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from asyncrl.conversation.chat import Chat
from asyncrl.conversation.tokenizer import CHARACTERS_PER_TOKEN
from asyncrl.types import EpisodeEnd, Message, Turn

LONG_TEXT_CHARACTERS = 16_384  # tokenising this many characters takes some 5 ms
OVERLAP_IDS = 8  # ids that are decoded again with new ids: neighbours may share a character

TextPrompt = str | tuple[int, ...]


class AgentRequest(msgspec.Struct, frozen=True):
    """A request of an agent for answers. `tools`: OpenAI schemas, as JSON text. `max_new_tokens` None: the
    run's limit. `stops`: texts in front of which the answer ends. `agent`: the name of the agent. `prompt`: a
    text, or ids, that the model continues without a template; `messages` are for display."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    agent: str = ""
    prompt: TextPrompt | None = None


IsUntrained = Callable[[AgentRequest], bool]
"""Returns True for a side request, whose turn is not trained on."""


class Placement(msgspec.Struct, frozen=True):
    """The row and prompt of an answer to a request. Sample at most `max_new_tokens` after `ids`, which end
    with the new ids `context`; `ids` show the conversation `messages`. A row gets a number when the first
    turn is done (None: no turn is done yet); `session` names the row from the start. `attempt`: the number of
    the request's try."""

    request: AgentRequest
    session: int
    row: int | None
    ids: tuple[int, ...]
    context: tuple[int, ...]
    max_new_tokens: int
    messages: tuple[Message, ...]
    untrained: bool = False
    attempt: int = 0


class TokenRow(msgspec.Struct, frozen=True):
    """A row of an episode. `last`, the newest turn, answers `request`; `messages` and `ids` end with that
    turn. (If a stop text ended the turn, the message here includes the stop text, as the ids do; the agent
    got the text before.) `busy`: a request is extending the row. `undelivered`: the client left before
    getting the last turn. `read`: the agent has made the same request anew since, so the last turn must have
    been read. `attempt`: the number of the try that got the last turn; 0 for the first try. `untrained`: the
    row belongs to side requests."""

    request: AgentRequest
    session: int
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    last: Turn
    busy: bool = False
    undelivered: bool = False
    read: bool = False
    attempt: int = 0
    untrained: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """The refusal of a request that a limit forbids. If the agent then gives up, the episode ends with `end`.
    For a full row: about the `tokens` that the row would have, and the `max_tokens` that a row may have."""

    end: EpisodeEnd
    detail: str
    tokens: int = 0
    max_tokens: int = 0


def same_message(our_message: Message, their_message: Message) -> bool:
    """Return True if an agent's message is the recorded message. Clients change messages of the model: white
    space around the content, the spelling and the defaults of arguments, the reasoning left out."""
    if our_message.role != "assistant":
        return our_message == their_message
    if (
        their_message.role != our_message.role
        or their_message.content.strip() != our_message.content.strip()
        or their_message.reasoning.strip() not in ("", our_message.reasoning.strip())
        or len(their_message.tool_calls) != len(our_message.tool_calls)
    ):
        return False

    for our_call, their_call in zip(our_message.tool_calls, their_message.tool_calls, strict=True):
        if our_call.name != their_call.name:
            return False
        if our_call.arguments == their_call.arguments:
            continue

        # The client may have added defaults.
        our_value = json.loads(our_call.arguments)
        their_value = json.loads(their_call.arguments)
        are_objects = isinstance(our_value, dict) and isinstance(their_value, dict)
        if our_value != their_value and not (are_objects and our_value.items() <= their_value.items()):
            return False

    return True


def limit_reached(end: EpisodeEnd, counted: str, limit: int) -> Refusal:
    return Refusal(end, f"the episode has used all of its {limit} {counted} (rollout.max_{counted})")


def row_is_full(max_tokens: int, tokens: int, explanation: str) -> Refusal:
    """Refuse a full row in the words by which clients know that the context is full."""
    detail = f"This model's maximum context length is {max_tokens} tokens (rollout.max_tokens); {explanation}"
    return Refusal(EpisodeEnd.LENGTH, detail, tokens, max_tokens)


def texts_of(message: Message) -> list[str]:
    """Return all texts of a message that its tokens may contain."""
    texts = [message.content, message.reasoning, message.name, message.tool_call_id]
    return texts + [text for call in message.tool_calls for text in (call.name, call.arguments, call.id)]


def characters_of(message: Message) -> int:
    """Count the characters of a message, and the characters of one token more: even an empty message has a
    token."""
    return CHARACTERS_PER_TOKEN + sum(map(len, texts_of(message)))


def is_short(messages: Sequence[Message], characters: int = 0) -> bool:
    """Return True if messages, with so many characters more, may be tokenised on the event loop."""
    return characters + sum(map(characters_of, messages)) < LONG_TEXT_CHARACTERS


def count_common(our_messages: tuple[Message, ...], their_messages: tuple[Message, ...]) -> int:
    """Count the messages that both conversations begin with."""
    message_pairs = zip(our_messages, their_messages, strict=False)
    return next(
        (number for number, pair in enumerate(message_pairs) if not same_message(*pair)),
        min(len(our_messages), len(their_messages)),
    )


# -- prompts without a template: texts, or ids, that the model continues ------------------------------------


class TextRows:
    """Keeps the texts of rows, and decodes only new ids: decoding 20,000 ids would take some 5 ms."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known_texts: dict[int, tuple[int, str]] = {}  # by session: a number of ids, and their text

    def find_continued_row(
        self, prompt: TextPrompt, rows: Iterable[tuple[int, TokenRow]]
    ) -> tuple[int | None, TextPrompt]:
        """Find the row that the prompt continues, and the continuation; None, and the whole prompt, if the
        prompt continues no row. The row is the longest row that the prompt begins with. A text, which is
        `plain_text`, never begins with a row that ends with the end of a turn: no text has that token."""
        continued_row = None
        matched_length = 0
        for row_number, row in rows:
            row_ended = isinstance(prompt, str) and row.ids[-1] in self._chat.stop_ids
            if row.request.prompt is None or row_ended:
                continue

            row_prefix: Any = row.ids
            if isinstance(prompt, str):
                row_prefix = self._chat.plain_text(self._row_text(row.session, row.ids))

            # The tokenizer may have begun the row with added ids: compare without their text.
            if isinstance(prompt, str) and not prompt.startswith(row_prefix):
                row_prefix = row_prefix.removeprefix(self._chat.decode(self._chat.text_ids("", True)))

            if len(row_prefix) > matched_length and prompt[: len(row_prefix)] == row_prefix:
                continued_row = row_number
                matched_length = len(row_prefix)

        return continued_row, prompt[matched_length:]

    def _row_text(self, session: int, ids: tuple[int, ...]) -> str:
        known_count, text = self._known_texts.get(session, (0, ""))
        if known_count < len(ids):
            decode = self._chat.decode
            overlap_start = max(0, known_count - OVERLAP_IDS)
            overlap_text = decode(ids[overlap_start:known_count])
            overlap_and_new = decode(ids[overlap_start:])
            # No character is split between old and new ids.
            is_aligned = overlap_and_new.startswith(overlap_text) and not overlap_text.endswith("\ufffd")
            text = text + overlap_and_new[len(overlap_text) :] if is_aligned else decode(ids)
            self._known_texts[session] = len(ids), text

        return text
