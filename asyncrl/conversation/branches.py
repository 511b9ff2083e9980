"""The rows of an agent's episode: where a request of the agent belongs, and what its answer makes of it.

    Ask ──place──► Place ──(engine)──► Generation ──turn──► Turn ──add──► a row is longer, or one more
             └───► Refusal: a limit of the run

A request that repeats what a row shows and adds news to it extends that row: the template writes the news
after the very ids of the model. Everything else begins a new row, whose prompt is rendered as a whole: an
edited history, a second conversation, the same prompt again, a row that another request extends right now, a
template that rewrites. A turn whose client left before it was told answers that request when it comes again.
No awaits and no clocks; requests of one agent may overlap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.episode import spoken
from asyncrl.conversation.parsers import parse_turn
from asyncrl.errors import ProtocolError
from asyncrl.types import EpisodeEnd, Generation, Message, StopReason, Turn

NEWS = ("system", "tool", "user")  # roles that can follow what the model said
CHARACTERS = 16  # of a token, at most, on average: more text than that is too long whatever its tokens are


class Ask(msgspec.Struct, frozen=True):
    """What an agent asks for. `tools`: OpenAI schemas, as JSON text. `max_new_tokens` None: the run's."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    max_new_tokens: int | None = None


class Place(msgspec.Struct, frozen=True):
    """Where the answer to `ask` goes. Sample at most `max_new_tokens` after `ids`, of which `context` is new.

    `said` are the messages that `ids` show. A row gets its number when its first turn is done (None: it has
    none yet); `session` names it from the start.
    """

    ask: Ask
    session: int
    row: int | None
    ids: tuple[int, ...]
    context: tuple[int, ...]
    max_new_tokens: int
    said: tuple[Message, ...]


class Refusal(msgspec.Struct, frozen=True):
    """A request that a limit forbids. An agent that gives up after it has ended so."""

    end: EpisodeEnd
    detail: str


class Row(msgspec.Struct, frozen=True):
    """`tip`, the last turn, answers `ask`; `said` and `ids` end with it. `taken`: a request extends the row
    right now. `lost`: nobody heard the tip."""

    ask: Ask
    session: int
    said: tuple[Message, ...]
    ids: tuple[int, ...]
    tip: Turn
    taken: bool = False
    lost: bool = False


class Branches:
    """Owner of the rows and turns of one episode. Every `place` is followed by `add`, or by `forget`.

    `recorded`: the turns of an earlier attempt, which are answered from before anything is sampled.
    """

    def __init__(self, rules: Rules, recorded: Sequence[Turn] = ()) -> None:
        self.rows: list[Row] = []
        self.turns: list[Turn] = []
        self.refused: Refusal | None = None  # since the last turn
        self._rules, self._recorded = rules, recorded
        self._prefixes = _prefixes(recorded)
        self._begun = 0  # rows, those that were forgotten included
        self._open: dict[int, Place] = {}  # by session

    @property
    def recalling(self) -> bool:
        """Some recorded turn was not asked for again, yet."""
        return len(self.turns) < len(self._recorded)

    @property
    def end(self) -> EpisodeEnd:
        """How the episode ends if the agent ends now. There is a turn."""
        if self.refused is not None:
            return self.refused.end
        return EpisodeEnd.LENGTH if self.turns[-1].stop is StopReason.LENGTH else EpisodeEnd.DONE

    @property
    def shown(self) -> tuple[Message, ...]:
        """The conversation that the last turn belongs to."""
        return self.rows[self.turns[-1].row].said

    @property
    def calls(self) -> int:
        """Well-formed tool calls of the model."""
        return sum(len(self._spoken(turn, self.rows[turn.row].ask).tool_calls) for turn in self.turns)

    @property
    def answer(self) -> str:
        """The last turn's text outside tool calls."""
        last = self.turns[-1]
        text = self._rules.chat.decode(last.ids)
        return parse_turn(self._rules.parse, text, tools=bool(self.rows[last.row].ask.tools)).content

    # -- a request -----------------------------------------------------------------------------------

    def place(self, ask: Ask) -> Place | Refusal:
        """Where the answer to a request belongs. ConfigError when the template cannot write its messages."""
        found = self._place(ask)
        if isinstance(found, Refusal):
            self.refused = found
            return found
        self._open[found.session] = found
        if found.row is None:
            self._begun += 1
        else:
            self._change(found.row, taken=True)
        return found

    def recalled(self, place: Place) -> Turn | None:
        """The recorded turn that answers it; it can be added once all before it are. None: sample it.
        ProtocolError when none does, though some are left: the agent does not repeat itself."""
        if not self.recalling:
            return None
        for turn in self._recorded[len(self.turns) :]:
            begins = len(turn.context) == len(self._prefixes[turn.index])
            if self._prefixes[turn.index] == place.ids and (
                place.row == turn.row or (place.row is None and begins)
            ):
                return turn
        raise ProtocolError(f"the agent does not repeat its recorded turn {len(self.turns)}")

    def turn(self, place: Place, generation: Generation) -> Turn:
        """The next turn of the episode, to be added before anything else happens."""
        return Turn(
            index=len(self.turns),
            context=place.context,
            ids=generation.ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            stop=generation.stop,
            seconds=generation.seconds,
            row=len(self.rows) if place.row is None else place.row,
        )

    def add(self, place: Place, turn: Turn) -> Message:
        """What the model said in it. ProtocolError, changing nothing, if it is not the next turn there."""
        row = len(self.rows) if place.row is None else place.row
        before = () if place.row is None else self.rows[row].ids
        if (turn.index, turn.row, before + turn.context) != (len(self.turns), row, place.ids):
            raise ProtocolError(f"turn {turn.index} does not continue the tokens of row {turn.row}")
        message = self._spoken(turn, place.ask)
        said, ids = (*place.said, message), place.ids + turn.ids
        self.rows[row : row + 1] = [Row(place.ask, place.session, said, ids, turn)]
        self.turns.append(turn)
        self.refused = None
        del self._open[place.session]
        return message

    def forget(self, place: Place) -> None:
        """Nobody will answer it."""
        if self._open.pop(place.session, None) is not None and place.row is not None:
            self._change(place.row, taken=False)

    def lose(self, turn: Turn) -> None:
        """Whoever asked for it has left without it. No effect once its row has gone on: then it was heard."""
        if self.rows[turn.row].tip is turn:
            self._change(turn.row, lost=True)

    def repeated(self, ask: Ask) -> Turn | None:
        """The newest lost turn that answers the very same request; it counts as heard again."""
        lost = [row.tip for row in self.rows if row.lost and not row.taken and row.ask == ask]
        turn = max(lost, key=lambda turn: turn.index, default=None)
        if turn is not None:
            self._change(turn.row, lost=False)
        return turn

    # -- finding the row -----------------------------------------------------------------------------

    def _place(self, ask: Ask) -> Place | Refusal:
        if len(self.turns) + len(self._open) >= (most := self._rules.limits.max_turns):
            return Refusal(EpisodeEnd.MAX_TURNS, f"the episode has had its {most} turns (rollout.max_turns)")
        row = self._continued(ask)
        if row is not None:
            tip = self.rows[row]
            news = ask.messages[len(tip.said) :]
            if refusal := self._too_long(news, len(tip.ids)):
                return refusal
            delta = self._rules.chat.delta_ids(news, tip.ids[-1])
            if delta is not None:
                return self._roomy(Place(ask, tip.session, row, tip.ids + delta, delta, 0, tip.said + news))
        begun = len(self.rows) + sum(place.row is None for place in self._open.values())
        if begun >= (most := self._rules.limits.max_rows):
            return Refusal(EpisodeEnd.MAX_ROWS, f"the episode has had its {most} rows (rollout.max_rows)")
        known = self._known(ask.messages)
        news = ask.messages[len(known) :]
        if refusal := self._too_long(news, 0, sum(map(len, ask.tools))):
            return refusal
        prompt = self._rules.chat.prompt_ids(known + news, ask.tools)
        return self._roomy(Place(ask, self._begun, None, prompt, prompt, 0, known + news))

    def _too_long(self, news: Sequence[Message], tokens: int, characters: int = 0) -> Refusal | None:
        """A look at the text that no row can hold after so many tokens: to render and tokenise it would hold
        up all episodes of the worker. A message is a token at least."""
        most = self._rules.limits.max_tokens
        characters += sum(map(_characters, news))
        if characters <= CHARACTERS * (most - tokens):
            return None
        return Refusal(
            EpisodeEnd.LENGTH, f"{characters} new characters are too long, rollout.max_tokens is {most}"
        )

    def _roomy(self, place: Place) -> Place | Refusal:
        """The place with its token limit, or what says that its row is full."""
        ask, limits = place.ask, self._rules.limits
        room = limits.max_tokens - len(place.ids)
        if room < 1:
            detail = f"the messages have {len(place.ids)} tokens, rollout.max_tokens is {limits.max_tokens}"
            return Refusal(EpisodeEnd.LENGTH, detail)
        wanted = limits.max_new_tokens if ask.max_new_tokens is None else ask.max_new_tokens
        return msgspec.structs.replace(place, max_new_tokens=min(room, wanted, limits.max_new_tokens))

    def _continued(self, ask: Ask) -> int | None:
        """The free row that the request extends: the longest, and of equal ones the first."""
        fit = [
            number
            for number, row in enumerate(self.rows)
            if not row.taken and row.ask.tools == ask.tools and self._extends(row, ask.messages)
        ]
        return max(fit, key=lambda number: len(self.rows[number].said), default=None)

    def _extends(self, row: Row, messages: tuple[Message, ...]) -> bool:
        news = messages[len(row.said) :]
        ended = row.ids[-1] in self._rules.chat.stop_ids  # else the template's delta does not fit its tip
        answers = bool(news) and all(message.role in NEWS for message in news)
        return ended and answers and _shared(row.said, messages) == len(row.said)

    def _known(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The first of the messages, as far as some row shows them: the model's own in its own spelling."""
        return max((row.said[: _shared(row.said, messages)] for row in self.rows), key=len, default=())

    def _spoken(self, turn: Turn, ask: Ask) -> Message:
        """What an agent that sends no tools gets is text, whatever it looks like."""
        return spoken(self._rules, turn, tools=bool(ask.tools))

    def _change(self, row: int, **changes: bool) -> None:
        self.rows[row] = msgspec.structs.replace(self.rows[row], **changes)


def same(ours: Message, theirs: Message) -> bool:
    """Whether an agent's message is the one that we know. What the model said comes back through a client:
    with other whitespace around it, arguments spelled anew, the reasoning left out."""
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


def _characters(message: Message) -> int:
    texts = [message.content, message.reasoning, message.name, message.tool_call_id]
    texts += [text for call in message.tool_calls for text in (call.name, call.arguments, call.id)]
    return CHARACTERS + sum(map(len, texts))


def _shared(said: tuple[Message, ...], messages: tuple[Message, ...]) -> int:
    """How many messages both begin with."""
    pairs = zip(said, messages, strict=False)
    return next((count for count, pair in enumerate(pairs) if not same(*pair)), min(len(said), len(messages)))


def _prefixes(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """What the engine was shown for each turn."""
    rows: dict[int, tuple[int, ...]] = {}
    shown = []
    for turn in turns:
        shown.append(rows.get(turn.row, ()) + turn.context)
        rows[turn.row] = shown[-1] + turn.ids
    return shown
