"""Describes the requests of an agent, the rows and places of their answers, and limits that refuse them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from asyncrl.conversation.chat import Chat
from asyncrl.types import EpisodeEnd, Message, Turn

CHARACTERS = 16  # of a token, at most, on average: more text than that is too long whatever its tokens are
LONG = 16_384  # characters that take some 5 ms to tokenise
NEAR = 8  # ids that are decoded again with those behind them: they may share a character

TextPrompt = str | tuple[int, ...]


class AgentRequest(msgspec.Struct, frozen=True):
    """A request of an agent for answers. `tools`: OpenAI schemas, as JSON text. `max_new_tokens` None: the
    run's. `stops`: texts in front of which the answer ends. `agent`: who asks.
    `prompt`: a text, or ids, that the model continues without a template; `messages` are for display."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    agent: str = ""
    prompt: TextPrompt | None = None


Untrained = Callable[[AgentRequest], bool]
"""Tells a side request, whose turn is not trained."""


class Placement(msgspec.Struct, frozen=True):
    """The place of an answer to a request. Sample at most `max_new_tokens` after `ids`, of which `context` is
    new; `messages` are those that `ids` show. A row gets its number when its first turn is done (None: it has
    none yet); `session` names it from the start. `attempt`: the number of the request's try."""

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
    """`last`, the row's newest turn, answers `request`; `messages` and `ids` end with it. (The
    message of a turn that ended at a text has that text, too, as its ids do; the agent got what is before.)
    `busy`: a request is extending the row. `undelivered`: the client left before it got the last turn.
    `read`: the agent has made the same request anew since, so that it must have read the last turn.
    `attempt`: the number of the try that got the last turn; 0 for a first one.
    `untrained`: it is of side requests."""

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
    """A request that a limit forbids. If the agent gives up after it, the episode ends so. Of a row that is
    full: `tokens` it would have, at least about, and `most` that it may have."""

    end: EpisodeEnd
    detail: str
    tokens: int = 0
    most: int = 0


def same_message(ours: Message, theirs: Message) -> bool:
    """True if an agent's message is the recorded one. Clients change messages of the model: white space
    around the content, the spelling of arguments and defaults among them, the reasoning left out."""
    if ours.role != "assistant":
        return ours == theirs
    return (
        theirs.role == ours.role
        and theirs.content.strip() == ours.content.strip()
        and theirs.reasoning.strip() in ("", ours.reasoning.strip())
        and len(theirs.tool_calls) == len(ours.tool_calls)
        and all(
            a.name == b.name and (a.arguments == b.arguments or _filled_in(a.arguments, b.arguments))
            for a, b in zip(ours.tool_calls, theirs.tool_calls, strict=True)
        )
    )


def _filled_in(ours: str, theirs: str) -> bool:
    """Tell if the arguments are the same, or the same and further ones: the client's defaults."""
    made = json.loads(ours)
    shown = json.loads(theirs)
    both = isinstance(made, dict) and isinstance(shown, dict)
    return bool(made == shown or (both and made.items() <= shown.items()))


def limit_reached(end: EpisodeEnd, what: str, most: int) -> Refusal:
    return Refusal(end, f"the episode has had its {most} {what} (rollout.max_{what})")


def row_is_full(most: int, tokens: int, what: str) -> Refusal:
    """Refuse a full row in the words by which clients know that the context is full."""
    detail = f"This model's maximum context length is {most} tokens (rollout.max_tokens); {what}"
    return Refusal(EpisodeEnd.LENGTH, detail, tokens, most)


def characters_of(message: Message) -> int:
    texts = [message.content, message.reasoning, message.name, message.tool_call_id]
    texts += [text for call in message.tool_calls for text in (call.name, call.arguments, call.id)]
    return CHARACTERS + sum(map(len, texts))


def short(messages: Sequence[Message], characters: int = 0) -> bool:
    """True for messages, and so many characters more, that may be tokenised on the event loop."""
    return characters + sum(map(characters_of, messages)) < LONG


def common(ours: tuple[Message, ...], theirs: tuple[Message, ...]) -> int:
    """Count the messages that both begin with."""
    pairs = zip(ours, theirs, strict=False)
    return next((n for n, pair in enumerate(pairs) if not same_message(*pair)), min(len(ours), len(theirs)))


# -- prompts without a template: texts, or ids, that the model continues ------------------------------------


class TextRows:
    """Keeps the texts of rows, and decodes only what is new: all of 20,000 ids would take some 5 ms."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: dict[int, tuple[int, str]] = {}  # by session: a number of ids, and their text

    def rest(self, prompt: TextPrompt, rows: Iterable[tuple[int, TokenRow]]) -> tuple[int | None, TextPrompt]:
        """Find the row that the prompt continues, and what it adds; None, and all of it, if there is none. It
        is the longest of those that the prompt begins with. A text never begins with a row that ends with the
        end of a turn: no text has that token."""
        found = None
        size = 0
        for number, row in rows:
            ended = isinstance(prompt, str) and row.ids[-1] in self._chat.stop_ids
            if row.request.prompt is None or ended:
                continue
            shown: Any = self._text(row.session, row.ids) if isinstance(prompt, str) else row.ids
            if isinstance(prompt, str) and not prompt.startswith(shown):  # its beginning is the tokenizer's
                shown = shown.removeprefix(self._chat.decode(self._chat.text_ids("", True)))
            if len(shown) > size and prompt[: len(shown)] == shown:
                found = number
                size = len(shown)
        return found, prompt[size:]

    def _text(self, session: int, ids: tuple[int, ...]) -> str:
        count, text = self._known.get(session, (0, ""))
        if count < len(ids):
            decode = self._chat.decode
            start = max(0, count - NEAR)
            near = decode(ids[start:count])
            both = decode(ids[start:])
            whole = both.startswith(near) and not near.endswith("\ufffd")  # no character is split there
            text = text + both[len(near) :] if whole else decode(ids)
            self._known[session] = len(ids), text
        return text
