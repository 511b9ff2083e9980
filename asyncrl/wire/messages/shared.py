"""The base of all messages, the messages that several kinds of peer share, and those of the console."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from asyncrl.observe.alerts import Alert
from asyncrl.weights.manifest import Probe, WeightsRef

# What is not within these is not decoded: sums of such numbers stay finite, and the store can hold them.
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]  # a clock that is set back makes seconds negative
Share = Annotated[float, Meta(ge=0, le=1)]
Gap = Annotated[float, Meta(ge=0)]  # infinite where one of both is no number
PIECE = 1 << 20  # bytes of a file that a message has at most
FileName = Annotated[
    str, Meta(pattern=r"^(logs|timeline|ratios)/[a-z]+-[0-9-]+\.(log|jsonl)\Z", max_length=100)
]


class WireMessage(msgspec.Struct, frozen=True, tag=True):
    """Base: the class name is the tag on the wire."""


class Invite(WireMessage, frozen=True):
    """The launcher to the coordinator: who has the key `token` (public half) may enrol one key for `role`,
    once, within so many seconds."""

    token: str
    role: str
    seconds: Finite


class Enrol(WireMessage, frozen=True):
    """The owner of a token: from now on this key (public half) is of the token's role, and the token of
    nobody."""

    key: str


class Enrolled(WireMessage, frozen=True):
    """Answer to Enrol: what the process is in the run. `version`: of asyncrl; `config`: the run's, as JSON;
    `started`: the content of its file of that name."""

    role: str
    index: Count
    incarnation: str
    version: str
    config: bytes
    started: str


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """A try at an episode. Records of a try that is not current are fenced."""

    uid: str
    attempt: Count


class Welcome(WireMessage, frozen=True):
    """Answer to a hello: the coordinator knows the peer. `step` is the number of committed batches,
    `micro_tokens` what a micro-batch of the trainer's may have, in padded tokens. `recompute_every`: ranks
    recompute at least every so many-th layer (`trainer.activation_checkpointing=auto`); 0: they choose."""

    coordinator_epoch: int
    trainer_epoch: int
    step: int
    micro_tokens: int = 0
    recompute_every: Count = 0


class Prefetch(WireMessage, frozen=True):
    """A version that a server will be told to load, when it is its turn: bring its files to this machine."""

    ref: WeightsRef


class LoadWeights(WireMessage, frozen=True):
    """Load a version into a lane, compare its probe where there is one, and answer Loaded."""

    ref: WeightsRef
    lane: str
    probe: Probe | None = None


class Loaded(WireMessage, frozen=True):
    """An engine swapped in a version, or could not. `probe_gap` is the largest difference between its
    log-probs of the version's probe and the trainer's, over `probe_tokens` tokens; `probe_noise` is that of
    the probe. `postponed`: the version is not to be had now, and is asked for again. `unproven`: the engine
    has compared no probe since it was started. `lost`: nobody delivers the version, about which nothing is
    known. `process_failed`: the engine is broken, or its process lacks memory, descriptors, threads or room;
    without it an error is one of the version's files."""

    ref: WeightsRef
    lane: str
    checksum: str
    seconds: Finite
    error: str = ""
    probe_gap: Gap = 0.0
    probe_tokens: Count = 0
    probe_noise: Gap = 0.0
    postponed: bool = False
    unproven: bool = False
    lost: bool = False
    process_failed: bool = False


class Sleep(WireMessage, frozen=True):
    """Give up the KV cache and the weights of all lanes, and answer Slept: the trainer needs the devices.
    Turns under way wait with their ids. LoadWeights wakes the engine. `number`: of the order."""

    number: Count


class Slept(WireMessage, frozen=True):
    """An engine holds neither KV cache nor weights, after so many seconds; or could not give them up."""

    number: Count
    seconds: Finite
    error: str = ""


class Stop(WireMessage, frozen=True):
    """To the coordinator: write a checkpoint and end the run; without `save`, for which there are no trainer
    ranks any more, end it now. To any other process: end now."""

    reason: str
    save: bool = True


class WrittenBytes(WireMessage, frozen=True):
    """A process of another machine to the coordinator: from `offset` on its file has these bytes, in a frame.
    Without any it is sent to be heard of. `last`: nothing more will come."""

    name: FileName
    offset: Count
    last: bool = False


class WrittenTaken(WireMessage, frozen=True):
    """Answer to WrittenBytes: so many bytes of the file are in that of the run directory."""

    name: FileName
    size: Count


# -- the console -------------------------------------------------------------------------------------------


class ObserverHello(WireMessage, frozen=True):
    """The launcher's console wants status."""


class Status(WireMessage, frozen=True):
    """The state of the run, a few times a second. `gauges` use the names of metrics.jsonl."""

    phase: str
    step: int
    total_steps: int
    gauges: dict[str, float]
    waits: tuple[str, ...]  # who waits for what
    failed: str = ""  # failed attempts and the newest cause, to be shown
    alerts: tuple[Alert, ...] = ()


class StepReport(WireMessage, frozen=True):
    """The metrics row of one committed step, or of a validation. `values`: of single episodes that landed
    since the step before, by metric, for histograms."""

    step: int
    metrics: dict[str, float]
    values: dict[str, list[float]] = {}


class Replace(WireMessage, frozen=True):
    """The processes of a role hang, or that of one `incarnation`: end them, and start others."""

    role: str
    reason: str
    incarnation: str = ""


class RunEnd(WireMessage, frozen=True):
    """Last message: how the run ended. `error` is empty for a completed or stopped run."""

    outcome: str  # completed | stopped | failed
    error: str = ""
