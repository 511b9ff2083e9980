"""Runs attempts at episodes, each within its deadline, whoever leads them.

    Assign ──► Job ──► Player (the machine over tools and an environment, or an agent) ──► Finished | Failed

Whatever goes wrong in there becomes a Failed record with one line; a cancelled episode says nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import AsyncrlError, DeadlineError, EngineError, one_line
from asyncrl.rollout.context import Ended, EpisodeContext, EpisodeRun, Sampler, turns_of
from asyncrl.rollout.scoring import RewardError
from asyncrl.tools import ToolError
from asyncrl.types import FailReason, Turn
from asyncrl.wire.messages import Assign, Failed, Finished

log = logging.getLogger("asyncrl.worker")


class WorldError(AsyncrlError):
    """The environment raised, or ran out of time."""


class AgentError(AsyncrlError):
    """The agent program failed."""


_REASONS: tuple[tuple[type[Exception], FailReason], ...] = (
    (EngineError, FailReason.ENGINE_ERROR),
    (RewardError, FailReason.REWARD_ERROR),
    (ToolError, FailReason.TOOL_ERROR),
    (WorldError, FailReason.ENVIRONMENT_ERROR),
    (AgentError, FailReason.AGENT_ERROR),
    (DeadlineError, FailReason.DEADLINE),
    (Exception, FailReason.EPISODE_ERROR),
)


class Player(Protocol):
    """Leads one attempt. Used by one task."""

    async def play(self, recorded: Sequence[Turn]) -> Ended:
        """To the end, going on after recorded turns. ProtocolError: they cannot be gone on from."""

    async def expire(self) -> Ended:
        """`play` was cancelled because the time is up: score what was done."""

    async def close(self) -> None:
        """However it ended. Bounded in time, and never raises."""


@dataclass(frozen=True)
class EpisodeRunner:
    """`lead` makes the player of an attempt."""

    desk: EpisodeContext
    lead: Callable[[EpisodeRun], Player]

    async def run(self, assign: Assign, frames: Sequence[bytes], lane: Sampler) -> None:
        """Play an episode, or the rest of one, and post its end."""
        job = EpisodeRun(self.desk, assign, lane, asyncio.get_running_loop().time())
        player = self.lead(job)
        try:
            try:
                record = await self._attempt(job, player, frames)
            finally:
                job.release()
            with self.desk.waits.named("acks: the window of unacknowledged records is full"):
                await self.desk.outbox.post(record)
        finally:
            await asyncio.shield(asyncio.ensure_future(player.close()))

    async def _attempt(self, job: EpisodeRun, player: Player, frames: Sequence[bytes]) -> Finished | Failed:
        limit = asyncio.timeout(self.desk.config.episode_timeout)
        try:
            try:
                async with limit, job.lane.episode():
                    return job.ending(await player.play(turns_of(frames)))
            except TimeoutError:
                if not limit.expired():
                    raise
                return job.ending(await player.expire())
        except Exception as error:
            reason = next(reason for kind, reason in _REASONS if isinstance(error, kind))
            if reason is FailReason.EPISODE_ERROR:
                log.warning("episode %s failed", job.name, exc_info=error)
            return Failed(0, job.attempt, reason, one_line(error))
