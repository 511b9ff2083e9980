"""Trainer ranks and coordinator: commits, versions, checkpoints (control); plans of micro-batches (bulk)."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.buffer.batches import Baseline
from asyncrl.buffer.records import EpisodeRecord
from asyncrl.types import MAX_VOCABULARY, EpisodeResult, PolicyVersion
from asyncrl.weights.manifest import Gap, Probe, WeightsRef
from asyncrl.wire.messages.shared import (
    Count,
    Finite,
    ImageFiles,
    ImageRequest,
    SampledSequence,
    Welcome,
    WireMessage,
)


class TrainerHello(WireMessage, frozen=True):
    """A rank reports in with the step of the checkpoint. Ranks of a start share the incarnation.
    `vocabulary`: token ids of the model are below this number."""

    index: Count  # the rank
    ranks: Count
    incarnation: str
    step: Count
    vocabulary: Count = MAX_VOCABULARY


class TrainerHeartbeat(WireMessage, frozen=True):
    """Sign of life of a rank. Seconds, `work`, the micro-batches scored or trained and the steps of reading
    images, and `written`, bytes of checkpoints, are totals since the start: a rank whose `work` stays the
    same is alive, but makes no progress. `checkpoint_problem`: why the newest checkpoint could not be
    written."""

    rank: Count
    busy_s: Finite
    idle_s: Finite
    waiting: str = ""
    work: Count = 0
    written: Count = 0
    checkpoint_problem: str = ""


class AskDevices(WireMessage, frozen=True):
    """A rank that has loaded nothing yet asks for the devices: engines on these devices sleep first."""

    index: Count
    incarnation: str


class GrantDevices(WireMessage, frozen=True):
    """Answer to AskDevices: engines sleep."""


class Commit(WireMessage, frozen=True):
    """Rank 0 took the optimizer step of the batch of `step`. `trained` and `lost`, uids of all ranks, are
    together the plan: the turns or images of lost trajectories could not be read."""

    trainer_epoch: Count
    step: Count
    plan_hash: str
    trained: tuple[str, ...]
    metrics: dict[str, float]
    lost: tuple[str, ...] = ()


class Committed(WireMessage, frozen=True):
    """The commit of `step` is durable. `publish`: False while a restarted trainer repeats older steps.
    `best`: step of the checkpoint with the best validation; -1: none is known, or wanted."""

    step: int
    publish: bool
    best: int = -1


class Published(WireMessage, frozen=True):
    """Rank 0 wrote a version that engines may load."""

    ref: WeightsRef
    snapshot_s: Finite  # wait of the trainer
    write_s: Finite  # background time; a broadcast counts only the offer, as supervisors report each load


class Probed(WireMessage, frozen=True):
    """The probe, scored by the trainer with the weights of a version, which may not be written yet."""

    version: PolicyVersion
    probe: Probe


class SurprisalSums(msgspec.Struct, frozen=True):
    """Sums over tokens that an engine has sampled, scored by the trainer at the temperature of the run. With
    ξ = -log p - H of a token, H the entropy: `deviation` Σ ξ, `squares` Σ ξ², `variance` the sum of the
    expectations of ξ². `median_gap`: the median difference to the reported log-probs: a mixture of experts
    has a few large differences by rounding alone. A value is infinite if one of its terms is no number."""

    engine: str  # identity of the peer
    tokens: Count
    deviation: float
    squares: Gap
    variance: Gap
    median_gap: Gap


class ScoredSamples(WireMessage, frozen=True):
    """Rank 0 has scored the samples of a plan with the weights of `version`."""

    version: PolicyVersion
    sums: tuple[SurprisalSums, ...]


class Checkpointed(WireMessage, frozen=True):
    """A verified checkpoint of `step` is complete; `trained_total` counts the trained trajectories. `resting`
    as in PlanRequest."""

    trainer_epoch: Count
    step: Count
    trained_total: Count
    resting: bool = False


class GaveUp(WireMessage, frozen=True):
    """A rank gave up the batch of `step`, and ends when Stop answers; all ranks end together.

    memory: a micro-batch of `tokens` tokens, padding included, of `episodes` episodes took too much memory.
    The rank had recomputed every `recomputed_every`-th layer (0: none); the next ranks may recompute every
    `recompute_every`-th layer before micro-batches are cut (0: more is not possible). Stop comes once the new
    limits are stored. spike: the gradient norm is too large, on all ranks. Stop comes once it is durable that
    the batch is left out. `detail` explains the reason.
    """

    trainer_epoch: Count
    rank: Count
    step: Count
    reason: Literal["memory", "spike"]
    detail: str
    tokens: Count = 0
    episodes: Count = 0
    recomputed_every: Count = 0
    recompute_every: Count = 0


class PlanRequest(WireMessage, frozen=True):
    """Rank 0 asks for a part of the batch of `step`, the step after the trained ones, for all ranks.
    `part`: counted from 0 on in each batch.
    `resting`: no rank holds anything on a device."""

    trainer_epoch: Count
    step: Count
    part: Count
    resting: bool = False


class PlannedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory of a plan, with `frames` frames, one a turn.

    `siblings` are the results of the baseline. `place` is the index of `own` among the siblings; -1: a late
    member of a partial group, absent from the siblings. `issued`: members that the group was issued with,
    landed or not. `greedy`: reward of the group's greedy episode, if the advantage needs that. Sizes for the
    partition among ranks: `tokens` of all `rows`, `width` of the widest row, `prompt` tokens.
    """

    uid: str
    group: str
    frames: int
    own: EpisodeResult
    siblings: tuple[EpisodeResult, ...]
    place: int
    issued: int
    temperature: float
    greedy: float | None = None
    tokens: int = 0
    rows: int = 1
    width: int = 0
    prompt: int = 0

    @classmethod
    def of(cls, episode: EpisodeRecord, baseline: Baseline, temperature: float) -> PlannedTrajectory:
        """Return the plan's entry for an episode."""
        siblings, place = baseline.siblings(episode)
        return cls(
            uid=episode.uid,
            group=str(episode.group),
            frames=episode.turns,
            own=episode.result,
            siblings=siblings,
            place=place,
            issued=baseline.issued,
            temperature=temperature,
            greedy=baseline.greedy,
            tokens=episode.tokens,
            rows=episode.stats.rows,
            width=episode.width,
            prompt=episode.stats.prompt,
        )

    @property
    def group_tokens(self) -> int:
        """Return the model tokens of the group's usable members."""
        return sum(result.tokens for result in self.siblings)


class EngineSamples(msgspec.Struct, frozen=True):
    """The sequences that an engine has sampled for a test."""

    engine: str  # identity of the peer
    sequences: tuple[SampledSequence, ...]


class WorkPlan(WireMessage, frozen=True):
    """Names the next task of all ranks, which partition the trajectories among themselves.

    work: train the trajectories. probe: score the probe, for a new engine, then ask again. probe_samples:
    score the samples of engines, then ask again. step: the batch is complete, take the optimizer step. end:
    no more batches, write a checkpoint. stop: write a checkpoint now, mid-batch. rest: move everything to
    main memory, as engines need the devices, then ask again.
    """

    step: int
    part: int
    kind: Literal["work", "probe", "probe_samples", "step", "end", "stop", "rest"]
    trajectories: tuple[PlannedTrajectory, ...] = ()
    plan_hash: str = ""  # only for the kind "step"
    samples: tuple[EngineSamples, ...] = ()  # only for the kind "probe_samples"


class PayloadRequest(WireMessage, frozen=True):
    """A rank asks for the payloads of trajectories of the batch of `step`, which it is to train."""

    trainer_epoch: Count
    step: Count
    uids: tuple[str, ...]


class Payloads(WireMessage, frozen=True):
    """The turns of the requested `uids`, a frame each, without the `lost` uids, which cannot be read."""

    step: int
    uids: tuple[str, ...]
    lost: tuple[str, ...] = ()


# The answer to each request, and the fields that must agree. Stop answers all further requests.
ANSWER_TYPES: dict[type[WireMessage], tuple[type[WireMessage], tuple[str, ...]]] = {
    AskDevices: (GrantDevices, ()),
    TrainerHello: (Welcome, ()),
    PlanRequest: (WorkPlan, ("step", "part")),
    PayloadRequest: (Payloads, ("step", "uids")),
    ImageRequest: (ImageFiles, ("digests",)),
    Commit: (Committed, ("step",)),
}


def is_answer(message: WireMessage, request: WireMessage) -> bool:
    """Return True if the message answers this request, and not an earlier request of the same kind."""
    if type(request) not in ANSWER_TYPES:
        return False
    answer_type, shared_fields = ANSWER_TYPES[type(request)]
    return isinstance(message, answer_type) and all(
        getattr(message, field_name) == getattr(request, field_name) for field_name in shared_fields
    )
