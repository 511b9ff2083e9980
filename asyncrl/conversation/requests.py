"""Describes the requests of an agent, the rows and places of their answers, and limits that refuse them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec

from asyncrl.conversation.forms import AnswerForm
from asyncrl.types import EpisodeEnd, Message, Turn

CHARACTERS = 16  # of a token, at most, on average: more text than that is too long whatever its tokens are
LONG = 16_384  # characters that take some 5 ms to tokenise


class AgentRequest(msgspec.Struct, frozen=True):
    """A request of an agent for answers. `tools`: OpenAI schemas, as JSON text. `max_new_tokens` None: the
    run's. `stops`: texts in front of which the answer ends. `agent`: who asks. `form`: of the answer.
    `prompt`: a text, or ids, that the model continues without a template; `messages` are for display."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    agent: str = ""
    form: AnswerForm = AnswerForm()
    prompt: str | tuple[int, ...] | None = None


Untrained = Callable[[AgentRequest], bool]
"""Tells a side request, whose turn is not trained."""


class Placement(msgspec.Struct, frozen=True):
    """The place of an answer to a request. Sample at most `max_new_tokens` after `ids`, of which `context` is
    new; `messages` are those that `ids` show. A row gets its number when its first turn is done (None: it has
    none yet); `session` names it from the start."""

    request: AgentRequest
    session: int
    row: int | None
    ids: tuple[int, ...]
    context: tuple[int, ...]
    max_new_tokens: int
    messages: tuple[Message, ...]
    untrained: bool = False


class TokenRow(msgspec.Struct, frozen=True):
    """`last`, the row's newest turn, answers `request`; `messages` and `ids` end with it. (The
    message of a turn that ended at a text has that text, too, as its ids do; the agent got what is before.)
    `busy`: a request is extending the row. `undelivered`: the client left before it got the last turn.
    `untrained`: it is of side requests."""

    request: AgentRequest
    session: int
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    last: Turn
    busy: bool = False
    undelivered: bool = False
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
    made, shown = json.loads(ours), json.loads(theirs)
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
