"""An episode as a pure state machine: (episode, event) -> episode, whose `command` says what to do next.

    Generate ──Generated──► CallTools ──Replied──► Generate ──► … ──Generated──► Score ──Scored──► Done
                                                                (Fail ends it from any of these)

No awaits, clocks or I/O: whoever drives it carries out the command and feeds the answer back. Ids are only
ever appended. Folding recorded turns over a fresh episode (`resume`) gives the state it had, on any worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from asyncrl.errors import ProtocolError
from asyncrl.rollout.parsers import Parsed
from asyncrl.types import (
    EpisodeEnd,
    FailReason,
    Generation,
    Message,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
    Verdict,
)


class Template(Protocol):
    """What is used of a `Chat`."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def prompt_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]: ...
    def delta_ids(self, replies: tuple[ToolReply, ...]) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Limits(msgspec.Struct, frozen=True):
    """See RolloutConfig, which has the same keys."""

    max_turns: int
    max_tokens: int
    max_new_tokens: int
    max_bad_calls: int


@dataclass(frozen=True)
class Rules:
    """What all episodes of a run have in common."""

    chat: Template
    parse: Callable[[str], Parsed]
    limits: Limits


# -- commands: what the episode waits for ----------------------------------------------------------


class Generate(msgspec.Struct, frozen=True):
    """Sample a turn after `ids`, the whole prefix."""

    ids: tuple[int, ...]
    max_new_tokens: int


class CallTools(msgspec.Struct, frozen=True):
    """Run these calls, once the turn that made them is durable. `errors` are the turn's malformed calls."""

    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...] = ()


class Score(msgspec.Struct, frozen=True):
    """Reward the episode. `answer` is the last turn's text outside tool calls."""

    answer: str
    end: EpisodeEnd


class Done(msgspec.Struct, frozen=True):
    """The episode is over and has a reward: the sum of `turn_rewards`, one per turn. `components` and
    `shaping` as in `Verdict`."""

    reward: float
    end: EpisodeEnd
    turn_rewards: tuple[float, ...]
    components: dict[str, float] = {}
    shaping: float = 0.0


class Fail(msgspec.Struct, frozen=True):
    """The episode has no trajectory."""

    reason: FailReason
    detail: str


Command = Generate | CallTools | Score | Done | Fail


# -- events: the answers -----------------------------------------------------------------------------


class Generated(msgspec.Struct, frozen=True):
    """Answers Generate."""

    generation: Generation


class Replied(msgspec.Struct, frozen=True):
    """Answers CallTools: one reply per call, in the order of the calls."""

    replies: tuple[ToolReply, ...]


class Scored(msgspec.Struct, frozen=True):
    """Answers Score."""

    verdict: Verdict


Event = Generated | Replied | Scored


class Episode(msgspec.Struct, frozen=True):
    """`ids` are all tokens up to the last one the model wrote: the contexts and ids of `turns`, in order."""

    sample: Sample
    command: Command
    ids: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    bad_calls: int = 0  # malformed ones in a row, up to now
    tool_calls: int = 0  # answered well-formed ones

    @property
    def over(self) -> bool:
        return isinstance(self.command, Done | Fail)

    @property
    def model_tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def tool_seconds(self) -> float:
        """Time spent in tools; the calls of one turn run side by side."""
        return sum(max((reply.seconds for reply in turn.replies), default=0.0) for turn in self.turns)


def begin(rules: Rules, sample: Sample) -> Episode:
    """A fresh episode: it asks for its first turn, or its prompt leaves no room for one."""
    prompt = rules.chat.prompt_ids(sample.prompt)
    room = rules.limits.max_tokens - len(prompt)
    if room < 1:
        detail = f"the prompt has {len(prompt)} tokens, rollout.max_tokens is {rules.limits.max_tokens}"
        return Episode(sample, Fail(FailReason.PROMPT_TOO_LONG, detail))
    return Episode(sample, Generate(prompt, min(room, rules.limits.max_new_tokens)))


def advance(rules: Rules, episode: Episode, event: Event) -> Episode:
    """The next state. ProtocolError, with nothing changed, when the event does not answer the command."""
    match episode.command, event:
        case Generate() as command, Generated():
            return _generated(rules, episode, command, event.generation)
        case CallTools() as command, Replied():
            if tuple(reply.call for reply in event.replies) != command.calls:
                raise ProtocolError(f"{len(event.replies)} replies do not match {len(command.calls)} calls")
            return _replied(rules, episode, event.replies, command.errors)
        case Score() as command, Scored():
            return msgspec.structs.replace(episode, command=_scored(episode, command.end, event.verdict))
        case command, _:
            raise ProtocolError(f"{type(event).__name__} does not answer {type(command).__name__}")


def resume(rules: Rules, sample: Sample, turns: Sequence[Turn]) -> Episode:
    """The state after recorded turns, by the same events. The last turn's replies may be missing: its tools
    are to be run. ProtocolError when the turns are not what these rules would have made of them."""
    episode = begin(rules, sample)
    for turn in turns:
        asked = episode.command
        if not isinstance(asked, Generate) or asked.ids != episode.ids + turn.context:
            raise ProtocolError(f"recorded turn {turn.index} does not continue the tokens before it")
        generation = Generation(turn.ids, turn.logprobs, turn.spans, turn.stop, turn.seconds)
        episode = advance(rules, episode, Generated(generation))
        if turn.replies and isinstance(episode.command, CallTools):
            episode = advance(rules, episode, Replied(turn.replies[: len(episode.command.calls)]))
        if turn.replies and episode.turns[-1].replies != turn.replies:
            raise ProtocolError(f"recorded replies of turn {turn.index} do not answer its calls")
    return episode


def expire(rules: Rules, episode: Episode) -> Episode:
    """The episode's time is up. What it has done is scored, as for any ending that the policy caused; an
    unfinished turn is forgotten. Without a turn there is nothing to score."""
    if not episode.turns:
        detail = "not one turn was done within rollout.episode_timeout"
        return msgspec.structs.replace(episode, command=Fail(FailReason.DEADLINE, detail))
    answer = rules.parse(rules.chat.decode(episode.turns[-1].ids)).content
    return msgspec.structs.replace(episode, command=Score(answer, EpisodeEnd.TIMEOUT))


def _generated(rules: Rules, episode: Episode, asked: Generate, generation: Generation) -> Episode:
    problem = _problem(rules, asked, generation)
    if problem:
        return msgspec.structs.replace(episode, command=Fail(FailReason.ENGINE_ERROR, problem))
    parsed = rules.parse(rules.chat.decode(generation.ids))
    turn = Turn(
        index=len(episode.turns),
        context=asked.ids[len(episode.ids) :],
        ids=generation.ids,
        logprobs=generation.logprobs,
        spans=generation.spans,
        stop=generation.stop,
        seconds=generation.seconds,
    )
    episode = msgspec.structs.replace(
        episode,
        ids=asked.ids + generation.ids,
        turns=(*episode.turns, turn),
        bad_calls=len(parsed.errors) + (0 if parsed.calls else episode.bad_calls),
    )
    end = _end(rules.limits, episode, parsed)
    if end is not None:
        return msgspec.structs.replace(episode, command=Score(parsed.content, end))
    if not parsed.calls:
        return _replied(rules, episode, (), parsed.errors)
    return msgspec.structs.replace(episode, command=CallTools(parsed.calls, parsed.errors))


def _replied(
    rules: Rules, episode: Episode, replies: tuple[ToolReply, ...], errors: tuple[str, ...]
) -> Episode:
    """Attach the replies to the turn, malformed calls last, and ask for the next turn if there is room."""
    everything = replies + tuple(_malformed(error) for error in errors)
    last = episode.turns[-1]
    episode = msgspec.structs.replace(
        episode,
        turns=(*episode.turns[:-1], msgspec.structs.replace(last, replies=everything)),
        tool_calls=episode.tool_calls + len(replies),
    )
    ids = episode.ids + rules.chat.delta_ids(everything)
    room = rules.limits.max_tokens - len(ids)
    if room < 1:
        answer = rules.parse(rules.chat.decode(last.ids)).content
        return msgspec.structs.replace(episode, command=Score(answer, EpisodeEnd.LENGTH))
    command = Generate(ids, min(room, rules.limits.max_new_tokens))
    return msgspec.structs.replace(episode, command=command)


def _end(limits: Limits, episode: Episode, parsed: Parsed) -> EpisodeEnd | None:
    """Why the episode is over after this turn, if it is. Tools of a last turn are not run: nobody would
    read their replies."""
    if episode.turns[-1].stop is StopReason.LENGTH:
        return EpisodeEnd.LENGTH
    if not parsed.calls and not parsed.errors:
        return EpisodeEnd.ANSWERED
    if episode.bad_calls >= limits.max_bad_calls:
        return EpisodeEnd.BAD_CALLS
    if len(episode.turns) >= limits.max_turns:
        return EpisodeEnd.MAX_TURNS
    return None


def _scored(episode: Episode, end: EpisodeEnd, verdict: Verdict) -> Done | Fail:
    """Turn k earns what the verdict and its tools give it; the last one, score and shaping too."""
    count = len(episode.turns)
    if verdict.turns and len(verdict.turns) != count:
        detail = f"the reward function gave {len(verdict.turns)} turn rewards to an episode of {count} turns"
        return Fail(FailReason.REWARD_ERROR, detail)
    parts = [[reply.reward for reply in turn.replies] for turn in episode.turns]
    for part, given in zip(parts, verdict.turns, strict=False):
        part.append(given)
    parts[-1] += [verdict.score, verdict.shaping]
    rewards = tuple(map(math.fsum, parts))
    return Done(math.fsum(rewards), end, rewards, verdict.components, verdict.shaping)


def _problem(rules: Rules, asked: Generate, generation: Generation) -> str:
    """What makes an engine's answer unusable, or ''. Tokens that do not line up must never be trained."""
    count = len(generation.ids)
    if generation.stop is StopReason.ABORT:
        return "the engine aborted the turn"
    if not 1 <= count <= asked.max_new_tokens:
        return f"the engine returned {count} tokens, asked for 1 to {asked.max_new_tokens}"
    if len(generation.logprobs) != count:
        return f"the engine returned {count} tokens with {len(generation.logprobs)} log-probs"
    edges = [0, *(span.end for span in generation.spans)]
    if edges[-1] != count or any(
        span.start != start or span.end <= start for span, start in zip(generation.spans, edges, strict=False)
    ):
        return f"the engine's version spans do not cover its {count} tokens"
    if generation.stop is StopReason.STOP and generation.ids[-1] not in rules.chat.stop_ids:
        return f"the engine stopped at token {generation.ids[-1]}, which is no stop id"
    return ""


def _malformed(error: str) -> ToolReply:
    return ToolReply(ToolCall("malformed_call", "{}"), f"error: {error}", error)
