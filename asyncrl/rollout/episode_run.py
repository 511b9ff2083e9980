"""Attempts at episodes: players sample turns, post records and compute the reward through an `EpisodeRun`.

sampling.generate -> post_turn -> records.until_durable -> (tools, environment or agent)
    -> records.post_reply -> ... -> compute_reward
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from asyncrl.conversation.commands import Done, Fail
from asyncrl.conversation.turns import count_repeated, last_words, rows_of
from asyncrl.episodes.reward import transcript
from asyncrl.observe.held_out import answer_of
from asyncrl.rewards import RewardInput
from asyncrl.rollout.context import EpisodeContext, Sampler
from asyncrl.rollout.episode_clock import EpisodeClock
from asyncrl.rollout.episode_records import EpisodeRecords
from asyncrl.rollout.episode_sampling import EpisodeSampling
from asyncrl.rollout.images import EpisodeImages
from asyncrl.types import EpisodeEnd, EpisodeStats, Message, RewardResult, Sample, Turn
from asyncrl.values import shorten_to_line, without_middle
from asyncrl.wire.messages.worker import Assign, Failed, Finished

TEXT_LIMIT = 20_000  # characters of a stored transcript


class Outcome(msgspec.Struct, frozen=True):
    """The end of an episode. `stats`: figures that the turns do not contain."""

    command: Done | Fail
    turns: tuple[Turn, ...]
    stats: EpisodeStats = EpisodeStats(0)


class EpisodeRun:
    """One attempt at an episode: the clock, the sampling, the records and the reward. Several tasks of an
    event loop may sample and wait side by side; turns are posted one after another."""

    def __init__(
        self, context: EpisodeContext, assignment: Assign, sampler: Sampler, time_limit: asyncio.Timeout
    ) -> None:
        attempt = assignment.attempt
        self.context = context
        self.assignment = assignment
        self.name = f"{attempt.uid}/{attempt.attempt}"
        self.clock = EpisodeClock(time_limit, context.rules.config.episode_timeout, assignment.seconds)
        known_images = (image for message in assignment.sample.prompt for image in message.images)
        self.images = EpisodeImages(context.images, known_images)
        self.records = EpisodeRecords(attempt, context.outbox, context.waits, self.images)
        self.sampling = EpisodeSampling(
            self.name, context, assignment, sampler, self.clock, self.records, self.images
        )

        # Parts of the last record, known once the reward is computed.
        self._agent_result: object = None  # seen by the reward function
        self._last_words = ""  # the model's last message
        self._reward_notes: dict[str, str] = {}
        self._reward_seconds = 0.0

    async def post_turn(self, turn: Turn, session: int | None = None) -> None:
        """Post a turn; the replies are posted later. `session`: the row that `generate` received; None: the
        row of the turn."""
        session = turn.row if session is None else session
        await self.records.post_turn(turn, session, self.clock.seconds)
        # After posting, as the client may leave meanwhile, and ask again.
        self.sampling.finish_turn(turn, session)

    async def compute_reward(
        self,
        sample: Sample,
        turns: Sequence[Turn],
        answer: str,
        end: EpisodeEnd,
        messages: tuple[Message, ...],
        tool_calls: int,
        result: object = None,
        main_conversation: tuple[Message, ...] | None = None,
    ) -> RewardResult:
        """Return the episode's reward, shaped if the episode trains. `sample`: the sample, with the prompt
        that the model got; `tool_calls`: well-formed calls; `result`: see RewardInput. `main_conversation`:
        the conversation whose last words appear in lists; None: `messages`. RewardError."""
        rules = self.context.rules
        reward = self.context.reward
        self._agent_result = result
        self._last_words = last_words(
            messages if main_conversation is None else main_conversation, sample.prompt
        )

        reward_input = RewardInput(
            sample=sample,
            answer=answer,
            messages=messages,
            turns=len(turns),
            tool_calls=tool_calls,
            end=end,
            transcript=transcript(rules, turns),
            result=result,
            image_token=rules.chat.image_token,
        )
        started_at = time.monotonic()
        with self.context.waits.wait_named("the reward function", reward.deadline):
            reward_result = await reward.score_episode(reward_input)

        self._reward_seconds = time.monotonic() - started_at
        self._reward_notes = reward_result.notes
        if self.assignment.lane == "eval":  # validation reports unshaped scores
            return reward_result
        return reward.add_shaping(rules, reward_result, turns, end)

    def final_record(self, outcome: Outcome) -> Finished | Failed:
        """Return the last record of the episode."""
        command = outcome.command
        if isinstance(command, Fail):
            return Failed(0, self.assignment.attempt, command.reason, command.detail)

        rows = rows_of(outcome.turns)
        replies = [reply for turn in outcome.turns for reply in turn.replies]
        text = ""
        if self.assignment.transcript:
            text = without_middle(
                transcript(self.context.rules, outcome.turns),
                head=TEXT_LIMIT // 2,
                tail=TEXT_LIMIT // 2,
                note="\n[… {} characters …]\n",
            )

        return Finished(
            seq=0,
            attempt=self.assignment.attempt,
            result=command.result,
            stats=msgspec.structs.replace(
                outcome.stats,
                turns=len(outcome.turns),
                rows=len(rows),
                longest_row=max(map(len, rows)),
                prompt=len(outcome.turns[0].context),
                seconds=self.clock.seconds,
                reward_s=self._reward_seconds,
                answered=len(replies),
                failed=sum(reply.failed for reply in replies),
                refused=sum(reply.refused for reply in replies),
                declined=sum(reply.declined for reply in replies),
                repeated=count_repeated(outcome.turns),
            ),
            text=text,
            notes=self._reward_notes if self.assignment.transcript else {},
            answer=shorten_to_line(answer_of(command.result, self._reward_notes) or self._last_words),
        )

    def result_frame(self, record: Finished | Failed) -> tuple[bytes, ...]:
        """Return the frames of the last record: the agent's result, if any, for `asyncrl regrade`."""
        has_result = isinstance(record, Finished) and self._agent_result is not None
        return (msgspec.json.encode(self._agent_result),) if has_result else ()
