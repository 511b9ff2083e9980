"""Recorded episodes scored again, perhaps by another reward than the one they were trained with.

The conversation is made of the recorded turns and their replies. What was not recorded is not there: what an
agent program or an environment said before the first turn, and what an agent program returned.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.conversation.commands import Done, Opened, Rules
from asyncrl.conversation.episode import Episode, begin, conversation
from asyncrl.conversation.turns import read_turn, scored
from asyncrl.rewards import RewardError, RewardInput
from asyncrl.rollout.context import shaped, transcript
from asyncrl.rollout.scoring import Scorer
from asyncrl.tools import Toolbox
from asyncrl.types import EpisodeEnd, EpisodeResult, Sample, Turn


async def regrade(
    rules: Rules, toolbox: Toolbox, scorer: Scorer, sample: Sample, turns: Sequence[Turn], end: EpisodeEnd
) -> EpisodeResult:
    """What an episode of these turns, which ended so, earns. Raises RewardError."""
    earned = await scorer.score(recorded(rules, toolbox, sample, turns, end))
    ended = scored(turns, end, shaped(rules, scorer, earned, turns, end))
    if not isinstance(ended, Done):
        raise RewardError(ended.detail)
    return ended.result


def recorded(
    rules: Rules, toolbox: Toolbox, sample: Sample, turns: Sequence[Turn], end: EpisodeEnd
) -> RewardInput:
    """An episode of these turns, which ended so, as its reward sees it."""
    schemas = () if rules.config.agent else toolbox.schemas(sample)
    episode = Episode(sample, begin(sample).command, Opened(schemas), turns=tuple(turns))
    return RewardInput(
        sample=sample,
        answer=read_turn(rules, turns[-1], schemas).content,
        messages=conversation(rules, episode),
        turns=len(turns),
        tool_calls=sum(not reply.refused for turn in turns for reply in turn.replies),
        end=end,
        transcript=transcript(rules, turns),
    )
