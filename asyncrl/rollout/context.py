"""Attempts at episodes: both players sample turns, post records and compute the reward here.

generate -> post_turn -> until_durable -> (tools, environment or agent) -> post_reply -> ... -> reward

A long turn is also posted in parts; `generate` continues after the durable parts.
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
    StopCheck,
    concat,
    ignore_part,
    remaining_request,
    suffix_after,
    with_part,
)
from asyncrl.episodes.reward import EpisodeReward, shaped_reward, transcript
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
from asyncrl.values import shorten_to_line
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Finished, Generated, Record, Replied, Sampled
from asyncrl.wire.outbox import Outbox

log = logging.getLogger("asyncrl.worker")

ROW_KEY_STEP = 0x9E3779B97F4A7C15  # odd, so that rows of an episode never draw the same random numbers
TEXT_LIMIT = 20_000  # characters of a stored transcript
KEY_MASK = (1 << 63) - 1  # random keys are non-negative 64-bit integers

_encode = msgspec.msgpack.Encoder().encode


Sampler = LocalSampler | ServerPool
"""The source of an episode's turns: an engine of this process, or a pool of servers."""


@dataclass
class EpisodeContext:
    """Holds the parts that all episodes of a worker share. `min_version`: the oldest version that may sample
    a training turn. `scorer_of`: the scorer for the turns of a data source, which also names the `top_tokens`
    likeliest tokens at each position."""

    rules: Rules
    reward: EpisodeReward
    outbox: Outbox
    waits: Waits
    min_version: Callable[[], int]
    snapshots: Snapshots | None = None
    scorer_of: Callable[[str], Sampler | None] = lambda source: None
    top_tokens: int = 0


class PausableClock:
    """The event loop's time, less the seconds for which the clock was paused."""

    def __init__(self) -> None:
        self.paused_at: float | None = None  # time of this clock while paused
        self.paused_seconds = 0.0

    def now(self) -> float:
        paused_at = self.paused_at
        if paused_at is not None:
            return paused_at
        return asyncio.get_running_loop().time() - self.paused_seconds

    def pause(self) -> None:
        self.paused_at = self.now()

    def resume(self) -> None:
        if self.paused_at is not None:
            self.paused_seconds = asyncio.get_running_loop().time() - self.paused_at
            self.paused_at = None  # last, because agents' threads read the clock


class Outcome(msgspec.Struct, frozen=True):
    """The end of an episode. `stats`: figures that the turns do not contain."""

    command: Done | Fail
    turns: tuple[Turn, ...]
    stats: EpisodeStats = EpisodeStats(0)


@dataclass
class EpisodeRun:
    """One attempt at an episode: samples turns and posts records. A single task uses a run, but several tasks
    may call `generate`."""

    context: EpisodeContext
    assignment: Assign
    sampler: Sampler
    started_at: float  # time of the clock; moved back by the duration of earlier attempts
    time_limit: asyncio.Timeout
    _newest_turn_durable: asyncio.Future[None] | None = None  # None: durable from the start
    _sessions: set[str] = field(default_factory=set)
    # By row: the unfinished turn (TurnPart.prompt), and the durable part of that turn.
    _open_turns: dict[int, tuple[bytes, Generation]] = field(default_factory=dict)
    _routed_tokens: dict[int, int] = field(default_factory=dict)  # tokens with known routes, by row
    _reward_notes: dict[str, str] = field(default_factory=dict)
    _agent_result: object = None  # seen by the reward function
    _reward_seconds: float = 0.0
    _paused_rows: int = 0  # rows that wait for a sleeping engine, or for a scorer without a server
    _clock: PausableClock = field(default_factory=PausableClock)
    _last_words: str = ""  # the model's last message

    @property
    def attempt(self) -> Attempt:
        return self.assignment.attempt

    @property
    def name(self) -> str:
        return f"{self.attempt.uid}/{self.attempt.attempt}"

    async def generate(
        self,
        ids: tuple[int, ...],
        max_new_tokens: int,
        row: int = 0,
        watch: StopCheck | None = None,
        is_trained: bool = True,
        agent: str = "",
        teacher_prefix: tuple[int, ...] = (),
    ) -> Generation:
        """Sample a turn after `ids`, the whole prefix, or the remainder of a turn. Rows may be sampled side
        by side. `is_trained`: a long turn is made durable in parts, and scorers read the finished turn, after
        `teacher_prefix` if given. `agent`: the name of the agent that sent the request."""
        session = f"{self.name}#{row}" if row else self.name
        self._sessions.add(session)
        stop_ids = self.context.rules.chat.stop_ids
        sampling = Sampling(max_new_tokens, stop_ids, self.assignment.temperature)
        row_key = (self.assignment.key ^ (row * ROW_KEY_STEP)) & KEY_MASK
        routed_tokens = None if self.assignment.lane == "eval" else self._routed_tokens.get(row, 0)

        prompt_digest = hashlib.blake2b(_encode((ids, max_new_tokens)), digest_size=16).digest()
        on_part = partial(self._post_part, row, prompt_digest) if is_trained else ignore_part
        part_seconds = self.context.rules.config.part_seconds
        request = Request(session, ids, sampling, row_key, watch, routed_tokens, agent, part_seconds, on_part)

        durable_part = self._durable_part(row, prompt_digest)
        with self.sampler.sleeps.during(asleep=self.paused):
            remaining = await self.sampler.generate(
                remaining_request(request, durable_part), self._min_version
            )
            generation = with_part(request, durable_part, remaining)
            if not is_trained:
                return generation
            return await self._with_scores(session, teacher_prefix or ids, generation)

    async def _with_scores(self, session: str, prefix: tuple[int, ...], generation: Generation) -> Generation:
        """Return the generation with the scores of the scorer, if there is a scorer."""
        ids = prefix + generation.ids
        token_count = len(generation.ids)
        scorer = self.scorer
        if scorer is None or not token_count:
            return generation
        scores = await scorer.read(session, ids, token_count, self.context.top_tokens, self.paused)
        return msgspec.structs.replace(generation, scores=scores)

    def recall_parts(self, frames: Sequence[bytes]) -> None:
        """Take over the parts of turns that no earlier attempt has finished."""
        for part in map(decode_part, frames):
            durable_part = self._durable_part(part.session, part.prompt)
            self._open_turns[part.session] = part.prompt, concat(durable_part, part.sampled)

    def _durable_part(self, row: int, prompt_digest: bytes) -> Generation:
        open_prompt, durable_part = self._open_turns.get(row, (b"", NOTHING))
        return durable_part if open_prompt == prompt_digest else NOTHING

    async def _post_part(self, row: int, prompt_digest: bytes, sampled: Generation) -> None:
        """Post the new tokens of an unfinished turn. Nothing is posted after a server has taken back tokens
        that are already durable (ForeignWeights)."""
        durable_part = self._durable_part(row, prompt_digest)
        durable_tokens = len(durable_part.ids)
        is_unfinished = sampled.stop is StopReason.ABORT
        extends_durable = sampled.ids[:durable_tokens] == durable_part.ids
        if is_unfinished and extends_durable and len(sampled.ids) > durable_tokens:
            frame = _encode(TurnPart(row, prompt_digest, durable_tokens, suffix_after(durable_part, sampled)))
            await self.post_record(Sampled(0, self.attempt, self.seconds), frame)
            self._open_turns[row] = prompt_digest, sampled

    def _min_version(self) -> int:
        """Return the oldest version that may sample a turn from now on: the buffer relies on the version of
        the episode's start, also when a server comes back with older weights."""
        return max(self.assignment.min_version, self.context.min_version())

    @property
    def scorer(self) -> Sampler | None:
        """Return the scorer of the episode's turns; None in validation, where nothing trains, and for greedy
        episodes."""
        reads_nothing = self.assignment.lane == "eval" or not self.assignment.temperature
        return None if reads_nothing else self.context.scorer_of(self.assignment.sample.data_source)

    @property
    def seconds(self) -> float:
        """Return the seconds that the episode has taken, including earlier attempts, without waits for
        scorers and sleeping engines."""
        return self._clock.now() - self.started_at

    @property
    def seconds_left(self) -> float:
        return (self.time_limit.when() or math.inf) - asyncio.get_running_loop().time()

    def restart_clock(self) -> None:
        """Restart the clock after the recorded turns have been repeated: repeating costs the episode no
        time."""
        self.started_at = self._clock.now() - self.assignment.seconds
        self._reschedule_limit()

    def _reschedule_limit(self) -> None:
        episode_timeout = self.context.rules.config.episode_timeout
        deadline = self.started_at + episode_timeout + self._clock.paused_seconds
        with suppress(RuntimeError):  # the episode is over
            self.time_limit.reschedule(deadline if self._clock.paused_at is None else None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the episode's clock while the body waits for a sleeping engine, or for a scorer without a
        server. The waits of rows that are sampled side by side may overlap."""
        if not self._paused_rows:
            self._clock.pause()
            self._reschedule_limit()

        self._paused_rows += 1
        try:
            yield
        finally:
            self._paused_rows -= 1
            if not self._paused_rows:
                self._clock.resume()
                self._reschedule_limit()

    def release_sessions(self) -> None:
        """Let the engines forget the episode."""
        for session in self._sessions | {self.name}:
            self.sampler.release(session)
            if self.scorer is not None:
                self.scorer.release(session)

    def forget_snapshots(self, end_durable: asyncio.Future[None]) -> None:
        """Delete the snapshots once the end of the episode is durable: no attempt will continue from them."""
        snapshots = self.context.snapshots
        episode = self.attempt.uid
        if snapshots is not None and not end_durable.cancelled() and snapshots.may_have_snapshots(episode):
            forget_call = partial(snapshots.forget_episode, episode)
            asyncio.get_running_loop().run_in_executor(None, forget_call)

    async def post_turn(self, turn: Turn, session: int | None = None) -> None:
        """Post a turn; the replies are posted later. The next turn of the row needs no routes for the tokens
        of this turn. `session`: the row that `generate` received; None: the row of the turn."""
        session = turn.row if session is None else session
        record, frame = generated(self.attempt, turn, self.seconds, session)
        self._newest_turn_durable = await self.post_record(record, frame)
        self._open_turns.pop(session, None)  # after posting, as the client may leave meanwhile, and ask again
        if turn.generation.routes is not None:
            self._routed_tokens[session] = turn.generation.routes.end

    async def until_durable(self) -> None:
        """Wait until the newest turn would survive a crash, because the receiver may cause side effects. The
        wait ends with the ack, the episode's deadline or the worker's lease."""
        if self._newest_turn_durable is not None and not self._newest_turn_durable.done():
            with self.context.waits.wait_named("acks: turns that are not yet durable"):
                await asyncio.shield(self._newest_turn_durable)

    async def post_reply(self, turn: Turn) -> None:
        """Post the replies to a turn: tool replies and the observation."""
        frame = _encode(TurnReply(turn.replies, turn.observation))
        await self.post_record(Replied(0, self.attempt, turn.index), frame)

    async def post_record(self, record: Record, *frames: bytes) -> asyncio.Future[None]:
        """Hand a record to the outbox once the window has room. The future is done when the record is
        durable."""
        outbox = self.context.outbox
        wait_name = "acks: the window of unacknowledged records is full"
        with self.context.waits.wait_named(wait_name) if outbox.is_full else nullcontext():
            return await outbox.post_record(record, *frames)

    async def compute_reward(
        self,
        turns: Sequence[Turn],
        answer: str,
        end: EpisodeEnd,
        messages: tuple[Message, ...],
        tool_calls: int,
        result: object = None,
        main_conversation: tuple[Message, ...] | None = None,
    ) -> RewardResult:
        """Return the episode's reward, shaped if the episode trains. `tool_calls`: well-formed calls;
        `result`: see RewardInput. `main_conversation`: the conversation whose last words appear in lists;
        None: `messages`. RewardError."""
        self._agent_result = result
        self._last_words = last_words(
            messages if main_conversation is None else main_conversation, self.assignment.sample.prompt
        )
        reward_input = RewardInput(
            sample=self.assignment.sample,
            answer=answer,
            messages=messages,
            turns=len(turns),
            tool_calls=tool_calls,
            end=end,
            transcript=transcript(self.context.rules, turns),
            result=result,
        )
        started_at = time.monotonic()
        with self.context.waits.wait_named("the reward function", self.context.reward.deadline):
            reward_result = await self.context.reward.score_episode(reward_input)
        self._reward_seconds = time.monotonic() - started_at
        self._reward_notes = reward_result.notes
        if self.assignment.lane == "eval":  # validation reports unshaped scores
            return reward_result

        return shaped_reward(self.context.rules, self.context.reward, reward_result, turns, end)

    def final_record(self, outcome: Outcome) -> Finished | Failed:
        """Return the last record of the episode."""
        command = outcome.command
        if isinstance(command, Fail):
            return Failed(0, self.attempt, command.reason, command.detail)

        rows = rows_of(outcome.turns)
        replies = [reply for turn in outcome.turns for reply in turn.replies]
        text = ""
        if self.assignment.transcript:
            text = _without_middle(transcript(self.context.rules, outcome.turns))

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
                reward_s=self._reward_seconds,
                answered=len(replies),
                failed=sum(reply.failed for reply in replies),
                refused=sum(reply.refused for reply in replies),
                declined=sum(reply.declined for reply in replies),
            ),
            text=text,
            notes=self._reward_notes if self.assignment.transcript else {},
            answer=shorten_to_line(answer_of(command.result, self._reward_notes) or self._last_words),
        )

    def result_frame(self, record: Record) -> tuple[bytes, ...]:
        """Return the frames of the last record: the agent's result, if any, for `asyncrl regrade`."""
        has_result = isinstance(record, Finished) and self._agent_result is not None
        return (msgspec.json.encode(self._agent_result),) if has_result else ()


def _without_middle(text: str) -> str:
    """Return the beginning and the end of a transcript that is too long to keep."""
    excess = len(text) - TEXT_LIMIT
    kept_length = TEXT_LIMIT // 2
    return f"{text[:kept_length]}\n[… {excess} characters …]\n{text[-kept_length:]}" if excess > 0 else text


def generated(
    attempt: Attempt, turn: Turn, seconds: float = 0.0, session: int = 0
) -> tuple[Generated, bytes]:
    """Return the record of a turn, `seconds` after the episode began, and the frame: the turn without
    replies."""
    frame = _encode(msgspec.structs.replace(turn, replies=(), observation=None))
    return Generated(0, attempt, turn.index, seconds, session), frame
