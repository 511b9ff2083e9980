"""What every kind of episode shares, whoever leads it: tokens of its rows, rewards, a sound answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.conversation.commands import Done, Fail
from asyncrl.types import EpisodeEnd, EpisodeResult, FailReason, Generation, RewardResult, StopReason, Turn


def scored(turns: Sequence[Turn], end: EpisodeEnd, verdict: RewardResult) -> Done | Fail:
    """Turn k earns what the verdict, its tools and the environment give it; the last one, score and shaping
    too."""
    if verdict.turns and len(verdict.turns) != len(turns):
        detail = (
            f"the reward function gave {len(verdict.turns)} turn rewards to an episode of {len(turns)} turns"
        )
        return Fail(FailReason.REWARD_ERROR, detail)
    parts = [
        [*(reply.reward for reply in turn.replies), turn.observation.reward if turn.observation else 0.0]
        for turn in turns
    ]
    for part, given in zip(parts, verdict.turns, strict=False):
        part.append(given)
    parts[-1] += [verdict.score, verdict.shaping]
    try:
        rewards = tuple(map(math.fsum, parts))
        total = math.fsum(rewards)
    except (OverflowError, ValueError):  # finite numbers whose sum is not, or infinities
        total = math.nan
    if not math.isfinite(total):
        return Fail(FailReason.REWARD_ERROR, "the rewards of the episode add up to no finite number")
    tokens = sum(len(turn.ids) for turn in turns)
    return Done(EpisodeResult(total, tokens, rewards, verdict.components, verdict.shaping, end))


def rows_of(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """The tokens of each row."""
    rows: dict[int, tuple[int, ...]] = {}
    for turn in turns:
        rows[turn.row] = rows.get(turn.row, ()) + turn.context + turn.ids
    return [rows[row] for row in sorted(rows)]


def problem(stop_ids: Sequence[int], limit: int, generation: Generation) -> str:
    """What makes an engine's answer unusable, or ''. Tokens that do not line up must never be trained."""
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
