"""Runs attempts at episodes, each within its deadline.

    Assign -> EpisodeRun -> TurnPlayer (tools, environment) or AgentPlayer -> Finished | Failed

Every error becomes a Failed record with one line; a cancelled episode posts nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from asyncrl.buffer.records import RESUMABLE
from asyncrl.episodes.recorded import turns_of
from asyncrl.errors import (
    AsyncrlError,
    EngineError,
    NoEngineError,
    ProtocolError,
    SetupError,
    describe,
    users_code,
)
from asyncrl.gateway import AgentError
from asyncrl.rewards import RewardError
from asyncrl.rollout.context import EpisodeContext, Sampler
from asyncrl.rollout.episode_run import EpisodeRun, Outcome
from asyncrl.rollout.images import LostImageError
from asyncrl.tools import ToolError
from asyncrl.types import FailReason, Turn
from asyncrl.wire.messages.worker import Assign, Failed, Finished

log = logging.getLogger("asyncrl.worker")


class EnvironmentFailed(AsyncrlError):
    """The environment raised an error, or ran out of time."""


FAIL_REASONS: tuple[tuple[type[Exception], FailReason], ...] = (
    (NoEngineError, FailReason.ENGINE_LOST),
    (EngineError, FailReason.ENGINE_ERROR),
    (RewardError, FailReason.REWARD_ERROR),
    (SetupError, FailReason.SETUP_FAILED),
    (ToolError, FailReason.TOOL_ERROR),
    (EnvironmentFailed, FailReason.ENVIRONMENT_ERROR),
    (AgentError, FailReason.AGENT_ERROR),
    (LostImageError, FailReason.IMAGE_LOST),
    (Exception, FailReason.EPISODE_ERROR),
)


class Player(Protocol):
    """Plays an attempt. Used by a single task."""

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        """Play to the end, continuing after recorded turns. ProtocolError: the recorded turns cannot be
        continued."""

    async def expire(self) -> Outcome:
        """Score the finished turns after `play` was cancelled because the time was up."""

    async def close(self) -> None:
        """Close everything that was opened; called once, however the attempt ended. Bounded in time; never
        raises."""


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays each assigned attempt, and posts its last record."""

    context: EpisodeContext
    make_player: Callable[[EpisodeRun], Player]

    async def run(self, assignment: Assign, frames: Sequence[bytes], sampler: Sampler) -> None:
        """Play an episode, or continue an earlier attempt, and post the end."""
        time_limit = asyncio.timeout(self.context.rules.config.episode_timeout)
        episode_run = EpisodeRun(self.context, assignment, sampler, time_limit)
        player = self.make_player(episode_run)
        try:
            try:
                final_record = await self._play_attempt(episode_run, player, frames)
            finally:
                episode_run.sampling.release_sessions()

            result_frame = episode_run.result_frame(final_record)
            record_durable = await episode_run.records.post_record(final_record, *result_frame)
            may_continue = isinstance(final_record, Failed) and final_record.reason in RESUMABLE
            if not may_continue:
                record_durable.add_done_callback(partial(self._forget_snapshots, assignment.attempt.uid))
        finally:
            await asyncio.shield(asyncio.ensure_future(player.close()))

    def _forget_snapshots(self, episode: str, end_durable: asyncio.Future[None]) -> None:
        """Delete the snapshots of an episode whose end is durable: no attempt will continue from them."""
        snapshots = self.context.snapshots
        if snapshots is not None and not end_durable.cancelled() and snapshots.may_have_snapshots(episode):
            forget_call = partial(snapshots.forget_episode, episode)
            asyncio.get_running_loop().run_in_executor(None, forget_call)

    async def _play_attempt(
        self, episode_run: EpisodeRun, player: Player, frames: Sequence[bytes]
    ) -> Finished | Failed:
        assignment = episode_run.assignment
        time_limit = episode_run.clock.time_limit
        try:
            try:
                async with time_limit, episode_run.sampling.sampler.episode():
                    turn_frames = len(frames) - assignment.parts
                    episode_run.sampling.recall_parts(frames[turn_frames:])
                    if assignment.parts and not turn_frames:
                        episode_run.clock.restart()
                    recorded_turns = turns_of(frames[:turn_frames])
                    episode_run.images.recall_turns(recorded_turns)
                    with users_code():
                        return episode_run.final_record(await player.play(recorded_turns))
            except TimeoutError:
                if not time_limit.expired():
                    raise
                with users_code():
                    return episode_run.final_record(await player.expire())
        except Exception as error:
            fail_reason = next(reason for kind, reason in FAIL_REASONS if isinstance(error, kind))
            if isinstance(error, RewardError):
                fail_reason = error.reason
            if frames and isinstance(error, ProtocolError):
                fail_reason = FailReason.NOT_REPEATED
            if fail_reason is FailReason.EPISODE_ERROR:
                log.warning("episode %s failed", episode_run.name, exc_info=error)
            return Failed(0, assignment.attempt, fail_reason, describe(error))
