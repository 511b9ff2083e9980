"""Drives one episode: carries out the commands of the pure machine over an engine, tools and a reward.

    command of the machine ──► engine / tools / reward ──► event ──► machine
                                      │
                                      └► records to the outbox: a turn is durable before its tools run

Whatever goes wrong in there becomes a Failed record with one line; a cancelled episode says nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from asyncrl.config import RolloutConfig
from asyncrl.engines.base import Request, Sampling
from asyncrl.errors import DeadlineError, EngineError, ProtocolError, one_line
from asyncrl.rewards import ShapingInput
from asyncrl.roles.scoring import RewardError, Scorer
from asyncrl.roles.waits import Waits
from asyncrl.rollout import episode as machine
from asyncrl.rollout.episode import Episode, Rules
from asyncrl.tools import Tool, call_tool, unknown_tool
from asyncrl.transport.messages import Assign, Attempt, Failed, Finished, Generated, Replied
from asyncrl.transport.outbox import Outbox
from asyncrl.types import EpisodeEnd, FailReason, Generation, ToolCall, ToolReply, Turn, Verdict

log = logging.getLogger("asyncrl.worker")

NO_VERSION = 1 << 62  # Generated.oldest of a turn without model tokens

_encode = msgspec.msgpack.Encoder().encode
_turn = msgspec.msgpack.Decoder(Turn).decode
_replies = msgspec.msgpack.Decoder(tuple[ToolReply, ...]).decode

_REASONS: tuple[tuple[type[Exception], FailReason], ...] = (
    (EngineError, FailReason.ENGINE_ERROR),
    (RewardError, FailReason.REWARD_ERROR),
    (DeadlineError, FailReason.DEADLINE),
    (Exception, FailReason.EPISODE_ERROR),
)


class Lane(Protocol):
    """Where an episode is sampled: an engine of this process, or a fleet of servers."""

    def episode(self) -> AbstractAsyncContextManager[None]:
        """The body is one episode."""

    async def fresh(self, oldest: Callable[[], int]) -> None:
        """Wait for weights that are not older than `oldest()`."""

    async def generate(self, request: Request) -> Generation:
        """Sample a turn. Raises EngineError."""

    def release(self, session: str) -> None:
        """The episode is over."""


@dataclass
class Job:
    """One attempt. `durable` is the ack of its newest turn; None: it was durable before."""

    assign: Assign
    lane: Lane
    started: float
    durable: asyncio.Future[None] | None = None
    episode: Episode | None = None  # its state, as far as it was posted

    @property
    def attempt(self) -> Attempt:
        return self.assign.attempt

    @property
    def session(self) -> str:
        return f"{self.attempt.uid}/{self.attempt.attempt}"


@dataclass(frozen=True)
class EpisodeRunner:
    """What all episodes of a worker share. `oldest` is the version a training turn must not be below."""

    config: RolloutConfig
    rules: Rules
    tools: Mapping[str, Tool]
    scorer: Scorer
    outbox: Outbox
    waits: Waits
    oldest: Callable[[], int]

    async def run(self, assign: Assign, frames: Sequence[bytes], lane: Lane) -> None:
        """Play an episode, or the rest of one, and post its end."""
        job = Job(assign, lane, asyncio.get_running_loop().time())
        try:
            record = await self._attempt(job, frames)
        finally:
            lane.release(job.session)
        with self.waits.named("acks: the window of unacknowledged records is full"):
            await self.outbox.post(record)

    async def _attempt(self, job: Job, frames: Sequence[bytes]) -> Finished | Failed:
        limit = asyncio.timeout(self.config.episode_timeout)
        try:
            try:
                async with limit, job.lane.episode():
                    return await self._play(job, frames)
            except TimeoutError:
                if not limit.expired() or job.episode is None:
                    raise
                return await self._expire(job, job.episode)
        except Exception as error:
            reason = next(reason for kind, reason in _REASONS if isinstance(error, kind))
            if reason is FailReason.EPISODE_ERROR:
                log.warning("episode %s failed", job.session, exc_info=error)
            return Failed(0, job.attempt, reason, one_line(error))

    async def _play(self, job: Job, frames: Sequence[bytes]) -> Finished | Failed:
        recorded = turns_of(frames)
        episode = machine.resume(self.rules, job.assign.sample, recorded)
        await self._rebuild(episode)
        if recorded and episode.turns[-1].replies != recorded[-1].replies:
            await self._post_replies(job, episode)  # those of malformed calls, which need no tool
        job.episode = episode
        while not episode.over:
            event = await self._answer(job, episode)
            before, episode = episode, machine.advance(self.rules, episode, event)
            await self._post_news(job, before, episode)
            job.episode = episode
        return self._ending(job, episode)

    async def _expire(self, job: Job, episode: Episode) -> Finished | Failed:
        """The episode's time is up: score what it has done."""
        episode = machine.expire(self.rules, episode)
        if not episode.over:
            episode = machine.advance(self.rules, episode, await self._answer(job, episode))
        return self._ending(job, episode)

    # -- commands ------------------------------------------------------------------------------------

    async def _answer(self, job: Job, episode: Episode) -> machine.Event:
        """Carry out the command the episode waits for."""
        match episode.command:
            case machine.Generate(ids=ids, max_new_tokens=limit):
                await job.lane.fresh(self.oldest)
                sampling = Sampling(limit, self.rules.chat.stop_ids, job.assign.temperature)
                request = Request(job.session, ids, sampling, job.assign.key)
                return machine.Generated(await job.lane.generate(request))
            case machine.CallTools(calls=calls):
                await self._until_durable(job)
                return machine.Replied(await self._call(calls))
            case machine.Score(answer=answer, end=end):
                extra = {
                    "num_turns": len(episode.turns),
                    "tool_calls": episode.tool_calls,
                    "end": str(end),
                    "transcript": self.rules.chat.decode(episode.ids),
                }
                with self.waits.named("the reward function"):
                    verdict = await self.scorer.score(job.assign.sample, answer, extra)
                return machine.Scored(self._shaped(job, episode, end, verdict))
            case command:
                raise ProtocolError(f"nothing answers {type(command).__name__}")

    def _shaped(self, job: Job, episode: Episode, end: EpisodeEnd, verdict: Verdict) -> Verdict:
        """Validation reports scores as they are."""
        if job.assign.lane == "eval":
            return verdict
        limits = self.rules.limits
        given = ShapingInput(
            score=verdict.score,
            tokens=episode.model_tokens,
            turns=len(episode.turns),
            end=end,
            limit=min(limits.max_tokens, limits.max_turns * limits.max_new_tokens),
        )
        return msgspec.structs.replace(verdict, shaping=self.scorer.shape(given))

    async def _until_durable(self, job: Job) -> None:
        """Tools may change the world: the turn that calls them must survive a crash first. The wait ends with
        the ack, the episode's deadline or the worker's lease."""
        if job.durable is not None:
            with self.waits.named("acks: turns that are not yet durable"):
                await job.durable

    async def _call(self, calls: tuple[ToolCall, ...]) -> tuple[ToolReply, ...]:
        """All calls of a turn, side by side; each has its own deadline and none raises."""
        with self.waits.named(f"tool {', '.join(sorted({call.name for call in calls}))}"):
            return tuple(await asyncio.gather(*(self._one(call) for call in calls)))

    async def _one(self, call: ToolCall) -> ToolReply:
        tool = self.tools.get(call.name)
        if tool is None:
            return unknown_tool(call, self.tools)
        return await call_tool(tool, call, self.config.tool_timeout)

    async def _rebuild(self, episode: Episode) -> None:
        """Redo the effects that recorded calls had on the worker that made them, where tools ask for it."""
        for reply in [reply for turn in episode.turns for reply in turn.replies]:
            tool = self.tools.get(reply.call.name)
            if tool is None or tool.replay == "pure":
                continue
            if tool.replay == "no":
                raise ProtocolError(f"tool {tool.name} cannot be repeated, so the episode starts again")
            again = await self._one(reply.call)
            if again.content != reply.content:
                raise ProtocolError(f"tool {tool.name} gave another reply when repeated")

    # -- records -------------------------------------------------------------------------------------

    async def _post_news(self, job: Job, before: Episode, now: Episode) -> None:
        """Post what an event added: a turn, replies, or both (malformed calls are answered at once)."""
        if len(now.turns) > len(before.turns):
            record, frame = generated(job.attempt, now.turns[-1])
            with self.waits.named("acks: the window of unacknowledged records is full"):
                job.durable = await self.outbox.post(record, frame)
            job.episode = now  # from here on a timeout counts the turn
            if now.turns[-1].replies:
                await self._post_replies(job, now)
        elif before.turns and now.turns[-1].replies != before.turns[-1].replies:
            await self._post_replies(job, now)

    async def _post_replies(self, job: Job, episode: Episode) -> None:
        turn = episode.turns[-1]
        with self.waits.named("acks: the window of unacknowledged records is full"):
            await self.outbox.post(Replied(0, job.attempt, turn.index), _encode(turn.replies))

    def _ending(self, job: Job, episode: Episode) -> Finished | Failed:
        if isinstance(episode.command, machine.Fail):
            return Failed(0, job.attempt, episode.command.reason, episode.command.detail)
        done = episode.command
        assert isinstance(done, machine.Done)
        return Finished(
            seq=0,
            attempt=job.attempt,
            reward=done.reward,
            end=done.end,
            turns=len(episode.turns),
            tool_calls=episode.tool_calls,
            seconds=asyncio.get_running_loop().time() - job.started,
            tool_s=episode.tool_seconds,
            text=self.rules.chat.decode(episode.ids) if job.assign.lane == "eval" else "",
            turn_rewards=done.turn_rewards,
            components=done.components,
            shaping=done.shaping,
        )


def generated(attempt: Attempt, turn: Turn) -> tuple[Generated, bytes]:
    """The record of a turn, and its frame: the turn without replies."""
    versions = [span.version for span in turn.spans]
    record = Generated(
        seq=0,
        attempt=attempt,
        turn=turn.index,
        tokens=len(turn.context) + len(turn.ids),
        model_tokens=len(turn.ids),
        oldest=min(versions, default=NO_VERSION),
        newest=max(versions, default=-1),
    )
    return record, _encode(msgspec.structs.replace(turn, replies=()))


def turns_of(frames: Sequence[bytes]) -> list[Turn]:
    """The turns of an Assign: two frames each, the turn and its replies (empty: none are recorded)."""
    try:
        return [
            msgspec.structs.replace(_turn(turn), replies=_replies(replies) if replies else ())
            for turn, replies in zip(frames[::2], frames[1::2], strict=True)
        ]
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"recorded turns cannot be read: {error}") from error
