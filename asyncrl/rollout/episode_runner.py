"""Runs attempts at episodes, each within its deadline.

    Assign -> EpisodeRun -> TurnPlayer (tools, environment) or AgentPlayer -> Finished | Failed

Every error becomes a Failed record with one line; a cancelled episode posts nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from asyncrl.rollout.context import EpisodeContext, EpisodeRun, Outcome, Sampler
from asyncrl.tools import ToolError
from asyncrl.types import FailReason, Turn
from asyncrl.wire.messages.worker import Assign, Failed, Finished

log = logging.getLogger("asyncrl.worker")


class EnvironmentFailed(AsyncrlError):
    """The environment raised, or ran out of time."""


_REASONS: tuple[tuple[type[Exception], FailReason], ...] = (
    (NoEngineError, FailReason.ENGINE_LOST),
    (EngineError, FailReason.ENGINE_ERROR),
    (RewardError, FailReason.REWARD_ERROR),
    (SetupError, FailReason.SETUP_FAILED),
    (ToolError, FailReason.TOOL_ERROR),
    (EnvironmentFailed, FailReason.ENVIRONMENT_ERROR),
    (AgentError, FailReason.AGENT_ERROR),
    (Exception, FailReason.EPISODE_ERROR),
)


class Player(Protocol):
    """Plays one attempt. Used by one task."""

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        """Play to the end, continuing after recorded turns. ProtocolError: they cannot be continued."""

    async def expire(self) -> Outcome:
        """`play` was cancelled because the time is up: score the finished turns."""

    async def close(self) -> None:
        """Close what was opened; called once, however the attempt ended. Bounded in time; never raises."""


@dataclass(frozen=True)
class EpisodeRunner:
    context: EpisodeContext
    make_player: Callable[[EpisodeRun], Player]

    async def run(self, assign: Assign, frames: Sequence[bytes], sampler: Sampler) -> None:
        """Play an episode, or the rest of one, and post its end."""
        limit = asyncio.timeout(self.context.rules.config.episode_timeout)
        run = EpisodeRun(self.context, assign, sampler, asyncio.get_running_loop().time(), limit)
        player = self.make_player(run)
        try:
            try:
                record = await self._attempt(run, player, frames)
            finally:
                run.release()
            durable = await run.post(record, *run.result_frame(record))
            if not (isinstance(record, Failed) and record.reason in RESUMABLE):
                durable.add_done_callback(run.forget)
        finally:
            await asyncio.shield(asyncio.ensure_future(player.close()))

    async def _attempt(self, run: EpisodeRun, player: Player, frames: Sequence[bytes]) -> Finished | Failed:
        try:
            try:
                async with run.limit, run.sampler.episode():
                    count = len(frames) - run.assign.parts
                    run.recall(frames[count:])
                    if run.assign.parts and not count:
                        run.caught_up()
                    with users_code():
                        return run.final_record(await player.play(turns_of(frames[:count])))
            except TimeoutError:
                if not run.limit.expired():
                    raise
                with users_code():
                    return run.final_record(await player.expire())
        except Exception as error:
            reason = next(reason for kind, reason in _REASONS if isinstance(error, kind))
            if isinstance(error, RewardError):
                reason = error.reason
            if frames and isinstance(error, ProtocolError):
                reason = FailReason.NOT_REPEATED
            if reason is FailReason.EPISODE_ERROR:
                log.warning("episode %s failed", run.name, exc_info=error)
            return Failed(0, run.attempt, reason, describe(error))
