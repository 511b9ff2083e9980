"""Checks and reads turns and adds up rewards, for the turn-by-turn machine (`episode.py`) and for an
agent's branches (`branches.py`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from msgspec.structs import replace

from asyncrl.conversation.commands import Done, Fail, Rules
from asyncrl.conversation.parsers import Parsed, parse_turn
from asyncrl.conversation.parsers.base import think_tags
from asyncrl.conversation.watch import text_before
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

MARKED_TEXT = re.compile(r"<(think|tool_call)>.*?(</\1>|\Z)", re.DOTALL)
NGRAM_TOKENS = 8  # model tokens; shorter n-grams repeat in ordinary prose and code
OPENING_TOKENS = 16  # tokens at the end of a prompt that can open a thought, at most


def generation_problem(stop_ids: Sequence[int], max_tokens: int, generation: Generation) -> str:
    """Return why an engine's answer is unusable, or ''. Tokens that do not line up must never be trained."""
    token_count = len(generation.ids)
    if generation.stop is StopReason.ABORT:
        return "the engine aborted the turn"
    if not 1 <= token_count <= max_tokens:
        return f"the engine returned {token_count} tokens instead of 1 to {max_tokens}"
    if len(generation.logprobs) != token_count:
        return f"the engine returned {token_count} tokens with {len(generation.logprobs)} log-probs"

    span_edges = [0, *(span.end for span in generation.spans)]
    if span_edges[-1] != token_count or any(
        span.start != expected_start or span.end <= expected_start
        for span, expected_start in zip(generation.spans, span_edges, strict=False)
    ):
        return f"the engine's version spans do not cover its {token_count} tokens"

    if generation.stop is StopReason.STOP and generation.ids[-1] not in stop_ids:
        return f"the engine stopped at the token ID {generation.ids[-1]}, which is not a stop token"

    return ""


def prompt_ending(rules: Rules, context: tuple[int, ...]) -> str:
    """Return the end of a turn's prompt, which may open a thought."""
    return rules.chat.decode(context[-OPENING_TOKENS:])


def split_thought(rules: Rules, prefill: str) -> tuple[str, str]:
    """Split the prefill of a turn into the text before an open thought, and the open thought with its tag.
    The second part is '' if the prefill leaves no thought open."""
    think = think_tags(rules.parse)
    thought_start = prefill.rfind(think.open)
    if thought_start <= prefill.rfind(think.close):
        return prefill, ""
    return prefill[:thought_start], prefill[thought_start:]


def read_turn(
    rules: Rules, turn: Turn, tools: tuple[str, ...], stops: Sequence[str] = (), prefill: str = ""
) -> Parsed:
    """Read the turn's content, calls and reasoning, up to the first of the texts `stops`. Without `tools`
    (schemas) nothing is a call. `prefill`: the model's words at the end of the prompt that the turn
    continues."""
    text = text_before(rules.chat.decode(turn.generation.ids), stops)
    prompt_end = prompt_ending(rules, turn.context)
    if split_thought(rules, prefill)[1]:
        prompt_end = think_tags(rules.parse).open

    parsed = parse_turn(rules.parse, text, tools, prompt_end)
    return replace(parsed, content=rules.chat.content(parsed.content))


def turn_message(rules: Rules, turn: Turn, parsed: Parsed, stops: Sequence[str] = ()) -> Message:
    """Make the message of a turn that was read as `parsed`. A turn with malformed calls is quoted literally.
    White space in front of a stop text stays: agents append the stop text again."""
    generation = turn.generation
    if parsed.errors:
        text = text_before(rules.chat.decode(generation.ids), stops)
        return Message("assistant", rules.chat.content(text))
    if generation.stop is StopReason.TEXT and stops and not parsed.calls:
        text = text_before(rules.chat.decode(generation.ids), stops)
        parsed = replace(parsed, content=parsed.content + text[len(text.rstrip()) :])
    return Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)


def last_words(messages: Sequence[Message], prompt: Sequence[Message] = ()) -> str:
    """Return the text that the model wrote last in a conversation, without thoughts and marked calls;
    messages of the prompt do not count."""
    later_messages = messages[len(prompt) :] if tuple(messages[: len(prompt)]) == tuple(prompt) else messages
    model_texts = (
        MARKED_TEXT.sub("", message.content).strip()
        for message in reversed(later_messages)
        if message.role == "assistant"
    )
    return next(filter(None, model_texts), "")


def count_repeated(turns: Sequence[Turn]) -> int:
    """Count the n-grams of NGRAM_TOKENS model tokens that occurred earlier in the same turn. For example, a
    turn of 100 equal tokens repeats 92 of its 93 n-grams."""
    repeated = 0
    for turn in turns:
        ids = turn.generation.ids
        ngrams = [*zip(*(ids[offset:] for offset in range(NGRAM_TOKENS)), strict=False)]
        repeated += len(ngrams) - len(set(ngrams))

    return repeated


def without_untrained(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the episode's turns without untrained turns: rows of untrained turns alone are gone; in other
    rows untrained tokens are context of the next turn. Turns and rows are numbered anew."""
    if not any(turn.untrained for turn in turns):
        return tuple(turns)

    context_by_row: dict[int, tuple[int, ...]] = {}  # by row: tokens that no trained turn has shown yet
    row_numbers: dict[int, int] = {}
    trained_turns: list[Turn] = []
    for turn in turns:
        context = context_by_row.pop(turn.row, ()) + turn.context
        if turn.untrained:
            context_by_row[turn.row] = context + turn.generation.ids
        else:
            row_number = row_numbers.setdefault(turn.row, len(row_numbers))
            trained_turns.append(replace(turn, index=len(trained_turns), row=row_number, context=context))

    return tuple(trained_turns)


def rows_of(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """Return the tokens of each row."""
    rows: dict[int, tuple[int, ...]] = {}
    for turn in turns:
        rows[turn.row] = rows.get(turn.row, ()) + turn.context + turn.generation.ids
    return [rows[row] for row in sorted(rows)]


def score_turns(turns: Sequence[Turn], end: EpisodeEnd, result: RewardResult) -> Done | Fail:
    """Add up the rewards of an episode. Each turn earns the rewards of the reward function, the turn's tools
    and the environment; the last turn also earns the score and the shaping. If the reward function rewards
    agents separately, each agent's last turn earns the agent's reward."""
    if result.turns and len(result.turns) != len(turns):
        detail = (
            f"the reward function must return a reward for each of the {len(turns)} turns, but returned "
            f"{len(result.turns)}"
        )
        return Fail(FailReason.REWARD_ERROR, detail)

    reward_parts = [
        [*(reply.reward for reply in turn.replies), turn.observation.reward if turn.observation else 0.0]
        for turn in turns
    ]
    for turn_parts, turn_reward in zip(reward_parts, result.turns, strict=False):
        turn_parts.append(turn_reward)

    turn_agents = tuple(turn.agent for turn in turns) if result.agents else ()
    if unrewarded_agents := [agent for agent in turn_agents if agent not in result.agents]:
        return Fail(
            FailReason.REWARD_ERROR,
            f"the reward is a dict with the keys {', '.join(result.agents)}, but lacks "
            f"{unrewarded_agents[0] or 'agents'!r}; return 'score', or a number for each agent in the "
            "episode (an agent's name is the `model` of the agent's requests)",
        )

    last_turns = {agent: index for index, agent in enumerate(turn_agents)} or {"": len(turns) - 1}
    for agent, index in last_turns.items():
        reward_parts[index] += [result.score, result.agents.get(agent, 0.0)]

    reward_parts[-1].append(result.shaping)
    try:
        rewards = tuple(map(math.fsum, reward_parts))
        total = math.fsum(rewards)
    except (OverflowError, ValueError):  # the numbers or their sum are infinite
        return Fail(FailReason.REWARD_ERROR, "the rewards of the episode do not add up to a finite number")

    token_counts = tuple(len(turn.generation.ids) for turn in turns)
    episode_result = EpisodeResult(
        total,
        sum(token_counts),
        rewards,
        result.components,
        result.shaping,
        end,
        turn_agents,
        token_counts if turn_agents else (),
    )

    if episode_result.problem:
        return Fail(FailReason.REWARD_ERROR, episode_result.problem)
    return Done(episode_result)
