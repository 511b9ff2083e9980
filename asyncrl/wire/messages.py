"""Every message between processes: one tagged union per direction, one typed decoder each.

A message is a header (one of these structs, msgpack) and zero or more opaque frames. The coordinator
reads headers only; frames hold `Turn`s and tool replies and are decoded by whoever trains on them.
"""

from __future__ import annotations

import msgspec

from asyncrl.types import EpisodeResult, EpisodeStats, FailReason, PolicyVersion, Sample
from asyncrl.weights.manifest import WeightsRef


class WireMessage(msgspec.Struct, frozen=True, tag=True):
    """Base: the class name is the tag on the wire."""


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One try at one episode. Records of a try that is not current are fenced."""

    uid: str
    attempt: int


# -- control: worker -> coordinator ----------------------------------------------------------------


class WorkerHello(WireMessage, frozen=True):
    """First message of a worker process, repeated until welcomed, and after silence. `acked` is its highest
    acknowledged bulk record: the next one to be sent follows it."""

    index: int
    incarnation: str
    slots: int
    version: int
    pid: int
    acked: int = 0


class EngineUse(msgspec.Struct, array_like=True):
    """What one server has done for a worker, as totals. Of the `prompt_tokens`, `cached_tokens` were not
    computed; `tokens` were sampled. `busy`: requests refused for want of room. `lost`: requests that it did
    not finish. `moved`: turns that it took over from another."""

    name: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    busy: int = 0
    lost: int = 0
    moved: int = 0


class Heartbeat(WireMessage, frozen=True):
    """A worker's absolute state. `assigned` is the highest Assign.seq received; work sent by then and
    absent from `held` is lost. Seconds and counts are totals since the incarnation began."""

    seq: int
    assigned: int
    held: tuple[Attempt, ...]
    busy_s: float
    idle_s: float
    tokens: int
    waiting: str = ""  # the named wait the worker is in, if any
    engines: tuple[EngineUse, ...] = ()


class Loaded(WireMessage, frozen=True):
    """An engine swapped in a version, or could not. `probe_gap` is the largest difference between its
    log-probs of the version's probe and the trainer's, over `probe_tokens` tokens. `superseded`: the trainer
    has a newer version by now, and only that."""

    ref: WeightsRef
    lane: str
    checksum: str
    seconds: float
    error: str = ""
    probe_gap: float = 0.0
    probe_tokens: int = 0
    superseded: bool = False


# -- control: keeper of a server -> coordinator ----------------------------------------------------


class KeeperHello(WireMessage, frozen=True):
    """First message of a keeper, repeated until welcomed, after silence and when its server is up.
    `url` is empty while the server starts; `engine` says what it is ("sglang 0.5.23")."""

    index: int
    incarnation: str
    url: str
    pid: int
    engine: str = ""


class KeeperBeat(WireMessage, frozen=True):
    """Sign of life of a keeper. `healthy`: its server answers and holds what it confirmed."""

    healthy: bool
    starting: bool
    waiting: str = ""


# -- control: coordinator -> worker ----------------------------------------------------------------


class Welcome(WireMessage, frozen=True):
    """The coordinator knows the peer. `step` is the number of committed batches."""

    coordinator_epoch: int
    trainer_epoch: int
    step: int


class Assign(WireMessage, frozen=True):
    """Run an episode. `frames` of the message are the turns of an earlier attempt to continue from."""

    seq: int
    attempt: Attempt
    sample: Sample
    lane: str  # "train" or "eval": which weights sample it
    temperature: float  # 0 is greedy
    key: int


class Cancel(WireMessage, frozen=True):
    """Stop an episode and say nothing more about it."""

    attempt: Attempt


class EngineEntry(msgspec.Struct, frozen=True):
    """A server as workers are to see it. `version` is what its keeper has confirmed last; only `healthy`
    ones take requests. `lane` "eval": set aside for validation, its weights do not change."""

    name: str
    url: str
    incarnation: str
    version: PolicyVersion
    healthy: bool
    lane: str = "train"


class LoadWeights(WireMessage, frozen=True):
    """Load a version into a lane and answer Loaded."""

    ref: WeightsRef
    lane: str


class Engines(WireMessage, frozen=True):
    """All servers, whenever something about one changes."""

    entries: tuple[EngineEntry, ...]


class Clock(WireMessage, frozen=True):
    """A batch was committed. A turn may start only on weights with version >= oldest."""

    step: int
    oldest: int


class Stop(WireMessage, frozen=True):
    """To the coordinator: end the run, leave a checkpoint. To a worker or rank: leave now."""

    reason: str


# -- bulk: worker -> coordinator -------------------------------------------------------------------


class Generated(WireMessage, frozen=True):
    """A model turn, durable before its tools run. Frame: the Turn without replies."""

    seq: int
    attempt: Attempt
    turn: int
    tokens: int  # context + model tokens of this turn
    model_tokens: int
    oldest: int  # lowest version of a span; a large number when there are no model tokens
    newest: int


class Replied(WireMessage, frozen=True):
    """What tools and the environment said to a turn. Frame: Heard."""

    seq: int
    attempt: Attempt
    turn: int


class Finished(WireMessage, frozen=True):
    """The episode is over and has a reward. Its tokens are the turns sent before."""

    seq: int
    attempt: Attempt
    result: EpisodeResult
    stats: EpisodeStats
    text: str = ""  # transcript of a validation episode


class Failed(WireMessage, frozen=True):
    """The episode has no trajectory, for a reason that is not the policy's."""

    seq: int
    attempt: Attempt
    reason: FailReason
    detail: str


# -- bulk: coordinator -> worker -------------------------------------------------------------------


class Ack(WireMessage, frozen=True):
    """Every bulk message up to `seq` of this incarnation is durable."""

    seq: int


class Fenced(WireMessage, frozen=True):
    """The attempt is not current: drop it."""

    attempt: Attempt


# -- control: trainer -> coordinator ---------------------------------------------------------------


class TrainerHello(WireMessage, frozen=True):
    """A rank reports in with the step of its checkpoint. Ranks of one start share the incarnation."""

    rank: int
    ranks: int
    incarnation: str
    step: int
    pid: int


class Commit(WireMessage, frozen=True):
    """Rank 0 took the optimizer step of batch `step` (1-based: the step it completes)."""

    trainer_epoch: int
    step: int
    plan_hash: str
    metrics: dict[str, float]


class Published(WireMessage, frozen=True):
    """Rank 0 wrote a version that engines may load."""

    ref: WeightsRef
    snapshot_s: float  # what the trainer waited
    write_s: float  # in the background; a broadcast is only offered here, keepers tell what each took


class Checkpointed(WireMessage, frozen=True):
    """A verified checkpoint of `step` is in place; it counts `trained_total` trajectories."""

    trainer_epoch: int
    step: int
    path: str
    trained_total: int


class TrainerBeat(WireMessage, frozen=True):
    """Sign of life of a rank. Seconds and `work`, the micro-batches scored or trained, are totals since the
    start: a rank that goes on telling the same `work` is alive, and does not move."""

    rank: int
    step: int
    busy_s: float
    idle_s: float
    waiting: str = ""
    work: int = 0


# -- control: coordinator -> trainer ---------------------------------------------------------------


class Committed(WireMessage, frozen=True):
    """The commit of `step` is durable. `publish`: False while a restarted trainer repeats older steps."""

    step: int
    publish: bool


# -- bulk: trainer <-> coordinator -----------------------------------------------------------------


class Take(WireMessage, frozen=True):
    """Rank asks for micro-batch `micro` of batch `step` (0-based: the step being trained)."""

    trainer_epoch: int
    step: int
    micro: int
    rank: int


class PlannedTrajectory(msgspec.Struct, frozen=True):
    """One trajectory of a plan. Its turns are the next `frames` frames of the message.

    `siblings` are the results that the baseline is made of. `place` is the index of `own` among them; -1: it
    landed after the deadline of a partial group. `greedy`: reward of the group's greedy episode, where the
    advantage wants one.
    """

    uid: str
    group: str
    frames: int
    own: EpisodeResult
    siblings: tuple[EpisodeResult, ...]
    place: int
    temperature: float
    tokens: int
    greedy: float | None = None

    @property
    def group_tokens(self) -> int:
        """Model tokens of the group's usable members."""
        return sum(result.tokens for result in self.siblings)


class WorkPlan(WireMessage, frozen=True):
    """What a rank does next; all ranks get the same kind for the same (step, micro).

    work: train the rows (none: a dummy of weight zero). step: the batch is complete, take the optimizer
    step. end: no more batches, leave a checkpoint. stop: leave a checkpoint now, mid-batch.
    """

    trainer_epoch: int
    step: int
    micro: int
    kind: str
    rows: tuple[PlannedTrajectory, ...] = ()
    plan_hash: str = ""  # with kind "step"


class Confirm(WireMessage, frozen=True):
    """The rank holds the payloads of a plan."""

    trainer_epoch: int
    step: int
    micro: int
    rank: int


class Go(WireMessage, frozen=True):
    """All ranks hold the payloads: run the forward."""

    step: int
    micro: int


# -- control: observer <-> coordinator -------------------------------------------------------------


class ObserverHello(WireMessage, frozen=True):
    """The launcher's console wants status."""

    incarnation: str


class Status(WireMessage, frozen=True):
    """The state of the run, a few times a second. `gauges` use the names of metrics.jsonl."""

    phase: str
    step: int
    total_steps: int
    gauges: dict[str, float]
    waits: tuple[str, ...]  # who waits on whom, by name


class StepReport(WireMessage, frozen=True):
    """The metrics row of one committed step, or of a validation."""

    step: int
    metrics: dict[str, float]


class RunEnd(WireMessage, frozen=True):
    """Last message: how the run ended. `error` is empty for a completed or stopped run."""

    outcome: str  # completed | stopped | failed
    error: str = ""


ToCoordinatorControl = (
    WorkerHello | Heartbeat | Loaded | KeeperHello | KeeperBeat | TrainerHello | Commit | Published
    | Checkpointed | TrainerBeat | ObserverHello | Stop
)  # fmt: skip
ToCoordinatorBulk = Generated | Replied | Finished | Failed | Take | Confirm
ToWorkerControl = Welcome | Assign | Cancel | LoadWeights | Engines | Clock | Stop
ToKeeper = Welcome | LoadWeights | Stop
ToWorkerBulk = Ack | Fenced
ToTrainerControl = Welcome | Committed | Stop
ToTrainerBulk = WorkPlan | Go
ToObserver = Welcome | Status | StepReport | RunEnd | Stop
