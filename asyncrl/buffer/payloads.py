"""Decodes and checks the payloads of turns, and cuts back episodes whose payloads are lost.

Payloads are checked when they arrive, before the acknowledgement. When payloads are read again, the store
compares their digests, as a power cut or a bad sector may have destroyed some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.errors import UNDECODABLE, ProtocolError
from asyncrl.types import (
    MAX_VOCABULARY,
    DropReason,
    EpisodeResult,
    EpisodeStats,
    Generation,
    Turn,
    TurnReply,
)
from asyncrl.vision.image_ids import FIRST_IMAGE_ID, find_whole_runs, largest_token_id


class TurnPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a turn that is still being sampled: the tokens after the first `start` tokens of the turn.

    `session`: the number that `EpisodeSampling.generate` got as `row`; an agent's row gets its final number
    only with its first turn. `prompt` identifies the turn within the row. Parts are of no use once the turn
    is complete.
    """

    session: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    prompt: Annotated[bytes, msgspec.Meta(max_length=64)]
    start: int
    sampled: Generation


_turn_decoder = msgspec.msgpack.Decoder(Turn)
_part_decoder = msgspec.msgpack.Decoder(TurnPart)
_reply_decoder = msgspec.msgpack.Decoder(TurnReply)
MAX_TOP_TOKENS = 256  # most likely tokens that a scorer returns at each position
MAX_LOGPROB = 0.01  # highest log-prob of a token, as engines may round up


def decode_turn(payload: bytes) -> Turn:
    """Decode a turn. ProtocolError if the payload is no turn."""
    with ProtocolError.instead_of(*UNDECODABLE, text="a turn cannot be decoded"):
        return _turn_decoder.decode(payload)


def decode_part(payload: bytes) -> TurnPart:
    """Decode a part of a turn. ProtocolError if the payload is no part."""
    with ProtocolError.instead_of(*UNDECODABLE, text="a partial turn cannot be decoded"):
        return _part_decoder.decode(payload)


def decode_reply(payload: bytes) -> TurnReply:
    """Decode the replies to a turn. ProtocolError if the payload has no replies."""
    with ProtocolError.instead_of(*UNDECODABLE, text="the replies to a turn cannot be decoded"):
        return _reply_decoder.decode(payload)


def check_result(payload: bytes) -> None:
    """Check the result of an episode. ProtocolError if the payload is no JSON value."""
    with ProtocolError.instead_of(*UNDECODABLE, text="the result of an episode cannot be decoded"):
        msgspec.json.decode(payload)


def check_turn(uid: str, turn: Turn, rows: int, vocabulary: int = MAX_VOCABULARY) -> None:
    """Check a decoded turn. ProtocolError if the turn cannot be trained.

    Every token must be in the vocabulary or belong to an image, every model token needs a log-prob, a version
    and a token before it, and the turn's sequence must be one of the `rows` earlier sequences, or the next
    new one.
    """
    generation = turn.generation
    subject = f"episode {uid}, turn {turn.index}"
    _check_sampled(subject, generation, vocabulary)

    for prompt_ids in (turn.context, turn.taught):
        largest_id = largest_token_id(prompt_ids)
        if largest_id >= vocabulary:
            raise ProtocolError(f"{subject}: {largest_id} is not a valid token ID")
        with ProtocolError.instead_of(ValueError, text=subject):
            find_whole_runs(prompt_ids)

    routes = generation.routes
    if routes is not None and (
        min(routes.start, routes.tokens - 1) < 0 or not routes.data or len(routes.data) % (2 * routes.tokens)
    ):
        raise ProtocolError(
            f"{subject}: invalid routes ({routes.tokens} tokens from position {routes.start}, "
            f"{len(routes.data)} bytes); every token needs the same even number of bytes"
        )

    if (scores := generation.scores) is not None:
        byte_counts = (len(scores.logprobs), len(scores.ids), len(scores.top))
        logprob_bytes = 4 * len(generation.ids)
        sizes_match = (
            byte_counts[0] == logprob_bytes
            and byte_counts[1] == byte_counts[2]
            and not (logprob_bytes and byte_counts[1] % logprob_bytes)
        )
        if not sizes_match or byte_counts[1] > MAX_TOP_TOKENS * logprob_bytes:
            raise ProtocolError(
                f"{subject}: the sizes of the scores, {byte_counts} bytes, do not match a turn with "
                f"{len(generation.ids)} tokens"
            )
        if (lowest_id := np.frombuffer(scores.ids, "<i4").min(initial=0)) < 0:
            raise ProtocolError(f"{subject}: the scores contain {lowest_id}, which is not a valid token ID")

    if not 0 <= turn.row <= rows:
        raise ProtocolError(f"{subject}: expected a row from 0 to {rows}, got row {turn.row}")
    if turn.row == rows and generation.ids and not turn.context:
        raise ProtocolError(f"{subject}: row {turn.row} must not start with a token that the model sampled")


def check_part(uid: str, part: TurnPart, vocabulary: int = MAX_VOCABULARY) -> None:
    """Check a decoded part like a turn, as another attempt may go on after the part.

    ProtocolError if the part is not valid. Routes come with the complete turn alone.
    """
    subject = f"episode {uid}, partial turn from token {part.start}"
    _check_sampled(subject, part.sampled, vocabulary)
    check_logprobs(subject, part.sampled)

    if part.sampled.routes is not None:
        raise ProtocolError(f"{subject}: only complete turns may have routes")


def _check_sampled(subject: str, sampled: Generation, vocabulary: int) -> None:
    span_ends = [0, *(span.end for span in sampled.spans)]
    span_starts = [span.start for span in sampled.spans]
    contiguous = (
        span_starts == span_ends[:-1]
        and span_ends == sorted(set(span_ends))
        and span_ends[-1] == len(sampled.ids)
    )

    if len(sampled.ids) != len(sampled.logprobs) or not contiguous:
        raise ProtocolError(
            f"{subject}: got {len(sampled.ids)} tokens with {len(sampled.logprobs)} log-probs "
            f"and spans {[(span.start, span.end) for span in sampled.spans]}"
        )

    if sampled.ids and max(sampled.ids) >= min(vocabulary, FIRST_IMAGE_ID):
        raise ProtocolError(f"{subject}: {max(sampled.ids)} is not a valid token ID")
    if any(span.version < 0 for span in sampled.spans):
        raise ProtocolError(
            f"{subject}: versions must not be negative: {[span.version for span in sampled.spans]}"
        )


def check_logprobs(subject: str, sampled: Generation) -> None:
    """Check that log-probs are finite and of probabilities up to 1. ProtocolError if not.

    The trainer does not call this: tokens whose ratio is not finite are left out there.
    """
    logprobs = sampled.logprobs
    if logprobs and not (math.isfinite(sum(logprobs)) and max(logprobs) <= MAX_LOGPROB):
        raise ProtocolError(f"{subject}: every log-prob must be a finite number not above 0")


def add_turn(episode: EpisodeRecord, turn: Turn, seconds: float = 0.0) -> None:
    """Count a turn that became durable `seconds` after the episode began."""
    model_tokens = len(turn.generation.ids)
    versions = [span.version for span in turn.generation.spans]
    episode.add_turn(
        tokens=len(turn.context) + model_tokens,
        model_tokens=model_tokens,
        oldest=min(versions, default=0),
        newest=max(versions, default=0),
        seconds=seconds,
        row=turn.row,
        untrained=turn.untrained,
        agent=turn.agent,
    )


def cut_back(buffer: ReplayBuffer, episode: EpisodeRecord, readable_turns: Sequence[Turn]) -> None:
    """Cut an untaken episode back to the turns that can be read, from which a new attempt goes on.

    A ready episode is dropped as corrupt, as its result is part of its group's baseline.
    """
    if episode.state is State.READY:
        buffer.drop_episode(episode, DropReason.CORRUPT)
        return

    sampled_before = episode.sampled
    episode.forget_turns()
    for turn in readable_turns:
        add_turn(episode, turn)
    buffer.abandoned_tokens += sampled_before - episode.sampled

    episode.result = EpisodeResult(0.0)
    episode.stats = EpisodeStats(0)

    # The episode may have landed after the deadline of an unsettled group.
    group = buffer.live_groups[episode.group]
    group.baseline = tuple(member for member in group.baseline if member != episode.member)

    episode.attempt += 1
    episode.worker = ""
    buffer.mark_changed(episode)
    buffer.set_state(episode, State.PENDING)
