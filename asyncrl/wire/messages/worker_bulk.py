"""Rollout worker and coordinator, bulk channel: the records of episodes, numbered and acknowledged.

Frames hold a `Turn` or a `TurnReply`. The coordinator checks that they can be trained and stores them as they
came; the trainer decodes them.
"""

from __future__ import annotations

from asyncrl.types import EpisodeResult, EpisodeStats, FailReason
from asyncrl.wire.messages.shared import Attempt, Count, Finite, WireMessage


class Generated(WireMessage, frozen=True):
    """A model turn, durable before its tools run. Frame: the Turn without replies."""

    seq: Count
    attempt: Attempt
    turn: Count
    tokens: Count  # context + model tokens of this turn
    model_tokens: Count
    oldest: Count  # lowest version of a span
    newest: Count
    seconds: Finite = 0.0  # that the episode has taken up to here, earlier attempts included


class Replied(WireMessage, frozen=True):
    """The replies of tools and the environment to a turn. Frame: TurnReply."""

    seq: Count
    attempt: Attempt
    turn: Count


class Finished(WireMessage, frozen=True):
    """The episode is over and has a reward. Its tokens are the turns sent before."""

    seq: Count
    attempt: Attempt
    result: EpisodeResult
    stats: EpisodeStats
    text: str = ""  # the transcript, where Assign asks for it
    notes: dict[str, str] = {}  # what the reward function said beside numbers


class Failed(WireMessage, frozen=True):
    """The episode has no trajectory; the policy is not the cause."""

    seq: Count
    attempt: Attempt
    reason: FailReason
    detail: str


Record = Generated | Replied | Finished | Failed


class Ack(WireMessage, frozen=True):
    """Every bulk message up to `seq` of this incarnation is durable."""

    seq: Count


class Fenced(WireMessage, frozen=True):
    """The attempt is not current: drop it."""

    attempt: Attempt
