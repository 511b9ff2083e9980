"""The rows of an agent's episode: which row a request of the agent extends, and what its answer adds.

    AgentRequest --place--> Placement --(engine)--> Generation --turn--> Turn --add--> its row is longer
                 \\-------> Refusal: a limit of the run

A request that repeats the messages of a row and adds new ones extends that row: the template writes the new
messages after the very ids of the model. Everything else begins a new row, whose prompt is rendered as a
whole: an edited history, a second conversation, the same prompt again, a row that another request is
extending, a template that rewrites. A turn whose client left before it was delivered answers the same request
when it comes again. No awaits and no clocks; requests of one agent may overlap.

Side requests (titles, commit messages) are answered like others, but none of their turns is trained: they
have rows and limits of their own, so that the conversation goes on where it was when they were asked, and the
episode's answer, end and conversation are those of the last trained turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.requests import (
    CHARACTERS,
    AgentRequest,
    Placement,
    Refusal,
    TextPrompt,
    TextRows,
    TokenRow,
    Untrained,
    characters_of,
    common,
    limit_reached,
    row_is_full,
    short,
)
from asyncrl.conversation.turns import make_turn, read_turn, turn_message
from asyncrl.conversation.watch import before
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import EpisodeEnd, Generation, Message, StopReason, Turn

MOST_LEFT = 8  # requests whose clients left, that are remembered
ANSWERING_ROLES = ("system", "tool", "user")  # of messages that can follow the model's


class Branches:
    """Owner of the rows and turns of one episode. Every `place` is followed by `add` or by `cancel`.

    `recorded`: the turns of an earlier attempt, which answer the agent's requests before anything is sampled.
    """

    def __init__(
        self, rules: Rules, recorded: Sequence[Turn] = (), untrained: Untrained = lambda request: False
    ) -> None:
        self.rows: list[TokenRow] = []
        self.turns: list[Turn] = []
        self.refused: Refusal | None = None  # since the last turn
        self.folded = 0  # system messages that the template got as others
        self._rules = rules
        self._recorded = recorded
        self._untrained = untrained
        self._texts = TextRows(rules.chat)
        self._parsed: tuple[Turn, tuple[str, ...], Message] | None = None  # the newest, with its stop texts
        self._begun = 0  # rows, cancelled ones included
        self._pending: dict[int, Placement] = {}  # by session
        self._left: list[Placement] = []  # cancelled ones, in new rows: their requests may come again
        # Calls what tokenises, unless it just was: for a request that comes next, and each of its answers.
        self._ids: Callable[..., Any] = lru_cache(maxsize=2)(lambda tokenise, *of: tokenise(*of))

    @property
    def replaying(self) -> bool:
        """True while a recorded turn was not asked for again."""
        return len(self.turns) < len(self._recorded)

    @property
    def end(self) -> EpisodeEnd:
        """The end of the episode if the agent ends now. There is a turn."""
        if self.refused is not None:
            return self.refused.end
        return EpisodeEnd.LENGTH if self._last.stop is StopReason.LENGTH else EpisodeEnd.DONE

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the conversation that the last trained turn belongs to, up to that turn."""
        return self.rows[self._last.row].messages

    @property
    def main(self) -> tuple[Message, ...]:
        """Return the conversation about the task, up to its last turn: that of the agent and the tools of the
        first request with tools; without any, the one with the most turns."""
        turns = [(turn.row, self.rows[turn.row]) for turn in self.turns if not turn.untrained]
        whose = {row: (one.request.agent, one.request.tools or one.messages[0].content) for row, one in turns}
        counts = Counter(whose[row] for row, _ in turns)
        first = next((whose[row] for row in sorted(whose) if self.rows[row].request.tools), None)
        chosen = counts.most_common(1)[0][0] if first is None else first
        return next(one.messages for row, one in reversed(turns) if whose[row] == chosen)

    @property
    def calls(self) -> int:
        """Well-formed tool calls of the model."""
        return sum(len(self.said(turn).tool_calls) for turn in self.turns if not turn.untrained)

    @property
    def _last(self) -> Turn:
        """Return the last trained turn. There is one."""
        return next(turn for turn in reversed(self.turns) if not turn.untrained)

    @property
    def answer(self) -> str:
        """Return the text of the last trained turn outside tool calls."""
        last = self._last
        request = self.rows[last.row].request
        if request.prompt is not None:
            return self.said(last).content
        return read_turn(self._rules, last, request.tools, request.stops).content

    def said(self, turn: Turn) -> Message:
        """The model's message in a turn as the agent gets it. An agent that sends no tools gets all of it as
        text, calls included."""
        return self._said(self.rows[turn.row].request, turn)

    def stopped_at(self, turn: Turn) -> str:
        """Return the stop text of the request at which a turn ended; '' where none ended it."""
        if turn.stop is not StopReason.TEXT:
            return ""
        text = self._rules.chat.decode(turn.ids)
        stops = self.rows[turn.row].request.stops
        return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=(0, ""))[1]

    def prompt_tokens(self, found: Turn | Placement) -> int:
        """Count the tokens of the prompt of an answer, made or to be made."""
        if isinstance(found, Placement):
            return len(found.ids)
        return len(self.rows[found.row].ids) - len(found.ids)

    def count(self, request: AgentRequest) -> int:
        """Count the tokens of a request's prompt, if it were answered now. ConfigError when the template
        cannot write the messages. A text that is far too long is not tokenised: an estimate."""
        found = self._find(request, self._untrained(request))
        if isinstance(found, Placement):
            return len(found.ids)
        return sum(map(characters_of, request.messages)) // 4

    # -- a request -----------------------------------------------------------------------------------

    def find(self, request: AgentRequest, count: int, attempt: int = 0) -> list[Turn | Placement] | Refusal:
        """Find `count` answers: each a new Placement, or an undelivered Turn to hand out again. `attempt`:
        the number of the try. A client that counts its tries did not read the turns of those before.
        ConfigError when the template cannot write the messages."""
        if attempt == 0:
            self._mark_read(request)

        found: list[Turn | Placement] = []
        for _ in range(count):
            try:
                one = (
                    self.redeliver(request, attempt)
                    or self._unread(request, attempt)
                    or self.place(request, attempt)
                )
            except BaseException:
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

    def place(self, request: AgentRequest, attempt: int = 0) -> Placement | Refusal:
        """Find the place of the answer to a request. ConfigError when the template cannot write its
        messages."""
        side = self._untrained(request)
        found = self._find(request, side)
        if isinstance(found, Refusal):
            if not side:
                self.refused = found
            return found
        found = replace(found, attempt=attempt)
        self._pending[found.session] = found
        if found.row is None:
            self._left = [one for one in self._left if one.session != found.session]
            self._begun = max(self._begun, found.session + 1)
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
            recorded = row, turn.context, turn.agent, turn.untrained
            asked = place.row, place.context, place.request.agent, place.untrained
            if turn.row not in seen and recorded == asked:
                return turn
            seen.add(turn.row)
        raise ProtocolError(f"the agent does not repeat its recorded turn {len(self.turns)}")

    def turn(self, place: Placement, generation: Generation) -> Turn:
        """The next turn of the episode, to be added before anything else happens."""
        number = self._number(place)
        who = place.request.agent
        return make_turn(len(self.turns), number, place.context, generation, who, place.untrained)

    def add(self, place: Placement, turn: Turn) -> Message:
        """The model's message in it. ProtocolError, changing nothing, if it is not the next turn there."""
        row = self._number(place)
        before = () if place.row is None else self.rows[row].ids
        if (turn.index, turn.row, before + turn.context) != (len(self.turns), row, place.ids):
            raise ProtocolError(f"turn {turn.index} does not continue the tokens of row {turn.row}")
        message = self._said(place.request, turn, whole=True)
        messages = (*place.messages, message)
        ids = place.ids + turn.ids
        known = 0 if place.row is None else len(self.rows[row].messages)
        self.folded += self._folded(place.messages[known:], place.row is None)
        self.rows[row : row + 1] = [
            TokenRow(
                place.request,
                place.session,
                messages,
                ids,
                turn,
                attempt=place.attempt,
                untrained=place.untrained,
            )
        ]
        self.turns.append(turn)
        if not turn.untrained:
            self.refused = None
        del self._pending[place.session]
        return message

    def cancel(self, place: Placement) -> None:
        """The request will not be answered. No effect once it was, or another one has its place."""
        if self._pending.get(place.session) is place:
            del self._pending[place.session]
            if place.row is not None:
                self._change(place.row, busy=False)
            else:
                self._left = [*self._left, place][-MOST_LEFT:]

    def mark_undelivered(self, turn: Turn) -> None:
        """The client left without this turn. No effect once its row has gone on: then it was delivered."""
        if self.rows[turn.row].last is turn:
            self._change(turn.row, undelivered=True, read=False)

    def redeliver(self, request: AgentRequest, attempt: int = 0) -> Turn | None:
        """The newest undelivered turn that answers the very same request; it counts as delivered now."""
        rows = [row for row in self.rows if row.undelivered and not row.busy and row.request == request]
        turn = max((row.last for row in rows), key=lambda turn: turn.index, default=None)
        if turn is not None:
            self._change(turn.row, undelivered=False, attempt=attempt)
        return turn

    def _mark_read(self, request: AgentRequest) -> None:
        """Note, at the first try of a request, that turns which answered the same before were read: no later
        try is answered with them."""
        for number, row in enumerate(self.rows):
            if not row.undelivered and not row.read and row.request == request:
                self._change(number, read=True)

    def _unread(self, request: AgentRequest, attempt: int) -> Turn | None:
        """Return a turn that an earlier try of the very same request got, and that no request goes on from:
        that of the try just before if there is one, and of those the newest. This try has it now. None where
        the try just before got no turn: this one goes on with what that began. (Equal requests may be under
        way side by side, each with its tries.)"""
        if any(left.request == request and left.attempt == attempt - 1 for left in self._left):
            return None
        rows = [
            row
            for row in self.rows
            if row.attempt < attempt and not row.busy and not row.read and row.request == request
        ]
        row = max(rows, key=lambda row: (row.attempt, row.last.index), default=None)
        if row is None:
            return None
        self._change(row.last.row, attempt=attempt)
        return row.last

    # -- finding the row -----------------------------------------------------------------------------

    def _find(self, request: AgentRequest, side: bool) -> Placement | Refusal:
        limits = self._rules.config
        chat = self._rules.chat
        pending = [one for one in list(self._pending.values()) if one.untrained == side]
        if sum(turn.untrained == side for turn in self.turns) + len(pending) >= limits.max_turns:
            return limit_reached(EpisodeEnd.MAX_TURNS, "turns", limits.max_turns)
        if request.prompt is not None:
            return self._find_text(request, request.prompt, pending, side)
        row = self._extended(request, side)
        if row is not None:
            old = self.rows[row]
            new = request.messages[len(old.messages) :]
            if refusal := self._too_long(new, len(old.ids)):
                return refusal
            delta = self._ids(chat.delta_ids, chat.fold(new, False), old.ids[-1])
            if delta is not None:
                return self._placed(request, row, delta, old.messages + new, side)
        if refusal := self._too_many_rows(pending, side):
            return refusal
        # The request's messages, as the model wrote those that a row has.
        known = [row.messages[: common(row.messages, request.messages)] for row in self.rows]
        shown = max(known, key=len, default=())
        messages = shown + request.messages[len(shown) :]
        if refusal := self._too_long(messages[len(shown) :], 0, sum(map(len, request.tools))):
            return refusal
        prompt = self._ids(chat.prompt_ids, chat.fold(messages, True), request.tools)
        return self._placed(request, None, prompt, messages, side)

    def rendering(self, request: AgentRequest) -> Callable[[], object] | None:
        """Return the tokenising that `find` would do, where it may take long: call it, in any thread, before
        `find`. It changes nothing."""
        side = self._untrained(request)
        row = None if request.prompt is not None else self._extended(request, side)
        known = 0 if row is None else len(self.rows[row].messages)
        new = request.messages[known:]
        chat = self._rules.chat
        quick = short(new, sum(map(len, request.tools)) if row is None else 0)
        if quick and row is not None and not short(request.messages):
            # All of it is tokenised where the template rewrites the row.
            quick = self._ids(chat.delta_ids, chat.fold(new, False), self.rows[row].ids[-1]) is not None
        return None if quick else lambda: self._find(request, side)

    def _folded(self, messages: tuple[Message, ...], beginning: bool) -> int:
        """Count the system messages that the template does not get as such."""
        written = self._rules.chat.fold(messages, beginning)
        before, after = (sum(one.role == "system" for one in found) for found in (messages, written))
        return before - after

    def _find_text(
        self, request: AgentRequest, prompt: TextPrompt, pending: Sequence[Placement], side: bool
    ) -> Placement | Refusal:
        chat, (row, rest) = self._rules.chat, self._texts.rest(prompt, self._free(request, side))
        if row is None and (refusal := self._too_many_rows(pending, side)):
            return refusal
        if isinstance(rest, str):
            tokens = 0 if row is None else len(self.rows[row].ids)
            if refusal := self._too_long((Message("user", rest),), tokens):
                return refusal
            rest = self._ids(chat.text_ids, rest, row is None)
        elif rest and max(rest) >= chat.vocabulary:
            raise ConfigError(f"the prompt has the id {max(rest)}; the tokenizer knows {chat.vocabulary}")
        old = () if row is None else self.rows[row].messages
        return self._placed(request, row, rest, old + request.messages, side)

    def _too_many_rows(self, pending: Sequence[Placement], side: bool) -> Refusal | None:
        begun = sum(place.row is None for place in pending)
        if sum(row.untrained == side for row in self.rows) + begun >= self._rules.config.max_rows:
            return limit_reached(EpisodeEnd.MAX_ROWS, "rows", self._rules.config.max_rows)
        return None

    def _placed(
        self,
        request: AgentRequest,
        row: int | None,
        context: tuple[int, ...],
        messages: tuple[Message, ...],
        side: bool,
    ) -> Placement | Refusal:
        """Return the placement with its token limit, or a refusal because its row is full. A request whose
        client left, and that comes again, goes on with what was sampled of its turn."""
        limits = self._rules.config
        asked = request.max_new_tokens
        old = None if row is None else self.rows[row]
        begun = next((one.session for one in self._left if one.request == request), self._begun)
        session, known = (begun, ()) if old is None else (old.session, old.ids)
        ids = known + context
        room = limits.max_tokens - len(ids)
        if room < 1:
            return row_is_full(limits.max_tokens, len(ids), f"the messages have {len(ids)}")
        most = min(room, limits.max_new_tokens, limits.max_new_tokens if asked is None else asked)
        return Placement(request, session, row, ids, context, most, messages, side)

    def _too_long(self, new: Sequence[Message], tokens: int, characters: int = 0) -> Refusal | None:
        """A refusal of text that cannot fit a row after so many tokens. It is not tokenised to find out: that
        would hold up all episodes of the worker. A message is a token at least."""
        most = self._rules.config.max_tokens
        characters += sum(map(characters_of, new))
        if characters <= CHARACTERS * (most - tokens):
            return None
        return row_is_full(most, tokens + characters // 4, f"{characters} new characters are more")

    def _extended(self, request: AgentRequest, side: bool) -> int | None:
        """The free row that the request extends: the longest, and of equal ones the first."""
        fit = [
            number
            for number, row in self._free(request, side)
            if row.request.tools == request.tools and self._extends(row, request.messages)
        ]
        return max(fit, key=lambda number: len(self.rows[number].messages), default=None)

    def _free(self, request: AgentRequest, side: bool) -> Iterator[tuple[int, TokenRow]]:
        """Yield the rows, with their numbers, that a request may extend: a side request none that trains."""
        apart = self._rules.rows_apart
        return (
            (at, row)
            for at, row in enumerate(self.rows)
            if not row.busy and row.untrained == side and (row.request.agent == request.agent or not apart)
        )

    def _extends(self, row: TokenRow, messages: tuple[Message, ...]) -> bool:
        new = messages[len(row.messages) :]
        ended = row.last.stop is not StopReason.LENGTH  # else the message is not whole
        answers = bool(new) and all(message.role in ANSWERING_ROLES for message in new)
        return ended and answers and common(row.messages, messages) == len(row.messages)

    def _said(self, request: AgentRequest, turn: Turn, whole: bool = False) -> Message:
        """Return the model's message; `whole`: with the text at which it was asked to stop."""
        stops = () if whole else request.stops
        if self._parsed is None or self._parsed[0] is not turn or self._parsed[1] != stops:
            if request.prompt is not None:
                message = Message("assistant", before(self._rules.chat.decode(turn.ids), stops))
            else:
                parsed = read_turn(self._rules, turn, request.tools, stops)
                message = turn_message(self._rules, turn, parsed, stops)
            self._parsed = turn, stops, message
        return self._parsed[2]

    def _number(self, place: Placement) -> int:
        return len(self.rows) if place.row is None else place.row

    def _change(self, row: int, **changes: int) -> None:
        self.rows[row] = replace(self.rows[row], **changes)
