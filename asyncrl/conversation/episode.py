"""An episode as a pure state machine: (episode, event) -> episode, whose `command` says what to do next.

    Open ──Opened──► Generate ──Generated──► CallTools ──Replied──► Generate ──► … ──► Score ──Scored──► Done
                        ▲          └───────► Step ──Observed──┐        (Fail ends it from any of these)
                        └─────────────────────────────────────┘

No awaits, clocks or I/O: whoever drives it carries out the command and feeds the answer back. Ids are only
ever appended to a row; where the history must be rewritten, a new row begins. Folding recorded turns over a
fresh episode (`resume`) gives the state it had, on any worker.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import msgspec

from asyncrl.conversation.commands import (
    CallTools,
    Command,
    Done,
    EpisodeLimits,
    EpisodeScored,
    Event,
    Fail,
    Generate,
    Observed,
    Open,
    Opened,
    Rules,
    Score,
    Step,
    ToolsReplied,
    TurnGenerated,
)
from asyncrl.conversation.parsers import Parsed, parse_turn
from asyncrl.conversation.turns import problem, scored
from asyncrl.errors import ProtocolError
from asyncrl.types import (
    EpisodeEnd,
    FailReason,
    Generation,
    Message,
    Observation,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
)

FREE_SHARE = 4  # folding frees at least 1 / FREE_SHARE of a row, or it would come again with the next turn
DROPPED = "[dropped]"


class Episode(msgspec.Struct, frozen=True):
    """`rows`: all tokens up to the last one the model wrote in each, the contexts and ids of its turns in
    order. `folded`: tool replies, the oldest first, that the newest row does not show."""

    sample: Sample
    command: Command
    opened: Opened = Opened()
    rows: tuple[tuple[int, ...], ...] = ()
    turns: tuple[Turn, ...] = ()
    bad_calls: int = 0  # malformed and refused ones in a row, up to now
    tool_calls: int = 0  # well-formed ones
    folded: int = 0

    @property
    def over(self) -> bool:
        return isinstance(self.command, Done | Fail)

    @property
    def model_tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def tool_seconds(self) -> float:
        """Time spent in tools, whose calls in one turn run side by side, and in the environment."""
        return sum(
            max((reply.seconds for reply in turn.replies), default=0.0)
            + (turn.observation.seconds if turn.observation else 0.0)
            for turn in self.turns
        )


def begin(sample: Sample) -> Episode:
    """A fresh episode."""
    return Episode(sample, Open())


def advance(rules: Rules, episode: Episode, event: Event) -> Episode:
    """The next state. ProtocolError, with nothing changed, when the event does not answer the command."""
    match episode.command, event:
        case Open(), Opened():
            return _opened(rules, episode, event)
        case Generate() as command, TurnGenerated():
            return _generated(rules, episode, command, event.generation)
        case CallTools() as command, ToolsReplied():
            if tuple(reply.call for reply in event.replies) != command.calls:
                raise ProtocolError(f"{len(event.replies)} replies do not match {len(command.calls)} calls")
            return _replied(rules, episode, event.replies, command.errors)
        case Step(), Observed():
            return _observed(rules, episode, event.observation)
        case Score() as command, EpisodeScored():
            return _with(episode, command=scored(episode.turns, command.end, event.verdict))
        case command, _:
            raise ProtocolError(f"{type(event).__name__} does not answer {type(command).__name__}")


def resume(rules: Rules, sample: Sample, opened: Opened, turns: Sequence[Turn]) -> Episode:
    """The state after recorded turns, by the same events. What the last turn was answered with may be
    missing: its tools are to be run, its environment is to be stepped. ProtocolError when the turns are not
    what these rules would have made of them."""
    episode = advance(rules, begin(sample), opened)
    for turn in turns:
        asked = episode.command
        if (
            not isinstance(asked, Generate)
            or asked.row != turn.row
            or asked.ids != _row(episode, asked) + turn.context
        ):
            raise ProtocolError(f"recorded turn {turn.index} does not continue the tokens before it")
        generation = Generation(turn.ids, turn.logprobs, turn.spans, turn.stop, turn.seconds)
        episode = advance(rules, episode, TurnGenerated(generation))
        if isinstance(episode.command, Fail) and len(episode.turns) == turn.index:
            raise ProtocolError(f"recorded turn {turn.index}: {episode.command.detail}")
        if turn.replies and isinstance(episode.command, CallTools):
            episode = advance(rules, episode, ToolsReplied(turn.replies[: len(episode.command.calls)]))
        if turn.observation is not None and isinstance(episode.command, Step):
            episode = advance(rules, episode, Observed(turn.observation))
        now = episode.turns[-1]
        if (turn.replies and now.replies != turn.replies) or now.observation != turn.observation:
            raise ProtocolError(f"what is recorded after turn {turn.index} does not answer it")
    return episode


def expire(rules: Rules, episode: Episode) -> Episode:
    """The episode's time is up. What it has done is scored, as for any ending that the policy caused; an
    unfinished turn is forgotten. Without a turn there is nothing to score."""
    if not episode.turns:
        detail = "not one turn was done within rollout.episode_timeout"
        return _with(episode, command=Fail(FailReason.DEADLINE, detail))
    return _over(rules, episode, EpisodeEnd.TIMEOUT)


def conversation(rules: Rules, episode: Episode) -> tuple[Message, ...]:
    """Everything that was said, the prompt included, without what the newest row no longer shows."""
    said = [*episode.sample.prompt, *episode.opened.messages]
    hidden = episode.folded
    for turn in episode.turns:
        said.append(spoken(rules, turn, tools=bool(episode.opened.tools)))
        for reply in turn.replies:
            said.append(tool_message(reply, DROPPED if hidden > 0 else reply.content))
            hidden -= 1
        said += turn.observation.messages if turn.observation else ()
    return tuple(said)


def spoken(rules: Rules, turn: Turn, *, tools: bool = True) -> Message:
    """What the model said in a turn. One with malformed calls is quoted as it is. `tools`: there are any."""
    text = rules.chat.decode(turn.ids)
    parsed = parse_turn(rules.parse, text, tools=tools)
    if parsed.errors:
        return Message("assistant", text)
    return Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)


def as_read(rules: Rules, observation: Observation) -> Observation:
    """With its messages cut, as the model reads them."""
    return msgspec.structs.replace(observation, messages=tuple(_read_by_model(rules, observation.messages)))


def tool_message(reply: ToolReply, content: str) -> Message:
    """A tool's reply as the template sees it."""
    return Message("tool", content, tool_call_id=reply.call.id, name=reply.call.name)


# -- transitions -------------------------------------------------------------------------------------


def _opened(rules: Rules, episode: Episode, opened: Opened) -> Episode:
    limits = rules.limits
    opened = msgspec.structs.replace(opened, messages=tuple(_read_by_model(rules, opened.messages)))
    prompt = rules.chat.prompt_ids((*episode.sample.prompt, *opened.messages), opened.tools)
    room = limits.max_tokens - len(prompt)
    episode = _with(episode, opened=opened)
    if room < 1:
        detail = f"the prompt has {len(prompt)} tokens, rollout.max_tokens is {limits.max_tokens}"
        return _with(episode, command=Fail(FailReason.PROMPT_TOO_LONG, detail))
    return _with(episode, command=Generate(prompt, min(room, limits.max_new_tokens)))


def _generated(rules: Rules, episode: Episode, asked: Generate, generation: Generation) -> Episode:
    before = _row(episode, asked)
    if asked.ids[: len(before)] != before:
        detail = f"the prompt of turn {len(episode.turns)} does not extend the tokens of its row"
        return _with(episode, command=Fail(FailReason.MISALIGNED, detail))
    if trouble := problem(rules.chat.stop_ids, asked.max_new_tokens, generation):
        return _with(episode, command=Fail(FailReason.ENGINE_ERROR, trouble))
    parsed = parse_turn(rules.parse, rules.chat.decode(generation.ids), tools=bool(episode.opened.tools))
    turn = Turn(
        index=len(episode.turns),
        context=asked.ids[len(before) :],
        ids=generation.ids,
        logprobs=generation.logprobs,
        spans=generation.spans,
        stop=generation.stop,
        seconds=generation.seconds,
        row=asked.row,
    )
    episode = _with(
        episode,
        rows=(*episode.rows[: asked.row], asked.ids + generation.ids),
        turns=(*episode.turns, turn),
    )
    if generation.stop is StopReason.LENGTH:
        return _over(rules, episode, EpisodeEnd.LENGTH)
    if episode.tool_calls + len(parsed.calls) > rules.limits.max_calls:
        return _over(rules, episode, EpisodeEnd.MAX_CALLS)
    own = not parsed.errors and any(call.name in episode.opened.own_tools for call in parsed.calls)
    if own or (rules.environment and not parsed.calls and not parsed.errors):
        episode = _with(episode, tool_calls=episode.tool_calls + len(parsed.calls), bad_calls=0)
        return _with(episode, command=Step(spoken(rules, turn, tools=bool(episode.opened.tools))))
    end = _end(rules.limits, episode, parsed)
    if end is not None:
        return _over(rules, episode, end)
    if not parsed.calls:
        return _replied(rules, episode, (), parsed.errors)
    return _with(episode, command=CallTools(parsed.calls, parsed.errors))


def _end(limits: EpisodeLimits, episode: Episode, parsed: Parsed) -> EpisodeEnd | None:
    """Why the episode is over after this turn, if it is. Tools of a last turn are not run: nobody would
    read their replies."""
    if not parsed.calls and not parsed.errors:
        return EpisodeEnd.ANSWERED
    if not parsed.calls and episode.bad_calls + len(parsed.errors) >= limits.max_bad_calls:
        return EpisodeEnd.BAD_CALLS
    if len(episode.turns) >= limits.max_turns:
        return EpisodeEnd.MAX_TURNS
    return None


def _replied(
    rules: Rules, episode: Episode, replies: tuple[ToolReply, ...], errors: tuple[str, ...]
) -> Episode:
    """Attach the replies to the turn, malformed calls last, as the model may read them."""
    everything = tuple(
        msgspec.structs.replace(reply, content=_cut(rules, reply.content))
        for reply in (*replies, *map(_malformed, errors))
    )
    turn = msgspec.structs.replace(episode.turns[-1], replies=everything)
    bad = sum(reply.refused for reply in everything)
    episode = _with(
        episode,
        turns=(*episode.turns[:-1], turn),
        tool_calls=episode.tool_calls + len(replies),
        bad_calls=bad + (episode.bad_calls if bad == len(everything) else 0),
    )
    if episode.bad_calls >= rules.limits.max_bad_calls:
        return _over(rules, episode, EpisodeEnd.BAD_CALLS)
    return _go_on(rules, episode, tuple(tool_message(reply, reply.content) for reply in everything))


def _observed(rules: Rules, episode: Episode, observation: Observation) -> Episode:
    observation = as_read(rules, observation)
    turn = msgspec.structs.replace(episode.turns[-1], observation=observation)
    episode = _with(episode, turns=(*episode.turns[:-1], turn))
    if observation.done:
        return _over(rules, episode, EpisodeEnd.DONE)
    if len(episode.turns) >= rules.limits.max_turns:
        return _over(rules, episode, EpisodeEnd.MAX_TURNS)
    if not observation.messages:
        detail = "the environment said nothing, and is not done"
        return _with(episode, command=Fail(FailReason.ENVIRONMENT_ERROR, detail))
    return _go_on(rules, episode, observation.messages)


def _go_on(rules: Rules, episode: Episode, news: tuple[Message, ...]) -> Episode:
    """Ask for the next turn: after the newest row where the template only appends, else in a new one."""
    limits, count = rules.limits, len(episode.rows)
    delta = rules.chat.delta_ids(news, episode.rows[-1][-1])
    if delta is None and limits.history == "append":
        detail = "the chat template rewrites earlier turns after what was replied; set rollout.history=fork"
        return _with(episode, command=Fail(FailReason.MISALIGNED, detail))
    ids = _rewritten(rules, episode) if delta is None else episode.rows[-1] + delta
    row = count if delta is None else count - 1
    if limits.history == "fold" and len(ids) + limits.max_new_tokens > limits.max_tokens:
        shorter = _folded(rules, episode) if count < limits.max_rows else None
        if shorter is not None:
            episode, ids, row = shorter, _rewritten(rules, shorter), count
    if row >= limits.max_rows:
        return _over(rules, episode, EpisodeEnd.MAX_ROWS)
    if len(ids) >= limits.max_tokens:
        return _over(rules, episode, EpisodeEnd.LENGTH)
    room = limits.max_tokens - len(ids)
    return _with(episode, command=Generate(ids, min(room, limits.max_new_tokens), row))


def _rewritten(rules: Rules, episode: Episode) -> tuple[int, ...]:
    """The prompt of a new row: the history as it is shown from now on."""
    return rules.chat.prompt_ids(conversation(rules, episode), episode.opened.tools)


def _folded(rules: Rules, episode: Episode) -> Episode | None:
    """Without as few of the oldest tool replies as leave room for a turn, and for some more. Those of the
    last turn are always shown; None: there are no others to drop."""
    limits = rules.limits
    counts = range(episode.folded + 1, 1 + sum(len(turn.replies) for turn in episode.turns[:-1]))
    most = limits.max_tokens - max(limits.max_new_tokens, limits.max_tokens // FREE_SHARE)
    if not counts:
        return None
    at = bisect.bisect_left(
        counts, True, key=lambda count: len(_rewritten(rules, _with(episode, folded=count))) <= most
    )
    return _with(episode, folded=counts[min(at, len(counts) - 1)])


def _over(rules: Rules, episode: Episode, end: EpisodeEnd) -> Episode:
    text = rules.chat.decode(episode.turns[-1].ids)
    return _with(
        episode, command=Score(parse_turn(rules.parse, text, tools=bool(episode.opened.tools)).content, end)
    )


def _row(episode: Episode, asked: Generate) -> tuple[int, ...]:
    """The tokens that the turn extends; none where it begins a row."""
    return episode.rows[asked.row] if asked.row < len(episode.rows) else ()


def _with(episode: Episode, **changes: object) -> Episode:
    return msgspec.structs.replace(episode, **changes)


def _cut(rules: Rules, text: str) -> str:
    return rules.chat.shorten(text, rules.limits.max_reply_tokens, rules.limits.cut_replies)


def _read_by_model(rules: Rules, messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        content, reasoning = _cut(rules, message.content), _cut(rules, message.reasoning)
        yield msgspec.structs.replace(message, content=content, reasoning=reasoning)


def _malformed(error: str) -> ToolReply:
    return ToolReply(ToolCall("malformed_call", "{}"), f"error: {error}", error, refused=True)
