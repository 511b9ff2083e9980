"""The base of all messages, the messages that several kinds of peer share, and those of the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from asyncrl.observe.alerts import Alert
from asyncrl.types import MAX_VOCABULARY, PolicyVersion
from asyncrl.vision.image_ids import DIGEST_DIGITS
from asyncrl.weights.manifest import LogprobGaps, Probe, WeightsRef

# Decoding fails for numbers out of range: sums of accepted numbers stay finite, and fit into the store.
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]  # seconds may be negative after a clock was set back
Share = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]
MAX_SAMPLES = 64  # sequences in a message
MAX_SAMPLE_TOKENS = 64  # tokens of such a sequence, including its prompt
MAX_REQUESTED_IMAGES = 8  # files in a message, each of at most MAX_STORED_BYTES
ImageDigest = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{DIGEST_DIGITS}}}\Z")]
MAX_PIECE_BYTES = 1 << 20  # maximum bytes of a file in a message
FileName = Annotated[
    str, Meta(pattern=r"^(logs|timeline|ratios)/[a-z]+-[0-9-]+\.(log|jsonl)\Z", max_length=100)
]


class WireMessage(msgspec.Struct, frozen=True, tag=True):
    """Base: the class name is the tag on the wire."""


class Invite(WireMessage, frozen=True):
    """The launcher to the coordinator: the owner of the key `token` (public half) may enrol a key for `role`,
    once, within `seconds`."""

    token: str
    role: str
    seconds: Finite


class Enrol(WireMessage, frozen=True):
    """The owner of a token: from now on this key (public half) has the token's role, and the token has no
    role."""

    key: str


class Enrolled(WireMessage, frozen=True):
    """Answer to Enrol: the place of the process in the run. `version`: of asyncrl; `config`: the run's, as
    JSON; `started`: the content of the run's file of that name."""

    role: str
    index: Count
    incarnation: str
    version: str
    config: bytes
    started: str


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """A try at an episode. Records of a superseded try are fenced."""

    uid: str
    attempt: Count


class Welcome(WireMessage, frozen=True):
    """Answer to a hello: the coordinator knows the peer. `step` is the number of committed batches,
    `micro_tokens` the limit of the trainer's micro-batches, in padded tokens. `recompute_every`: ranks
    recompute at least every so many-th layer (`trainer.activation_checkpointing=auto`); 0: the ranks choose.
    """

    coordinator_epoch: int
    trainer_epoch: int
    step: int
    micro_tokens: int = 0
    recompute_every: Count = 0


class ImageRequest(WireMessage, frozen=True):
    """A worker or a trainer rank asks for the files of images: of the data, or of stored turns."""

    digests: Annotated[tuple[ImageDigest, ...], Meta(max_length=MAX_REQUESTED_IMAGES)]


class ImageFiles(WireMessage, frozen=True):
    """The files of the requested images, a frame each, without the `lost` images, which cannot be read."""

    digests: tuple[ImageDigest, ...]
    lost: tuple[ImageDigest, ...] = ()

    def files(self, frames: Sequence[bytes]) -> dict[str, bytes]:
        """Return the frames by digest."""
        present = [digest for digest in self.digests if digest not in self.lost]
        return dict(zip(present, frames, strict=True))


class Prefetch(WireMessage, frozen=True):
    """A version that a server will be told to load in turn: bring the files to this machine."""

    ref: WeightsRef


class LoadWeights(WireMessage, frozen=True):
    """Load a version into a lane, compare the probe if given, and answer Loaded."""

    ref: WeightsRef
    lane: str
    probe: Probe | None = None


class ProbeGap(LogprobGaps, frozen=True):
    """The differences between an engine's log-probs of a probe and the trainer's, over `tokens` tokens.
    `rounding`: the probe's."""

    tokens: Count
    rounding: LogprobGaps


class Loaded(WireMessage, frozen=True):
    """An engine swapped in a version, or could not. `probe_gap`: by the version's probe, if it was compared.
    `postponed`: the version is not available now, and is asked for again. `uncompared`: the version came
    without a probe. `lost`: nobody delivers the version, about which nothing is known. `process_failed`: the
    engine is broken, or the process lacks memory, descriptors, threads or room; otherwise an error concerns
    the version's files."""

    ref: WeightsRef
    lane: str
    checksum: str
    seconds: Finite
    error: str = ""
    probe_gap: ProbeGap | None = None
    postponed: bool = False
    uncompared: bool = False
    lost: bool = False
    process_failed: bool = False


class SampledSequence(msgspec.Struct, frozen=True, array_like=True):
    """A prompt and its sampled continuation. `logprobs`: of the sampled tokens, the last of `ids`, as the
    engine has reported them."""

    ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_SAMPLE_TOKENS)]
    logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_SAMPLE_TOKENS)]


class ProbeSamples(WireMessage, frozen=True):
    """An engine has sampled these sequences with a version, at the temperature of the run, for a test by the
    trainer. `wrong_label`: an older version, a step, that the engine names for all tokens that it sampled
    with `version`."""

    version: PolicyVersion
    sequences: Annotated[tuple[SampledSequence, ...], Meta(max_length=MAX_SAMPLES)]
    wrong_label: Count | None = None


class Sleep(WireMessage, frozen=True):
    """Give up the KV cache and the weights of all lanes, and answer Slept: the trainer needs the devices.
    Unfinished turns wait with their ids. LoadWeights wakes the engine. `number`: of the order."""

    number: Count


class Slept(WireMessage, frozen=True):
    """An engine holds neither KV cache nor weights, after `seconds`; or could not give up both."""

    number: Count
    seconds: Finite
    error: str = ""


class Stop(WireMessage, frozen=True):
    """To the coordinator: write a checkpoint and end the run; without `save`, when there are no trainer ranks
    any more, end the run now. To any other process: end now."""

    reason: str
    save: bool = True


class WrittenBytes(WireMessage, frozen=True):
    """A process of another machine to the coordinator: the file has these bytes from `offset` on, in a frame.
    Without bytes the message is a sign of life. `last`: nothing more will come."""

    name: FileName
    offset: Count
    last: bool = False


class WrittenTaken(WireMessage, frozen=True):
    """Answer to WrittenBytes: the file in the run directory has `size` bytes."""

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
    waits: tuple[str, ...]  # each wait names the waiting process and the awaited thing
    failed: str = ""  # failed attempts and the newest cause, to be shown
    alerts: tuple[Alert, ...] = ()


class StepReport(WireMessage, frozen=True):
    """The metrics row of a committed step, or of a validation. `values`: of single episodes that landed since
    the previous step, by metric, for histograms."""

    step: int
    metrics: dict[str, float]
    values: dict[str, list[float]] = {}


class Replace(WireMessage, frozen=True):
    """The processes of a role hang, or the process of an `incarnation`: end and replace them."""

    role: str
    reason: str
    incarnation: str = ""


class RunEnd(WireMessage, frozen=True):
    """Last message: how the run ended. `error` is empty for a completed or stopped run."""

    outcome: str  # completed | stopped | failed
    error: str = ""
