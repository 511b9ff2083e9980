"""The rows of an agent's episode: which row a request of the agent extends, and what its answer adds.

    AgentRequest --place--> Placement --(engine)--> Generation --turn--> Turn --add--> its row is longer
                 \\-------> Refusal: a limit of the run

A request that repeats the messages of a row and adds new ones extends that row: the template writes the new
messages after the very ids of the model. Everything else begins a new row, whose prompt is rendered as a
whole: an edited history, a second conversation, the same prompt again, a row that another request is
extending, a template that rewrites. A turn whose client left before it was delivered answers the same request
when it comes again. No awaits and no clocks; requests of one agent may overlap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.forms import AnswerForm, followed
from asyncrl.conversation.turns import make_turn, read_turn, turn_message
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import EpisodeEnd, Generation, Message, StopReason, Turn

ANSWERING_ROLES = ("system", "tool", "user")  # of messages that can follow the model's
CHARACTERS = 16  # of a token, at most, on average: more text than that is too long whatever its tokens are


class AgentRequest(msgspec.Struct, frozen=True):
    """A request of an agent for answers. `tools`: OpenAI schemas, as JSON text. `max_new_tokens` None: the
    run's. `stops`: texts in front of which the answer ends. `agent`: who asks. `form`: of the answer."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    agent: str = ""
    form: AnswerForm = AnswerForm()


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


class Refusal(msgspec.Struct, frozen=True):
    """A request that a limit forbids. If the agent gives up after it, the episode ends so."""

    end: EpisodeEnd
    detail: str


class TokenRow(msgspec.Struct, frozen=True):
    """`last`, the row's newest turn, answers `request`; `messages` and `ids` end with it. (The
    message of a turn that ended at a text has that text, too, as its ids do; the agent got what is before.)
    `busy`: a request is extending the row. `undelivered`: the client left before it got the last turn."""

    request: AgentRequest
    session: int
    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    last: Turn
    busy: bool = False
    undelivered: bool = False


class Branches:
    """Owner of the rows and turns of one episode. Every `place` is followed by `add` or by `cancel`.

    `recorded`: the turns of an earlier attempt, which answer the agent's requests before anything is sampled.
    """

    def __init__(self, rules: Rules, recorded: Sequence[Turn] = ()) -> None:
        self.rows: list[TokenRow] = []
        self.turns: list[Turn] = []
        self.refused: Refusal | None = None  # since the last turn
        self.hints = self.followed = 0  # turns of which a form was asked, and those that have it
        self._rules, self._recorded = rules, recorded
        self._begun = 0  # rows, cancelled ones included
        self._pending: dict[int, Placement] = {}  # by session

    @property
    def replaying(self) -> bool:
        """True while a recorded turn was not asked for again."""
        return len(self.turns) < len(self._recorded)

    @property
    def end(self) -> EpisodeEnd:
        """The end of the episode if the agent ends now. There is a turn."""
        if self.refused is not None:
            return self.refused.end
        return EpisodeEnd.LENGTH if self.turns[-1].stop is StopReason.LENGTH else EpisodeEnd.DONE

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation that the last turn belongs to."""
        return self.rows[self.turns[-1].row].messages

    @property
    def calls(self) -> int:
        """Well-formed tool calls of the model."""
        return sum(len(self.said(turn).tool_calls) for turn in self.turns)

    @property
    def answer(self) -> str:
        """The last turn's text outside tool calls."""
        last = self.turns[-1]
        request = self.rows[last.row].request
        return read_turn(self._rules, last, request.tools, request.stops).content

    def said(self, turn: Turn) -> Message:
        """The model's message in a turn as the agent gets it. An agent that sends no tools gets all of it as
        text, calls included."""
        request = self.rows[turn.row].request
        return turn_message(self._rules, turn, request.tools, request.stops)

    # -- a request -----------------------------------------------------------------------------------

    def find(self, request: AgentRequest, count: int) -> list[Turn | Placement] | Refusal:
        """Find `count` answers: each a new Placement, or an undelivered Turn to hand out again. ConfigError
        when the template cannot write the messages."""
        found: list[Turn | Placement] = []
        for _ in range(count):
            try:
                one = self.redeliver(request) or self.place(request)
            except ConfigError:
                self.give_back(found)
                raise
            if isinstance(one, Refusal):
                self.give_back(found)
                return one
            found.append(one)
        return found

    def give_back(self, found: Sequence[Turn | Placement]) -> None:
        """Give back places and turns that will not answer the request."""
        for one in found:
            self.mark_undelivered(one) if isinstance(one, Turn) else self.cancel(one)

    def place(self, request: AgentRequest) -> Placement | Refusal:
        """Find the place of the answer to a request. ConfigError when the template cannot write its
        messages."""
        found = self._find(request)
        if isinstance(found, Refusal):
            self.refused = found
            return found
        self._pending[found.session] = found
        if found.row is None:
            self._begun += 1
        else:
            self._change(found.row, busy=True)
        return found

    def recorded_turn(self, place: Placement) -> Turn | None:
        """The recorded turn that answers it; it can be added once all before it are. None: sample it.
        ProtocolError when recorded turns are left but none answers it: the agent does not repeat itself."""
        if not self.replaying:
            return None
        seen: set[int] = set()
        for turn in self._recorded[len(self.turns) :]:
            row = turn.row if turn.row < len(self.rows) else None  # None: the turn begins it
            same = (row, turn.context, turn.agent) == (place.row, place.context, place.request.agent)
            if turn.row not in seen and same:
                return turn
            seen.add(turn.row)
        raise ProtocolError(f"the agent does not repeat its recorded turn {len(self.turns)}")

    def turn(self, place: Placement, generation: Generation) -> Turn:
        """The next turn of the episode, to be added before anything else happens."""
        return make_turn(len(self.turns), self._number(place), place.context, generation, place.request.agent)

    def add(self, place: Placement, turn: Turn) -> Message:
        """The model's message in it. ProtocolError, changing nothing, if it is not the next turn there."""
        row = self._number(place)
        before = () if place.row is None else self.rows[row].ids
        if (turn.index, turn.row, before + turn.context) != (len(self.turns), row, place.ids):
            raise ProtocolError(f"turn {turn.index} does not continue the tokens of row {turn.row}")
        message = turn_message(self._rules, turn, place.request.tools)
        messages, ids = (*place.messages, message), place.ids + turn.ids
        self.rows[row : row + 1] = [TokenRow(place.request, place.session, messages, ids, turn)]
        self.turns.append(turn)
        if (form := place.request.form) != AnswerForm():
            self.hints += 1
            self.followed += followed(form, self.said(turn))
        self.refused = None
        del self._pending[place.session]
        return message

    def cancel(self, place: Placement) -> None:
        """The request will not be answered. No effect once it was."""
        if self._pending.pop(place.session, None) is not None and place.row is not None:
            self._change(place.row, busy=False)

    def mark_undelivered(self, turn: Turn) -> None:
        """The client left without this turn. No effect once its row has gone on: then it was delivered."""
        if self.rows[turn.row].last is turn:
            self._change(turn.row, undelivered=True)

    def redeliver(self, request: AgentRequest) -> Turn | None:
        """The newest undelivered turn that answers the very same request; it counts as delivered now."""
        rows = [row for row in self.rows if row.undelivered and not row.busy and row.request == request]
        turn = max((row.last for row in rows), key=lambda turn: turn.index, default=None)
        if turn is not None:
            self._change(turn.row, undelivered=False)
        return turn

    # -- finding the row -----------------------------------------------------------------------------

    def _find(self, request: AgentRequest) -> Placement | Refusal:
        limits, chat = self._rules.config, self._rules.chat
        if len(self.turns) + len(self._pending) >= limits.max_turns:
            return _refusal(EpisodeEnd.MAX_TURNS, "turns", limits.max_turns)
        row = self._extended(request)
        if row is not None:
            old = self.rows[row]
            new = request.messages[len(old.messages) :]
            if refusal := self._too_long(new, len(old.ids)):
                return refusal
            delta = chat.delta_ids(new, old.ids[-1])
            if delta is not None:
                found = request, old.session, row, old.ids + delta, delta, 0, old.messages + new
                return self._limited(Placement(*found))
        if len(self.rows) + sum(place.row is None for place in self._pending.values()) >= limits.max_rows:
            return _refusal(EpisodeEnd.MAX_ROWS, "rows", limits.max_rows)
        known = [row.messages[: _common(row.messages, request.messages)] for row in self.rows]
        shown = max(known, key=len, default=())  # the model's messages as it wrote them
        new = request.messages[len(shown) :]
        if refusal := self._too_long(new, 0, sum(map(len, request.tools))):
            return refusal
        prompt = chat.prompt_ids(shown + new, request.tools)
        return self._limited(Placement(request, self._begun, None, prompt, prompt, 0, shown + new))

    def _too_long(self, new: Sequence[Message], tokens: int, characters: int = 0) -> Refusal | None:
        """A refusal of text that cannot fit a row after so many tokens. It is not tokenised to find out: that
        would hold up all episodes of the worker. A message is a token at least."""
        most = self._rules.config.max_tokens
        characters += sum(map(_characters, new))
        if characters <= CHARACTERS * (most - tokens):
            return None
        return _too_many(most, f"{characters} new characters are more")

    def _limited(self, place: Placement) -> Placement | Refusal:
        """The placement with its token limit, or a refusal because its row is full."""
        limits, asked = self._rules.config, place.request.max_new_tokens
        room = limits.max_tokens - len(place.ids)
        if room < 1:
            return _too_many(limits.max_tokens, f"the messages have {len(place.ids)}")
        most = limits.max_new_tokens if asked is None else min(asked, limits.max_new_tokens)
        return replace(place, max_new_tokens=min(room, most))

    def _extended(self, request: AgentRequest) -> int | None:
        """The free row that the request extends: the longest, and of equal ones the first."""
        fit = [
            number
            for number, row in enumerate(self.rows)
            if not row.busy and row.request.tools == request.tools and self._extends(row, request.messages)
        ]
        return max(fit, key=lambda number: len(self.rows[number].messages), default=None)

    def _extends(self, row: TokenRow, messages: tuple[Message, ...]) -> bool:
        new = messages[len(row.messages) :]
        ended = row.last.stop is not StopReason.LENGTH  # else the message is not whole
        answers = bool(new) and all(message.role in ANSWERING_ROLES for message in new)
        return ended and answers and _common(row.messages, messages) == len(row.messages)

    def _number(self, place: Placement) -> int:
        return len(self.rows) if place.row is None else place.row

    def _change(self, row: int, **changes: bool) -> None:
        self.rows[row] = replace(self.rows[row], **changes)


def same_message(ours: Message, theirs: Message) -> bool:
    """True if an agent's message is the recorded one. Clients change messages of the model: white space
    around the content, the spelling of arguments, the reasoning left out."""
    if ours.role != "assistant":
        return ours == theirs
    return (
        theirs.role == ours.role
        and theirs.content.strip() == ours.content.strip()
        and theirs.reasoning.strip() in ("", ours.reasoning.strip())
        and len(theirs.tool_calls) == len(ours.tool_calls)
        and all(
            a.name == b.name
            and (a.arguments == b.arguments or json.loads(a.arguments) == json.loads(b.arguments))
            for a, b in zip(ours.tool_calls, theirs.tool_calls, strict=True)
        )
    )


def _refusal(end: EpisodeEnd, what: str, most: int) -> Refusal:
    return Refusal(end, f"the episode has had its {most} {what} (rollout.max_{what})")


def _too_many(most: int, what: str) -> Refusal:
    """Refuse a full row in the words by which clients know that the context is full."""
    return Refusal(
        EpisodeEnd.LENGTH,
        f"This model's maximum context length is {most} tokens (rollout.max_tokens); {what}",
    )


def _characters(message: Message) -> int:
    texts = [message.content, message.reasoning, message.name, message.tool_call_id]
    texts += [text for call in message.tool_calls for text in (call.name, call.arguments, call.id)]
    return CHARACTERS + sum(map(len, texts))


def _common(ours: tuple[Message, ...], theirs: tuple[Message, ...]) -> int:
    """Count the messages that both begin with."""
    pairs = zip(ours, theirs, strict=False)
    return next((n for n, pair in enumerate(pairs) if not same_message(*pair)), min(len(ours), len(theirs)))
