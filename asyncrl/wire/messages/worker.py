"""Rollout worker and coordinator: the control channel, and the bulk channel with the records of episodes.

Records are numbered and acknowledged. A frame of a record is a `Turn`, a `TurnPart` or a `TurnReply`: the
coordinator checks that frames can be trained and stores frames unchanged; the trainer decodes frames. The
files of images that a turn or a reply brings into the episode are further frames of its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated

import msgspec

from asyncrl.types import NO_VERSION, EpisodeResult, EpisodeStats, FailReason, PolicyVersion, Sample
from asyncrl.values import MAX_LISTED_LENGTH
from asyncrl.wire.messages.shared import Attempt, Count, Finite, WireMessage


class WorkerHello(WireMessage, frozen=True):
    """First message of a worker process, repeated until welcomed, and after silence. `acked` is the highest
    acknowledged bulk record: the next record to be sent follows. `version`: the version of the embedded
    engine."""

    index: Count
    incarnation: str
    slots: Count
    pid: Count
    acked: Count = 0
    version: PolicyVersion = NO_VERSION


class EngineUse(msgspec.Struct, array_like=True, gc=False):
    """The work of a server for a worker, as totals. Of the `prompt_tokens`, `cached_tokens` were not
    computed; `tokens` were sampled. `busy`: requests refused for want of room. `lost`: unfinished requests.
    `moved`: turns taken over from another server. `retracted`: how often the server took back a request's KV
    memory, for want of memory."""

    name: str
    requests: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    tokens: Count = 0
    busy: Count = 0
    lost: Count = 0
    moved: Count = 0
    retracted: Count = 0


class WorkerHeartbeat(WireMessage, frozen=True):
    """A worker's absolute state. `assigned` is the highest Assign.seq received; work sent by then and absent
    from `held` is lost. Seconds and counts are totals since the incarnation began; `tokens` are sampled
    tokens, including unfinished turns. `in_time`: a current wait has a separate deadline (a tool, a reward),
    which has not passed. `engines`: in the order in which the worker met the servers. `acked` as in
    WorkerHello: a delayed hello names a lower number. `leaving`: the worker was told to end, and has given up
    all attempts. `reprefilled_tokens`: prompt tokens that embedded engines prefilled again, for want of a
    layer's state behind them."""

    assigned: Count
    held: tuple[Attempt, ...]
    busy_s: Finite
    idle_s: Finite
    tokens: Count
    waiting: str = ""  # the named wait the worker is in, if any
    in_time: bool = False
    engines: tuple[EngineUse, ...] = ()
    acked: Count = 0
    leaving: bool = False
    reprefilled_tokens: Count = 0


class Leave(WireMessage, frozen=True):
    """The worker, or the supervisor of a server, is about to end, and has given up all work: peers continue
    that work, and the sender gets no more."""


class Assign(WireMessage, frozen=True):
    """Run an episode. `frames` of the message are the turns of an earlier attempt to continue from; the last
    `parts` frames belong to unfinished turns. No turn may start on weights older than version `min_version`.
    `seconds`: duration of the earlier turns. `transcript`: the text of the episode is wanted at the end."""

    seq: int
    attempt: Attempt
    sample: Sample
    lane: str  # "train" or "eval": which weights sample it
    temperature: float  # 0 is greedy
    key: int
    min_version: int = 0
    seconds: float = 0.0
    transcript: bool = False
    parts: Count = 0


class Cancel(WireMessage, frozen=True):
    """Stop an episode and send no more records of this episode."""

    attempt: Attempt


class EngineEntry(msgspec.Struct, frozen=True):
    """A server that workers may use. `version` is the version that the supervisor has confirmed last; only
    `healthy` servers take requests. `lane` "eval": reserved for validation, the weights do not change;
    otherwise a name: the scorer that the server runs. `asleep`: until the server wakes, unfinished requests
    stay there, new requests wait. Without a URL the server is not started yet."""

    name: str
    url: str
    incarnation: str
    version: PolicyVersion
    healthy: bool
    lane: str = "train"
    asleep: bool = False


class Engines(WireMessage, frozen=True):
    """The servers that are new or have changed since the last message, and the names of removed servers
    (`gone`); or, with `whole`, all servers."""

    entries: tuple[EngineEntry, ...]
    gone: tuple[str, ...] = ()
    whole: bool = False

    def updated_table(self, table: Mapping[str, EngineEntry]) -> dict[str, EngineEntry]:
        """Return the table by name, from the previous table."""
        kept_entries = (
            {} if self.whole else {name: entry for name, entry in table.items() if name not in self.gone}
        )
        return kept_entries | {entry.name: entry for entry in self.entries}


class MinVersion(WireMessage, frozen=True):
    """A batch was committed. A turn may start only on weights with version >= `min_version`."""

    min_version: int


# -- bulk channel ------------------------------------------------------------------------------------------


class Generated(WireMessage, frozen=True):
    """A model turn, durable before the tools run. Frames: the Turn without replies, which replaces the parts
    of the `session`, and the files of images that are new in its context."""

    seq: Count
    attempt: Attempt
    turn: Count
    seconds: Finite = 0.0  # duration of the episode so far, including earlier attempts
    session: Count = 0


class Sampled(WireMessage, frozen=True):
    """A part of a turn that lasts (`rollout.part_seconds`). Frame: TurnPart."""

    seq: Count
    attempt: Attempt
    seconds: Finite = 0.0


class Replied(WireMessage, frozen=True):
    """The replies of tools and the environment to a turn. Frames: TurnReply, and the files of new images."""

    seq: Count
    attempt: Attempt
    turn: Count


class Finished(WireMessage, frozen=True):
    """The episode is over and has a reward. The episode's tokens are the turns sent before. Frame, if an
    agent program or the tools returned something: the returned value, as JSON (RewardInput.result)."""

    seq: Count
    attempt: Attempt
    result: EpisodeResult
    stats: EpisodeStats
    text: str = ""  # the transcript, where Assign asks for it
    notes: dict[str, str] = {}  # further texts of the reward function
    answer: Annotated[str, msgspec.Meta(max_length=MAX_LISTED_LENGTH)] = ""  # shortened, for lists


class Failed(WireMessage, frozen=True):
    """The episode has no trajectory; the policy is not the cause."""

    seq: Count
    attempt: Attempt
    reason: FailReason
    detail: str


Record = Generated | Sampled | Replied | Finished | Failed
MAX_RECORDS = 64  # records in a message


class Records(WireMessage, frozen=True):
    """Records of a worker, in order. Frames: the frames of the first record, as many as the count says, then
    the frames of the next record."""

    counted: Annotated[tuple[tuple[Record, Count], ...], msgspec.Meta(max_length=MAX_RECORDS)]

    def with_frames(self, frames: Sequence[bytes]) -> Iterator[tuple[Record, list[bytes]]]:
        """Yield each record with the frames, or with as many frames as are left."""
        remaining_frames = iter(frames)
        for record, frame_count in self.counted:
            yield record, [*islice(remaining_frames, frame_count)]


class Ack(WireMessage, frozen=True):
    """Every bulk message up to `seq` of this incarnation is durable."""

    seq: Count


class Fenced(WireMessage, frozen=True):
    """The attempt is not current: drop it."""

    attempt: Attempt
