"""One attempt at one episode, as all ways to lead it share it: sample a turn, make it durable, reward, end.

Generated(turn) ──► durable ──► tools, environment, agent ──► Replied ──► … ──► Finished | Failed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from asyncrl.config import RolloutConfig
from asyncrl.conversation.commands import Done, Fail, Rules
from asyncrl.conversation.turns import rows_of
from asyncrl.engines.base import Request, Sampling
from asyncrl.errors import ProtocolError
from asyncrl.rewards import RewardInput, ShapingInput
from asyncrl.rollout.scoring import Scorer
from asyncrl.runtime.waits import Waits
from asyncrl.types import EpisodeEnd, EpisodeStats, Generation, Message, RewardResult, Turn, TurnReply
from asyncrl.wire.messages import Assign, Attempt, Failed, Finished, Generated, Replied
from asyncrl.wire.outbox import Outbox

NO_VERSION = 1 << 62  # Generated.oldest of a turn without model tokens
_ROW_KEY = 0x9E3779B97F4A7C15  # odd: rows of one episode never draw the same random numbers
_KEYS = (1 << 63) - 1

_encode = msgspec.msgpack.Encoder().encode
_turn = msgspec.msgpack.Decoder(Turn).decode
_heard = msgspec.msgpack.Decoder(TurnReply).decode


class Sampler(Protocol):
    """Where an episode is sampled: an engine of this process, or a fleet of servers."""

    def episode(self) -> AbstractAsyncContextManager[None]:
        """The body is one episode."""

    async def fresh(self, oldest: Callable[[], int]) -> None:
        """Wait for weights that are not older than `oldest()`."""

    async def generate(self, request: Request) -> Generation:
        """Sample a turn. Raises EngineError."""

    def release(self, session: str) -> None:
        """The episode is over."""


@dataclass(frozen=True)
class EpisodeContext:
    """What all episodes of a worker share. `oldest` is the version a training turn must not be below."""

    config: RolloutConfig
    rules: Rules
    scorer: Scorer
    outbox: Outbox
    waits: Waits
    oldest: Callable[[], int]


class Ended(msgspec.Struct, frozen=True):
    """An episode that is over. `tool_s`: seconds in tools and the environment."""

    command: Done | Fail
    turns: tuple[Turn, ...]
    tool_calls: int = 0
    tool_s: float = 0.0


@dataclass
class EpisodeRun:
    """One attempt. It is used by one task, but for `generate`."""

    desk: EpisodeContext
    assign: Assign
    lane: Sampler
    started: float
    _durable: asyncio.Future[None] | None = None  # the ack of the newest turn; None: it was durable before
    _sessions: set[str] = field(default_factory=set)

    @property
    def attempt(self) -> Attempt:
        return self.assign.attempt

    @property
    def name(self) -> str:
        return f"{self.attempt.uid}/{self.attempt.attempt}"

    async def generate(self, ids: tuple[int, ...], max_new_tokens: int, row: int = 0) -> Generation:
        """Sample a turn after `ids`, the whole prefix. Rows may be sampled side by side."""
        session = f"{self.name}#{row}" if row else self.name
        self._sessions.add(session)
        await self.lane.fresh(self.desk.oldest)
        sampling = Sampling(max_new_tokens, self.desk.rules.chat.stop_ids, self.assign.temperature)
        key = (self.assign.key ^ (row * _ROW_KEY)) & _KEYS
        return await self.lane.generate(Request(session, ids, sampling, key))

    def release(self) -> None:
        """The engines may forget the episode."""
        for session in self._sessions | {self.name}:
            self.lane.release(session)

    async def keep(self, turn: Turn) -> None:
        """Post a turn. What it is answered with is posted later."""
        with self.desk.waits.named("acks: the window of unacknowledged records is full"):
            self._durable = await self.desk.outbox.post(*generated(self.attempt, turn))

    async def until_durable(self) -> None:
        """Whoever hears the newest turn may change the world: it must survive a crash first. The wait ends
        with the ack, the episode's deadline or the worker's lease."""
        if self._durable is not None:
            with self.desk.waits.named("acks: turns that are not yet durable"):
                await asyncio.shield(self._durable)

    async def heard(self, turn: Turn) -> None:
        """Post what a turn was answered with."""
        frame = _encode(TurnReply(turn.replies, turn.observation))
        with self.desk.waits.named("acks: the window of unacknowledged records is full"):
            await self.desk.outbox.post(Replied(0, self.attempt, turn.index), frame)

    async def verdict(
        self,
        turns: Sequence[Turn],
        answer: str,
        end: EpisodeEnd,
        messages: tuple[Message, ...],
        tool_calls: int,
        result: object = None,
    ) -> RewardResult:
        """The reward of the episode, shaped if it trains. `tool_calls`: well-formed ones; `result`: what an
        agent program returned, a JSON value. Raises RewardError."""
        given = RewardInput(
            sample=self.assign.sample,
            answer=answer,
            messages=messages,
            turns=len(turns),
            tool_calls=tool_calls,
            end=end,
            transcript=self.transcript(turns),
            result=result,
        )
        with self.desk.waits.named("the reward function"):
            verdict = await self.desk.scorer.score(given)
        if self.assign.lane == "eval":  # validation reports scores as they are
            return verdict
        rollout = self.desk.config
        shaping = ShapingInput(
            score=verdict.score,
            tokens=sum(len(turn.ids) for turn in turns),
            turns=len(turns),
            end=end,
            limit=min(rollout.rows * rollout.max_tokens, rollout.max_turns * rollout.max_new_tokens),
        )
        return msgspec.structs.replace(verdict, shaping=self.desk.scorer.shape(shaping))

    def transcript(self, turns: Sequence[Turn]) -> str:
        """The rows as the model read and wrote them."""
        decode = self.desk.rules.chat.decode
        texts = [decode(ids) for ids in rows_of(turns)]
        if len(texts) < 2:
            return "".join(texts)
        return "\n".join(f"=== row {number} ===\n{text}" for number, text in enumerate(texts))

    def ending(self, ended: Ended) -> Finished | Failed:
        """The last record."""
        command = ended.command
        if isinstance(command, Fail):
            return Failed(0, self.attempt, command.reason, command.detail)
        rows = rows_of(ended.turns)
        return Finished(
            seq=0,
            attempt=self.attempt,
            result=command.result,
            stats=EpisodeStats(
                turns=len(ended.turns),
                tool_calls=ended.tool_calls,
                rows=len(rows),
                longest_row=max(map(len, rows)),
                seconds=asyncio.get_running_loop().time() - self.started,
                tool_s=ended.tool_s,
            ),
            text=self.transcript(ended.turns) if self.assign.lane == "eval" else "",
        )


def generated(attempt: Attempt, turn: Turn) -> tuple[Generated, bytes]:
    """The record of a turn, and its frame: the turn without what it was answered with."""
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
    return record, _encode(msgspec.structs.replace(turn, replies=(), observation=None))


def turns_of(frames: Sequence[bytes]) -> list[Turn]:
    """The turns of an Assign: two frames each, the turn and what it was answered with (empty: nothing is
    recorded)."""
    try:
        return [_answered(_turn(turn), heard) for turn, heard in zip(frames[::2], frames[1::2], strict=True)]
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"recorded turns cannot be read: {error}") from error


def _answered(turn: Turn, frame: bytes) -> Turn:
    heard = _heard(frame) if frame else TurnReply()
    return msgspec.structs.replace(turn, replies=heard.replies, observation=heard.observation)
