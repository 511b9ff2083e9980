"""Rollout worker and coordinator: the control channel, and the bulk channel with the records of episodes.

Records are numbered and acknowledged. Their frames hold a `Turn`, a `TurnPart` or a `TurnReply`: the
coordinator checks that they can be trained and stores them as they came; the trainer decodes them.
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
    """First message of a worker process, repeated until welcomed, and after silence. `acked` is its highest
    acknowledged bulk record: the next one to be sent follows it. `version`: what its own engine has."""

    index: Count
    incarnation: str
    slots: Count
    pid: Count
    acked: Count = 0
    version: PolicyVersion = NO_VERSION


class EngineUse(msgspec.Struct, array_like=True, gc=False):
    """The work of one server for a worker, as totals. Of the `prompt_tokens`, `cached_tokens` were not
    computed; `tokens` were sampled. `busy`: requests refused for want of room. `lost`: requests that it did
    not finish. `moved`: turns that it took over from another. `retracted`: how often it took back a request's
    KV memory, for want of it."""

    name: str
    requests: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    tokens: Count = 0
    busy: Count = 0
    lost: Count = 0
    moved: Count = 0
    retracted: Count = 0


class Heartbeat(WireMessage, frozen=True):
    """A worker's absolute state. `assigned` is the highest Assign.seq received; work sent by then and
    absent from `held` is lost. Seconds and counts are totals since the incarnation began; `tokens` are those
    sampled, of turns under way too. `in_time`: something that it waits for has a deadline of its own (a tool,
    a reward), which is not over. `engines`: in the order in which the worker met them. `acked` as in
    WorkerHello: a hello that was long under way names fewer. `leaving`: the worker was told to end, and has
    given up what it held."""

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


class Leave(WireMessage, frozen=True):
    """The worker, or the keeper of a server, is about to end, and gave up what it held: others go on with
    that, and it gets no more."""


class Assign(WireMessage, frozen=True):
    """Run an episode. `frames` of the message are the turns of an earlier attempt to continue from; the last
    `parts` of them are of turns that it did not end. None of its turns may start on weights older than
    version `oldest`. `seconds`: that these turns took. `transcript`: its text is wanted at the end."""

    seq: int
    attempt: Attempt
    sample: Sample
    lane: str  # "train" or "eval": which weights sample it
    temperature: float  # 0 is greedy
    key: int
    oldest: int = 0
    seconds: float = 0.0
    transcript: bool = False
    parts: Count = 0


class Cancel(WireMessage, frozen=True):
    """Stop an episode and send no more records of it."""

    attempt: Attempt


class EngineEntry(msgspec.Struct, frozen=True):
    """A server that workers may use. `version` is what its keeper has confirmed last; only `healthy`
    ones take requests. `lane` "eval": set aside for validation, its weights do not change; another one: the
    name of the scorer that it serves. `asleep`: until it wakes, requests under way stay there, others wait.
    Without a URL it is not started yet."""

    name: str
    url: str
    incarnation: str
    version: PolicyVersion
    healthy: bool
    lane: str = "train"
    asleep: bool = False


class Engines(WireMessage, frozen=True):
    """The servers that are new or have changed since the last one, and the names of those that are `gone`;
    or, `whole`, all that there are."""

    entries: tuple[EngineEntry, ...]
    gone: tuple[str, ...] = ()
    whole: bool = False

    def update(self, table: Mapping[str, EngineEntry]) -> dict[str, EngineEntry]:
        """The table by name, from the one before."""
        kept_entries = (
            {} if self.whole else {name: entry for name, entry in table.items() if name not in self.gone}
        )
        return kept_entries | {entry.name: entry for entry in self.entries}


class Clock(WireMessage, frozen=True):
    """A batch was committed. A turn may start only on weights with version >= oldest."""

    oldest: int


# -- bulk channel ------------------------------------------------------------------------------------------


class Generated(WireMessage, frozen=True):
    """A model turn, durable before its tools run. Frame: the Turn without replies. It replaces the parts of
    its `session`."""

    seq: Count
    attempt: Attempt
    turn: Count
    seconds: Finite = 0.0  # that the episode has taken up to here, earlier attempts included
    session: Count = 0


class Sampled(WireMessage, frozen=True):
    """A part of a turn that lasts (`rollout.part_seconds`). Frame: TurnPart."""

    seq: Count
    attempt: Attempt
    seconds: Finite = 0.0


class Replied(WireMessage, frozen=True):
    """The replies of tools and the environment to a turn. Frame: TurnReply."""

    seq: Count
    attempt: Attempt
    turn: Count


class Finished(WireMessage, frozen=True):
    """The episode is over and has a reward. Its tokens are the turns sent before. Frame, where an agent
    program or the tools returned something: that, as JSON (RewardInput.result)."""

    seq: Count
    attempt: Attempt
    result: EpisodeResult
    stats: EpisodeStats
    text: str = ""  # the transcript, where Assign asks for it
    notes: dict[str, str] = {}  # what the reward function said beside numbers
    answer: Annotated[str, msgspec.Meta(max_length=MAX_LISTED_LENGTH)] = ""  # in short, for lists


class Failed(WireMessage, frozen=True):
    """The episode has no trajectory; the policy is not the cause."""

    seq: Count
    attempt: Attempt
    reason: FailReason
    detail: str


Record = Generated | Sampled | Replied | Finished | Failed
MAX_RECORDS = 64  # in one message


class Records(WireMessage, frozen=True):
    """Records of one worker, in their order. Frames: those of the first, as many as its count says, then
    those of the next one."""

    counted: Annotated[tuple[tuple[Record, Count], ...], msgspec.Meta(max_length=MAX_RECORDS)]

    def unpacked(self, frames: Sequence[bytes]) -> Iterator[tuple[Record, list[bytes]]]:
        """Each record with its frames, or with what there is of them."""
        remaining_frames = iter(frames)
        for record, frame_count in self.counted:
            yield record, [*islice(remaining_frames, frame_count)]


class Ack(WireMessage, frozen=True):
    """Every bulk message up to `seq` of this incarnation is durable."""

    seq: Count


class Fenced(WireMessage, frozen=True):
    """The attempt is not current: drop it."""

    attempt: Attempt
