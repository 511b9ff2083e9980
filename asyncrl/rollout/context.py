"""Attempts at episodes: what both players use to sample a turn, post records and compute the reward.

generate -> post_turn -> until_durable -> (tools, environment or agent) -> post_reply -> ... -> reward

A turn that lasts is posted in parts, too; `generate` goes on after those that are durable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from asyncrl.buffer.payloads import TurnPart, decode_part
from asyncrl.conversation.commands import Done, Fail, Rules
from asyncrl.conversation.turns import last_words, rows_of
from asyncrl.engines.base import (
    NOTHING,
    Request,
    Sampling,
    Watch,
    concat,
    ignore_part,
    remaining_request,
    suffix_after,
    with_part,
)
from asyncrl.episodes.reward import EpisodeReward, shaped, transcript
from asyncrl.observe.held_out import answer_of
from asyncrl.rewards import RewardInput
from asyncrl.rollout.samplers import LocalSampler
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import Waits
from asyncrl.tools.snapshots import Snapshots
from asyncrl.types import (
    EpisodeEnd,
    EpisodeStats,
    Generation,
    Message,
    RewardResult,
    StopReason,
    Turn,
    TurnReply,
)
from asyncrl.values import in_short
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Finished, Generated, Record, Replied, Sampled
from asyncrl.wire.outbox import Outbox

log = logging.getLogger("asyncrl.worker")

_ROW_KEY = 0x9E3779B97F4A7C15  # odd: rows of one episode never draw the same random numbers
TEXT_LIMIT = 20_000  # characters of a transcript that is kept
_KEYS = (1 << 63) - 1

_encode = msgspec.msgpack.Encoder().encode


Sampler = LocalSampler | ServerPool
"""The source of an episode's turns: an engine of this process, or a pool of servers."""


@dataclass
class EpisodeContext:
    """The parts that all episodes of a worker share. `oldest`: the version a training turn needs at least.
    `reader`: the scorer that reads the turns of episodes of a data source, and names the `top` likeliest
    tokens at each place."""

    rules: Rules
    reward: EpisodeReward
    outbox: Outbox
    waits: Waits
    oldest: Callable[[], int]
    snapshots: Snapshots | None = None
    reader: Callable[[str], Sampler | None] = lambda source: None
    top: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """An episode that is over. `stats`: what its turns do not tell."""

    command: Done | Fail
    turns: tuple[Turn, ...]
    stats: EpisodeStats = EpisodeStats(0)


@dataclass
class EpisodeRun:
    """Holds an attempt. One task uses it, but several may call `generate`."""

    context: EpisodeContext
    assign: Assign
    sampler: Sampler
    started: float  # as `_now`; moved back by what earlier attempts took
    limit: asyncio.Timeout  # of the episode's time
    _durable: asyncio.Future[None] | None = None  # the ack of the newest turn; None: it was durable before
    _sessions: set[str] = field(default_factory=set)
    # By row: which turn of it is under way (TurnPart.prompt), and what is durable of that.
    _open: dict[int, tuple[bytes, Generation]] = field(default_factory=dict)
    _routed: dict[int, int] = field(default_factory=dict)  # tokens of a row whose routes are known
    _notes: dict[str, str] = field(default_factory=dict)  # of the reward
    _result: object = None  # that it saw
    _reward_s: float = 0.0
    _paused: int = 0  # rows that wait for an engine that sleeps, or for a scorer without a server
    _still: float | None = None  # when its clock was stopped for them
    _stood: float = 0.0  # seconds, all together
    _said: str = ""  # the model's last words

    @property
    def attempt(self) -> Attempt:
        return self.assign.attempt

    @property
    def name(self) -> str:
        return f"{self.attempt.uid}/{self.attempt.attempt}"

    async def generate(
        self,
        ids: tuple[int, ...],
        max_new_tokens: int,
        row: int = 0,
        watch: Watch | None = None,
        trains: bool = True,
        agent: str = "",
        taught: tuple[int, ...] = (),
    ) -> Generation:
        """Sample a turn after `ids`, the whole prefix, or the rest of it. Rows may be sampled side by side.
        `trains`: it is made durable in parts if it lasts, and scorers read it when it is whole, after
        `taught` if that is another prefix. `agent`: who asked for it."""
        session = f"{self.name}#{row}" if row else self.name
        self._sessions.add(session)
        stop_ids = self.context.rules.chat.stop_ids
        sampling = Sampling(max_new_tokens, stop_ids, self.assign.temperature)
        key = (self.assign.key ^ (row * _ROW_KEY)) & _KEYS
        routed = None if self.assign.lane == "eval" else self._routed.get(row, 0)
        prompt = hashlib.blake2b(_encode((ids, max_new_tokens)), digest_size=16).digest()
        on_part = partial(self._post_part, row, prompt) if trains else ignore_part
        seconds = self.context.rules.config.part_seconds
        request = Request(session, ids, sampling, key, watch, routed, agent, seconds, on_part)
        durable = self._durable_part(row, prompt)
        with self.sampler.sleeps.during(asleep=self.paused):
            sampled = await self.sampler.generate(remaining_request(request, durable), self._oldest)
            whole = with_part(request, durable, sampled)
            return await self._read(session, taught or ids, whole) if trains else whole

    async def _read(self, session: str, prefix: tuple[int, ...], sampled: Generation) -> Generation:
        """Add what scorers make of the turn."""
        ids = prefix + sampled.ids
        count = len(sampled.ids)
        reader = self.reader
        if reader is None or not count:
            return sampled
        scores = await reader.read(session, ids, count, self.context.top, self.paused)
        return msgspec.structs.replace(sampled, scores=scores)

    def recall(self, frames: Sequence[bytes]) -> None:
        """Take over the parts of turns that no earlier attempt has ended."""
        for part in map(decode_part, frames):
            durable = self._durable_part(part.session, part.prompt)
            self._open[part.session] = part.prompt, concat(durable, part.sampled)

    def _durable_part(self, row: int, prompt: bytes) -> Generation:
        known, durable = self._open.get(row, (b"", NOTHING))
        return durable if known == prompt else NOTHING

    async def _post_part(self, row: int, prompt: bytes, sampled: Generation) -> None:
        """Post what is new of a turn under way. Where a server has taken back tokens that are durable already
        (ForeignWeights), nothing more is."""
        durable = self._durable_part(row, prompt)
        count = len(durable.ids)
        goes_on = sampled.stop is StopReason.ABORT and sampled.ids[:count] == durable.ids
        if goes_on and len(sampled.ids) > count:
            frame = _encode(TurnPart(row, prompt, count, suffix_after(durable, sampled)))
            await self.post(Sampled(0, self.attempt, self.seconds), frame)
            self._open[row] = prompt, sampled

    def _oldest(self) -> int:
        """The version that a turn which begins now must not be below: the buffer counts on what the episode
        was started on, also when a server comes back with older weights."""
        return max(self.assign.oldest, self.context.oldest())

    @property
    def reader(self) -> Sampler | None:
        """The scorer of its turns; none in validation, where nothing trains, or greedily."""
        idle = self.assign.lane == "eval" or not self.assign.temperature
        return None if idle else self.context.reader(self.assign.sample.data_source)

    @property
    def seconds(self) -> float:
        """Seconds that the episode has taken, earlier attempts included, waits for scorers and sleeping
        engines not."""
        return self._now() - self.started

    @property
    def seconds_left(self) -> float:
        return (self.limit.when() or math.inf) - asyncio.get_running_loop().time()

    def caught_up(self) -> None:
        """The recorded turns have been repeated, which costs the episode nothing: what is left of its time
        begins now."""
        self.started = self._now() - self.assign.seconds
        self._set_limit()

    def _set_limit(self) -> None:
        ends = self.started + self.context.rules.config.episode_timeout + self._stood
        with suppress(RuntimeError):  # it is over
            self.limit.reschedule(ends if self._still is None else None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The body waits for an engine that sleeps, or for a scorer without a server: the episode's clock
        stands still. Rows that are sampled side by side may be in it together."""
        if not self._paused:
            self._still = self._now()
            self._set_limit()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused and self._still is not None:
                self._stood = asyncio.get_running_loop().time() - self._still
                self._still = None  # last: agents' threads read `seconds`
                self._set_limit()

    def _now(self) -> float:
        """Return the loop's time less the seconds for which the episode's clock stood still."""
        still = self._still
        return asyncio.get_running_loop().time() - self._stood if still is None else still

    def release(self) -> None:
        """The engines may forget the episode."""
        for session in self._sessions | {self.name}:
            self.sampler.release(session)
            if self.reader is not None:
                self.reader.release(session)

    def forget(self, ended: asyncio.Future[None]) -> None:
        """The episode's end is durable: nothing goes on from its snapshots."""
        snapshots = self.context.snapshots
        episode = self.attempt.uid
        if snapshots is not None and not ended.cancelled() and snapshots.kept(episode):
            forget = partial(snapshots.forget, episode)
            asyncio.get_running_loop().run_in_executor(None, forget)

    async def post_turn(self, turn: Turn, session: int | None = None) -> None:
        """Post a turn; its replies are posted later. The row's next one needs no routes of its tokens.
        `session`: the row that `generate` was told; None: that of the turn."""
        session = turn.row if session is None else session
        self._durable = await self.post(*generated(self.attempt, turn, self.seconds, session))
        self._open.pop(session, None)  # not before: its client may leave meanwhile, and ask again
        if turn.routes is not None:
            self._routed[session] = turn.routes.end

    async def until_durable(self) -> None:
        """Wait until the newest turn would survive a crash, as its receiver may have side effects. The wait
        ends with the ack, the episode's deadline or the worker's lease."""
        if self._durable is not None and not self._durable.done():
            with self.context.waits.named("acks: turns that are not yet durable"):
                await asyncio.shield(self._durable)

    async def post_reply(self, turn: Turn) -> None:
        """Post what answered a turn: the replies of tools, the observation."""
        await self.post(
            Replied(0, self.attempt, turn.index), _encode(TurnReply(turn.replies, turn.observation))
        )

    async def post(self, record: Record, *frames: bytes) -> asyncio.Future[None]:
        """Hand a record to the outbox once its window has room. The future is done when it is durable."""
        outbox = self.context.outbox
        wait = "acks: the window of unacknowledged records is full"
        with self.context.waits.named(wait) if outbox.full else nullcontext():
            return await outbox.post(record, *frames)

    async def reward(
        self,
        turns: Sequence[Turn],
        answer: str,
        end: EpisodeEnd,
        messages: tuple[Message, ...],
        tool_calls: int,
        result: object = None,
        main: tuple[Message, ...] | None = None,
    ) -> RewardResult:
        """Return the episode's reward, shaped if it trains. `tool_calls`: well-formed ones; `result`: see
        RewardInput. `main`: the conversation whose last words lists show; None: `messages`. RewardError."""
        self._result = result
        self._said = last_words(messages if main is None else main, self.assign.sample.prompt)
        reward_input = RewardInput(
            sample=self.assign.sample,
            answer=answer,
            messages=messages,
            turns=len(turns),
            tool_calls=tool_calls,
            end=end,
            transcript=transcript(self.context.rules, turns),
            result=result,
        )
        began = time.monotonic()
        with self.context.waits.named("the reward function", self.context.reward.deadline):
            earned = await self.context.reward.score(reward_input)
        self._reward_s = time.monotonic() - began
        self._notes = earned.notes
        if self.assign.lane == "eval":  # validation reports scores as they are
            return earned
        return shaped(self.context.rules, self.context.reward, earned, turns, end)

    def final_record(self, outcome: Outcome) -> Finished | Failed:
        """The last record."""
        command = outcome.command
        if isinstance(command, Fail):
            return Failed(0, self.attempt, command.reason, command.detail)
        rows = rows_of(outcome.turns)
        replies = [reply for turn in outcome.turns for reply in turn.replies]
        return Finished(
            seq=0,
            attempt=self.attempt,
            result=command.result,
            stats=msgspec.structs.replace(
                outcome.stats,
                turns=len(outcome.turns),
                rows=len(rows),
                longest_row=max(map(len, rows)),
                prompt=len(outcome.turns[0].context),
                seconds=self.seconds,
                reward_s=self._reward_s,
                answered=len(replies),
                failed=sum(reply.failed for reply in replies),
                refused=sum(reply.refused for reply in replies),
                declined=sum(reply.declined for reply in replies),
            ),
            text=_cut(transcript(self.context.rules, outcome.turns)) if self.assign.transcript else "",
            notes=self._notes if self.assign.transcript else {},
            answer=in_short(answer_of(command.result, self._notes) or self._said),
        )

    def result_frame(self, record: Record) -> tuple[bytes, ...]:
        """Return the frame of the last record: the result, where there is one, for `asyncrl regrade`."""
        found = isinstance(record, Finished) and self._result is not None
        return (msgspec.json.encode(self._result),) if found else ()


def _cut(text: str) -> str:
    """Beginning and end of a transcript that is too long to keep."""
    over = len(text) - TEXT_LIMIT
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n[… {over} characters …]\n{text[-half:]}" if over > 0 else text


def generated(
    attempt: Attempt, turn: Turn, seconds: float = 0.0, session: int = 0
) -> tuple[Generated, bytes]:
    """The record of a turn, `seconds` after the episode began, and its frame, the turn without replies."""
    frame = _encode(msgspec.structs.replace(turn, replies=(), observation=None))
    return Generated(0, attempt, turn.index, seconds, session), frame
