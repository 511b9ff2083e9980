"""The payloads of turns: what training takes for granted of them, and what becomes of an episode without.

They are checked when they come, before they are acknowledged. When they are read, the store compares their
digests: a power cut or a bad sector may have taken some.
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


class TurnPart(msgspec.Struct, frozen=True, array_like=True):
    """Holds what a turn that lasts has sampled after `start` tokens of it. `session` names its row, which may
    have no number yet; `prompt` tells which turn of it this is. Once a turn is whole, its parts are worth
    nothing."""

    session: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    prompt: Annotated[bytes, msgspec.Meta(max_length=64)]
    start: int
    sampled: Generation


_turn_decoder = msgspec.msgpack.Decoder(Turn)
_part_decoder = msgspec.msgpack.Decoder(TurnPart)
_reply_decoder = msgspec.msgpack.Decoder(TurnReply)
MAX_TOP_TOKENS = 256  # likeliest tokens that a scorer names at a place
MAX_LOGPROB = 0.01  # of one token: an engine may round


def decode_turn(payload: bytes) -> Turn:
    """ProtocolError when it is no turn."""
    with ProtocolError.instead_of(*UNDECODABLE, text="a turn that cannot be decoded"):
        return _turn_decoder.decode(payload)


def decode_part(payload: bytes) -> TurnPart:
    """ProtocolError when it is no part of a turn."""
    with ProtocolError.instead_of(*UNDECODABLE, text="a part of a turn that cannot be decoded"):
        return _part_decoder.decode(payload)


def decode_reply(payload: bytes) -> TurnReply:
    """ProtocolError when it is not what answers a turn."""
    with ProtocolError.instead_of(*UNDECODABLE, text="replies that cannot be decoded"):
        return _reply_decoder.decode(payload)


def check_result(payload: bytes) -> None:
    """ProtocolError when it is no JSON value."""
    with ProtocolError.instead_of(*UNDECODABLE, text="the result of an episode cannot be decoded"):
        msgspec.json.decode(payload)


def check_turn(uid: str, turn: Turn, rows: int, vocabulary: int = MAX_VOCABULARY) -> None:
    """Check a decoded turn: every token is of the vocabulary, and every model token has a log-prob, a version
    and a token before it that predicts it; its row is one of the `rows` before, or the next new one.
    ProtocolError when not."""
    _check_sampled(f"episode {uid} turn {turn.index}", turn, vocabulary)

    if turn.context and max(turn.context) >= vocabulary:
        raise ProtocolError(f"episode {uid} turn {turn.index}: {max(turn.context)} is no token")

    if (told := turn.routes) is not None and (
        min(told.start, told.tokens - 1) < 0 or not told.data or len(told.data) % (2 * told.tokens)
    ):
        raise ProtocolError(
            f"episode {uid} turn {turn.index}: routes of {told.tokens} tokens from position {told.start} in "
            f"{len(told.data)} bytes, which is no multiple of 2 for each token"
        )

    if (scores := turn.scores) is not None:
        byte_counts = (len(scores.logprobs), len(scores.ids), len(scores.top))
        logprob_bytes = 4 * len(turn.ids)
        sizes_match = (
            byte_counts[0] == logprob_bytes
            and byte_counts[1] == byte_counts[2]
            and not (logprob_bytes and byte_counts[1] % logprob_bytes)
        )
        if not sizes_match or byte_counts[1] > MAX_TOP_TOKENS * logprob_bytes:
            raise ProtocolError(
                f"episode {uid} turn {turn.index}: scores of {byte_counts} bytes, {logprob_bytes} expected"
            )
        if (lowest_id := np.frombuffer(scores.ids, "<i4").min(initial=0)) < 0:
            raise ProtocolError(f"episode {uid} turn {turn.index}: scores of {lowest_id}, which is no token")

    if not 0 <= turn.row <= rows:
        raise ProtocolError(f"episode {uid} turn {turn.index}: row {turn.row} follows {rows} rows")
    if turn.row == rows and turn.ids and not turn.context:
        raise ProtocolError(f"episode {uid}: row {turn.row} starts with a model token: nothing predicts it")


def check_part(uid: str, part: TurnPart, vocabulary: int = MAX_VOCABULARY) -> None:
    """Check a decoded part like a turn, as another attempt goes on after it. Its routes come with the turn.
    ProtocolError when it is not right."""
    subject = f"episode {uid} part of a turn from token {part.start}"
    _check_sampled(subject, part.sampled, vocabulary)
    check_logprobs(subject, part.sampled)

    if part.sampled.routes is not None:
        raise ProtocolError(f"{subject}: it has routes")


def _check_sampled(subject: str, sampled: Turn | Generation, vocabulary: int) -> None:
    span_ends = [0, *(span.end for span in sampled.spans)]
    span_starts = [span.start for span in sampled.spans]
    contiguous = (
        span_starts == span_ends[:-1]
        and span_ends == sorted(set(span_ends))
        and span_ends[-1] == len(sampled.ids)
    )

    if len(sampled.ids) != len(sampled.logprobs) or not contiguous:
        raise ProtocolError(
            f"{subject}: {len(sampled.ids)} tokens with {len(sampled.logprobs)} log-probs "
            f"and spans {[(s.start, s.end) for s in sampled.spans]}"
        )

    if sampled.ids and max(sampled.ids) >= vocabulary:
        raise ProtocolError(f"{subject}: {max(sampled.ids)} is no token")
    if any(span.version < 0 for span in sampled.spans):
        raise ProtocolError(f"{subject}: versions {[s.version for s in sampled.spans]}")


def check_logprobs(subject: str, sampled: Turn | Generation) -> None:
    """Checks that they are finite, and of probabilities up to 1. ProtocolError when not. (The trainer does
    not ask: it leaves tokens out whose ratio is not finite.)"""
    logprobs = sampled.logprobs
    if logprobs and not (math.isfinite(sum(logprobs)) and max(logprobs) <= MAX_LOGPROB):
        raise ProtocolError(f"{subject}: log-probs that are no finite numbers up to 0")


def add_turn(episode: EpisodeRecord, turn: Turn, seconds: float = 0.0) -> None:
    """A turn became durable, `seconds` after the episode began."""
    versions = [span.version for span in turn.spans]
    tokens = len(turn.context) + len(turn.ids), len(turn.ids)
    oldest = min(versions, default=0)
    newest = max(versions, default=0)
    who = turn.row, turn.untrained, turn.agent
    episode.extend(*tokens, oldest, newest, seconds=seconds, row=who[0], untrained=who[1], agent=who[2])


def cut_back(buffer: ReplayBuffer, episode: EpisodeRecord, readable_turns: Sequence[Turn]) -> None:
    """Only these turns of an untaken episode can be read: it goes on from there, as a new attempt. One that
    is ready is dropped by name, as its result is a part of its group's baseline."""
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

    group = buffer.live[episode.group]  # it may have landed after the deadline, and the group not be settled
    group.baseline = tuple(member for member in group.baseline if member != episode.member)

    episode.attempt += 1
    episode.worker = ""
    buffer.touch(episode)
    buffer.move_episode(episode, State.PENDING)
