"""Checks, builds and reads a turn and adds up its rewards, for the turn-by-turn machine (`episode.py`) and an
agent's branches (`branches.py`) alike."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from msgspec.structs import replace

from asyncrl.conversation.commands import Done, Fail, Rules
from asyncrl.conversation.parsers import Parsed, parse_turn
from asyncrl.conversation.parsers.base import think_tags
from asyncrl.conversation.watch import before
from asyncrl.types import (
    EpisodeEnd,
    EpisodeResult,
    FailReason,
    Generation,
    Message,
    RewardResult,
    StopReason,
    Turn,
)

MARKED = re.compile(r"<(think|tool_call)>.*?(</\1>|\Z)", re.DOTALL)
OPENING = 16  # tokens at the end of a prompt, at most, that can open a thought


def problem(stop_ids: Sequence[int], limit: int, generation: Generation) -> str:
    """Say what makes an engine's answer unusable, or ''. Tokens that do not line up must never be trained."""
    count = len(generation.ids)
    if generation.stop is StopReason.ABORT:
        return "the engine aborted the turn"
    if not 1 <= count <= limit:
        return f"the engine returned {count} tokens, asked for 1 to {limit}"
    if len(generation.logprobs) != count:
        return f"the engine returned {count} tokens with {len(generation.logprobs)} log-probs"
    edges = [0, *(span.end for span in generation.spans)]
    if edges[-1] != count or any(
        span.start != start or span.end <= start for span, start in zip(generation.spans, edges, strict=False)
    ):
        return f"the engine's version spans do not cover its {count} tokens"
    if generation.stop is StopReason.STOP and generation.ids[-1] not in stop_ids:
        return f"the engine stopped at token {generation.ids[-1]}, which is no stop id"
    return ""


def make_turn(
    index: int,
    row: int,
    context: tuple[int, ...],
    generation: Generation,
    agent: str = "",
    untrained: bool = False,
) -> Turn:
    """The turn of a generation; nothing answers it yet."""
    sampled = (generation.ids, generation.logprobs, generation.spans, generation.stop)
    made = Turn(index, context, *sampled, seconds=generation.seconds, row=row)
    return replace(made, agent=agent, untrained=untrained, routes=generation.routes, scores=generation.scores)


def opening(rules: Rules, context: tuple[int, ...]) -> str:
    """The end of a turn's prompt, which may open a thought."""
    return rules.chat.decode(context[-OPENING:])


def split_thought(rules: Rules, prefill: str) -> tuple[str, str]:
    """Split words of the model that its turn goes on with into the text before a thought that they leave
    open, and that thought with its tag. The second part is '' if they leave none open."""
    think = think_tags(rules.parse)
    start = prefill.rfind(think.open)
    if start <= prefill.rfind(think.close):
        return prefill, ""
    return prefill[:start], prefill[start:]


def read_turn(
    rules: Rules, turn: Turn, tools: tuple[str, ...], stops: Sequence[str] = (), prefill: str = ""
) -> Parsed:
    """The turn's content, calls and reasoning, up to the first of the texts `stops`. Without `tools`
    (schemas) nothing is a call. `prefill`: the model's words in the prompt that the turn goes on with."""
    text = before(rules.chat.decode(turn.ids), stops)
    prompt = opening(rules, turn.context)
    if split_thought(rules, prefill)[1]:
        prompt = think_tags(rules.parse).open
    parsed = parse_turn(rules.parse, text, tools, prompt)
    return replace(parsed, content=rules.chat.content(parsed.content))


def turn_message(rules: Rules, turn: Turn, parsed: Parsed, stops: Sequence[str] = ()) -> Message:
    """The message of a turn that was read as `parsed`. A turn with malformed calls is quoted as it is.
    White space in front of a text of `stops` stays: agents put the text behind it again."""
    if parsed.errors:
        return Message("assistant", rules.chat.content(before(rules.chat.decode(turn.ids), stops)))
    if turn.stop is StopReason.TEXT and stops and not parsed.calls:
        text = before(rules.chat.decode(turn.ids), stops)
        parsed = replace(parsed, content=parsed.content + text[len(text.rstrip()) :])
    return Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)


def last_words(messages: Sequence[Message], prompt: Sequence[Message] = ()) -> str:
    """The text that the model wrote last in a conversation, without thoughts and marked calls; what the
    prompt has of it does not count."""
    own = messages[len(prompt) :] if tuple(messages[: len(prompt)]) == tuple(prompt) else messages
    texts = (MARKED.sub("", one.content).strip() for one in reversed(own) if one.role == "assistant")
    return next(filter(None, texts), "")


def trained(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The episode without what is not trained: rows of such turns alone are gone, in the others their tokens
    are context of the next turn. Turns and rows are numbered anew."""
    if not any(turn.untrained for turn in turns):
        return tuple(turns)
    shown: dict[int, tuple[int, ...]] = {}  # of a row: tokens that no trained turn has shown yet
    numbers: dict[int, int] = {}
    found: list[Turn] = []
    for turn in turns:
        context = shown.pop(turn.row, ()) + turn.context
        if turn.untrained:
            shown[turn.row] = context + turn.ids
        else:
            row = numbers.setdefault(turn.row, len(numbers))
            found.append(replace(turn, index=len(found), row=row, context=context))
    return tuple(found)


def rows_of(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """Return the tokens of each row."""
    rows: dict[int, tuple[int, ...]] = {}
    for turn in turns:
        rows[turn.row] = rows.get(turn.row, ()) + turn.context + turn.ids
    return [rows[row] for row in sorted(rows)]


def scored(turns: Sequence[Turn], end: EpisodeEnd, result: RewardResult) -> Done | Fail:
    """Turn k earns what the reward function, its tools and the environment give it; the last turn also earns
    the score and the shaping. Where agents earn rewards of their own, each one's last turn earns its own."""
    if result.turns and len(result.turns) != len(turns):
        detail = (
            f"the reward function gave {len(result.turns)} turn rewards to an episode of {len(turns)} turns"
        )
        return Fail(FailReason.REWARD_ERROR, detail)
    parts = [
        [*(reply.reward for reply in turn.replies), turn.observation.reward if turn.observation else 0.0]
        for turn in turns
    ]
    for part, given in zip(parts, result.turns, strict=False):
        part.append(given)
    agents = tuple(turn.agent for turn in turns) if result.agents else ()
    if poor := [agent for agent in agents if agent not in result.agents]:
        return Fail(
            FailReason.REWARD_ERROR,
            f"the reward is a dict of {', '.join(result.agents)}, and not of {poor[0] or 'agents'!r}: give "
            "'score', or a number for each agent of the episode (the `model` of its requests)",
        )
    last = {agent: index for index, agent in enumerate(agents)} or {"": len(turns) - 1}
    for agent, index in last.items():
        parts[index] += [result.score, result.agents.get(agent, 0.0)]
    parts[-1].append(result.shaping)
    try:
        rewards = tuple(map(math.fsum, parts))
        total = math.fsum(rewards)
    except (OverflowError, ValueError):  # finite numbers whose sum is not, or infinities
        return Fail(FailReason.REWARD_ERROR, "the rewards of the episode add up to no finite number")
    tokens = tuple(len(turn.ids) for turn in turns)
    earned = EpisodeResult(
        total, sum(tokens), rewards, result.components, result.shaping, end, agents, tokens if agents else ()
    )
    return Fail(FailReason.REWARD_ERROR, earned.problem) if earned.problem else Done(earned)
