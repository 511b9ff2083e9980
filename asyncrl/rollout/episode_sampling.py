"""Samples the turns of an episode.

A long turn becomes durable in parts. Sampling continues after the durable part when the same turn is sampled
again: for a request that an agent's client repeats, and in a later attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from asyncrl.buffer.payloads import TurnPart, decode_part
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
from asyncrl.rollout.context import EpisodeContext, Sampler
from asyncrl.rollout.episode_clock import EpisodeClock
from asyncrl.rollout.episode_records import EpisodeRecords
from asyncrl.rollout.images import EpisodeImages
from asyncrl.types import Generation, StopReason, Turn
from asyncrl.vision.image_ids import has_image_ids
from asyncrl.wire.messages.worker import Assign

ROW_KEY_STEP = 0x9E3779B97F4A7C15  # odd, so that rows of an episode never draw the same random numbers
KEY_MASK = (1 << 63) - 1  # random keys are non-negative 64-bit integers

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class EpisodeSampling:
    """Samples and scores the turns of one attempt. Several tasks may call `generate`, for different rows.
    `name`: the session of row 0 in the engines; the sessions of further rows begin with `name`."""

    name: str
    context: EpisodeContext
    assignment: Assign
    sampler: Sampler
    clock: EpisodeClock
    records: EpisodeRecords
    images: EpisodeImages
    _sessions: set[str] = field(default_factory=set)
    # By row: the unfinished turn (TurnPart.prompt), and the durable part of that turn.
    _open_turns: dict[int, tuple[bytes, Generation]] = field(default_factory=dict)
    _routed_tokens: dict[int, int] = field(default_factory=dict)  # tokens with known routes, by row

    @property
    def scorer(self) -> Sampler | None:
        """Return the scorer of the episode's turns; None in validation, where nothing trains, and for greedy
        episodes."""
        reads_nothing = self.assignment.lane == "eval" or not self.assignment.temperature
        return None if reads_nothing else self.context.scorer_of(self.assignment.sample.data_source)

    async def generate(
        self,
        ids: tuple[int, ...],
        max_new_tokens: int,
        row: int = 0,
        stop_check: StopCheck | None = None,
        is_trained: bool = True,
        agent: str = "",
        teacher_prefix: tuple[int, ...] = (),
    ) -> Generation:
        """Sample a turn after `ids`, the whole prefix, or the remainder of a turn. Rows may be sampled side
        by side; an agent's row gets its final number, `Turn.row`, only with its first turn. `is_trained`: a
        long turn is made durable in parts, and scorers read the finished turn, after `teacher_prefix` if
        given. `agent`: the name of the agent that sent the request. EngineError; LostImageError if an image
        of `ids` is lost."""
        assignment = self.assignment
        rules = self.context.rules
        prompt_digest = hashlib.blake2b(_encode((ids, max_new_tokens)), digest_size=16).digest()

        async def post_part(sampled: Generation) -> None:
            # A server may have taken back tokens that are already durable (ForeignWeights): post nothing.
            durable_part = self._durable_part(row, prompt_digest)
            durable_tokens = len(durable_part.ids)
            is_unfinished = sampled.stop is StopReason.ABORT
            extends_durable = sampled.ids[:durable_tokens] == durable_part.ids
            if is_unfinished and extends_durable and len(sampled.ids) > durable_tokens:
                part = TurnPart(row, prompt_digest, durable_tokens, suffix_after(durable_part, sampled))
                await self.records.post_part(part, self.clock.seconds)
                self._open_turns[row] = prompt_digest, sampled

        session = f"{self.name}#{row}" if row else self.name
        self._sessions.add(session)
        request = Request(
            session,
            ids,
            Sampling(max_new_tokens, rules.chat.stop_ids, assignment.temperature),
            key=(assignment.key ^ (row * ROW_KEY_STEP)) & KEY_MASK,
            stop_check=stop_check,
            routes_from=None if assignment.lane == "eval" else self._routed_tokens.get(row, 0),
            agent=agent,
            part_seconds=rules.config.part_seconds,
            on_part=post_part if is_trained else ignore_part,
            images=await self.images.files_of(ids) if has_image_ids(ids) else {},
        )

        durable_part = self._durable_part(row, prompt_digest)
        with self.sampler.sleeps.during(asleep=self.clock.paused):
            remaining = await self.sampler.generate(
                remaining_request(request, durable_part),
                # The buffer relies on the version of the episode's start, also when a server comes back with
                # older weights.
                lambda: max(assignment.min_version, self.context.min_version()),
            )
            generation = with_part(request, durable_part, remaining)

            scorer = self.scorer if is_trained else None
            if scorer is None or not generation.ids:
                return generation
            scored_ids = (teacher_prefix or ids) + generation.ids
            scores = await scorer.read(
                session,
                scored_ids,
                len(generation.ids),
                self.context.top_tokens,
                self.clock.paused,
                await self.images.files_of(scored_ids) if has_image_ids(scored_ids) else {},
            )
            return msgspec.structs.replace(generation, scores=scores)

    def recall_parts(self, frames: Sequence[bytes]) -> None:
        """Take over the parts of turns that no earlier attempt has finished."""
        for part in map(decode_part, frames):
            durable_part = self._durable_part(part.session, part.prompt)
            self._open_turns[part.session] = part.prompt, concat(durable_part, part.sampled)

    def finish_turn(self, turn: Turn, session: int) -> None:
        """Forget the parts of a turn that was posted. The next turn of the row needs no routes for the tokens
        of this turn."""
        self._open_turns.pop(session, None)
        if turn.generation.routes is not None:
            self._routed_tokens[session] = turn.generation.routes.end

    def release_sessions(self) -> None:
        """Let the engines forget the episode."""
        for session in self._sessions | {self.name}:
            self.sampler.release(session)
            if self.scorer is not None:
                self.scorer.release(session)

    def _durable_part(self, row: int, prompt_digest: bytes) -> Generation:
        open_prompt, durable_part = self._open_turns.get(row, (b"", NOTHING))
        return durable_part if open_prompt == prompt_digest else NOTHING
