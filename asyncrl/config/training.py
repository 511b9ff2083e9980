"""Keys of training: the buffer, the algorithm, the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.base import Count, Fraction, Options, PathText, Plugin, Positive, Seconds, Section, Text

INITIAL_TARGET = 0.5  # target_staleness=auto begins here, before the staleness of tokens is measured
USUAL_MAX_TARGET = 4  # highest automatic target for max_staleness up to 16; a larger bound is for the tail
Packing = Literal["padded", "packed", "tree"]
DIVERGENCE_NAMES = ("forward", "reverse", "js")  # estimators of the KL that compare whole distributions


class BufferConfig(Section, frozen=True):
    """The replay buffer: batches, groups, staleness."""

    groups_per_batch: Positive = 32
    """Number of groups (samples) per optimizer batch."""
    episodes_per_group: Positive = 8
    """Number of episodes per sample."""
    max_staleness: Count = 16
    """Maximum lag of every trained token, in optimizer batches. 0: synchronous. Only tokens in the slowest
    episodes come near this bound; `target_staleness` sets the lag of the others."""
    target_staleness: Annotated[float, Meta(ge=0)] | Literal["auto"] = "auto"
    """Admission pace: live groups <= (1 + target) * groups_per_batch. auto: starts at min(1/2, max_staleness)
    and adapts after each batch to keep the trainer busy within `stale_budget`; at most 4, or max_staleness /
    4 if that is more."""
    stale_budget: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """With target_staleness=auto: share of the tokens that may exceed max_staleness. For runs with slow tools
    or long episodes, a larger max_staleness costs less than a larger budget."""
    on_stale: Literal["mask", "hold", "drop"] = "mask"
    """What happens to tokens beyond max_staleness when a batch takes them: `mask` gives such tokens weight
    zero, `hold` makes the batch wait for groups that would otherwise exceed the bound, and `drop` drops the
    trajectory."""
    group_policy: Literal["auto", "complete", "partial"] = "auto"
    """`complete`: train on a group when all of its members have ended. `partial`: train on the members that
    have ended by a deadline, and on each late member when it ends. auto: `partial` if the algorithm stays
    unbiased with partial groups and on_stale is mask, otherwise `complete`."""
    group_deadline: Seconds | Literal["auto"] = "auto"
    """`partial`: seconds from the start of a group's first episode to the deadline, which fixes the
    baseline. auto: the median time until all members of a group have ended."""
    filter_zero_variance: bool = True
    """Filter out groups whose rewards are all equal, and refill the batch."""
    max_refill: Positive = 8
    """Maximum number of filtered groups per batch, as a multiple of the batch size; beyond this limit, the
    batch is trained with the groups that are ready."""
    retire_pass_rate: Fraction = 1.0
    """Stop drawing a sample once the share of positive rewards in its group has reached this value
    (no-positive-resampling); 1: off."""
    shift_fill: Fraction | Literal["auto"] = "auto"
    """With engine.colocated: share of a batch's groups that must be ready before the trainer gets the
    devices. auto: all groups, or the groups that are ready once no engine has sampled for as long as the
    last two shift changes took."""
    max_bytes: Positive = 1 << 30
    """Admission stops if the worst-case payloads of live episodes would exceed this number of bytes."""

    @property
    def batch_size(self) -> int:
        return self.groups_per_batch * self.episodes_per_group

    @property
    def min_group(self) -> int:
        """Return the number of usable members below which a group is dropped (`group_short`): a single member
        has no baseline."""
        return min(2, self.episodes_per_group)

    @property
    def target(self) -> float:
        """Return the configured target; with auto the target at the beginning of the run."""
        return (
            min(INITIAL_TARGET, self.max_staleness)
            if self.target_staleness == "auto"
            else self.target_staleness
        )

    @property
    def usual_staleness(self) -> int:
        """Return the bound on the lag of groups that are trained in the order of issue. With auto the bound
        is 2 for max_staleness 2, 4 for 4 to 16, 8 for 32."""
        if self.target_staleness != "auto":
            return self.max_staleness
        return min(self.max_staleness, max(USUAL_MAX_TARGET, self.max_staleness // USUAL_MAX_TARGET))

    @property
    def max_live_groups(self) -> int:
        """Return the highest limit on live groups in the run."""
        ahead = self.usual_staleness if self.target_staleness == "auto" else self.target
        return int((1 + ahead) * self.groups_per_batch)


class AlgorithmConfig(Section, frozen=True):
    """Advantages, loss and behaviour correction. For names, options and advice, see
    docs/reference/algorithms.md."""

    advantage: Plugin = "dr_grpo"
    """Advantage: a name, `module:function` or `file.py:function`, e.g. with options `{gae: {gamma: 0.99, lam:
    0.95}}`."""
    normalise: Literal["auto", "none", "batch_std", "nonzero", "whiten", "whiten_running"] = "auto"
    """Scaling of advantages over the batch; `auto`: as defined by the advantage."""
    loss: Plugin = "reinforce"
    """Policy loss: a name, `module:function` or `file.py:function`, e.g. with options `{ppo: {clip_high:
    0.28}}`."""
    correction: dict[str, Options] | None = None
    """Behaviour correction: rules on rho by name, each with its options, e.g. `{mask: {low: 0.5}}`; null:
    `mask` and `truncate`, or no rule for a loss that contains pi/mu. `{}`: no rules, which is an error for
    stale data."""
    aggregation: Text = "token_mean"
    """Aggregation of token losses into one number, exact over the complete batch."""
    shaping: dict[str, Options] = {}
    """Changes to the reward before advantages are computed, by name, each with its options."""
    mask_truncated: bool = False
    """Exclude episodes that hit a limit from the loss (overlong filtering); their rewards still count in the
    baseline."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of a bonus for the entropy over the whole vocabulary."""
    steps_per_batch: Positive = 1
    """Mini-batches per batch and epoch, with one optimizer step each. More than one requires a barrier: the
    whole batch must arrive before the first step."""
    epochs: Positive = 1
    """Passes over a batch; more than one also requires the barrier."""
    prox: Literal["auto", "recompute", "loglinear", "current", "mu"] = "auto"
    """Source of log prox: recomputed at the start of the batch, interpolated between mu and pi, pi itself, or
    mu (clips are then centred on mu, without a weight: verl's bypass mode). `auto`: `current` for one
    optimizer step per batch, where it is exact, otherwise `recompute`."""
    ess_lr: bool = False
    """Scale the learning rate by the square root of the effective sample size as a share of the batch, but
    by no less than 0.1."""


def described_recomputation(every: int) -> str:
    """Write TrainerConfig.checkpointed_every in words: 2 as `1 layer in 2 is recomputed`."""
    layers = {0: "no layers are", 1: "all layers are"}.get(every, f"1 layer in {every} is")
    return f"{layers} recomputed"


def memory_advice(every: int) -> str:
    """Return advice for a trainer that lacks memory and recomputes every `every`-th layer (0: none)."""
    recompute = "" if every == 1 else "trainer.activation_checkpointing=full, "
    return (
        f"{recompute}more trainer.ranks, trainer.sequence_parallel (with long rows), "
        "trainer.offload_optimizer=true (with a GPU), model.lora_rank, trainer.packing=padded (on a CPU, "
        "with long rows), or a smaller rollout.max_tokens"
    )


class KLConfig(Section, frozen=True):
    """Distance to a reference policy."""

    where: Literal["none", "reward", "loss", "loss_unweighted"] = "none"
    """`reward`: subtract coef * KL from the token rewards. `loss`: add this term to the loss, weighted by
    rho, because the tokens come from mu. `loss_unweighted`: add the term without this weight, as verl and
    TRL do."""
    estimator: Literal["auto", "k1", "abs", "k2", "k3", "straight_through", "forward", "reverse", "js"] = (
        "auto"
    )
    """Estimator per token. `straight_through`: the value of k3 with the gradient of k2. `auto`: k1 in the
    reward, k2 in the loss, which give the gradient of the KL. `forward`, `reverse` and `js` (loss only):
    KL(ref, pi), KL(pi, ref) and Jensen-Shannon over the entire vocabulary."""
    top_k: Annotated[int, Meta(ge=0, le=256)] = 0
    """forward, reverse, js: compare the reference's k most likely tokens, the sampled token, and all other
    tokens as one class; 0: all tokens, which requires the reference in the trainer ranks."""
    coef: Annotated[float, Meta(ge=0)] = 1e-3
    """Initial coefficient."""
    target: Annotated[float, Meta(ge=0)] = 0.0
    """Target KL per token, toward which the coefficient adapts; 0: keep the coefficient fixed."""
    horizon: Positive = 10_000
    """Number of episodes over which the coefficient adapts to `target`."""
    reference: PathText = ""
    """Model directory or hub repository of the reference; empty: the reference in `scorers` if there is one,
    otherwise the initial policy (with LoRA: the model without the adapter)."""
    prompt: str = ""
    """Text placed before the first message that the reference reads, so that the policy, or another model,
    teaches with a better prompt. `{ground_truth}` is replaced by the ground truth of the sample."""
    offload: bool = False
    """Keep the reference's shards in main memory between its forward passes."""

    @property
    def in_loss(self) -> bool:
        return self.where in ("loss", "loss_unweighted")

    @property
    def diverges(self) -> bool:
        """Tell whether the loss compares whole distributions."""
        return self.in_loss and self.estimator in DIVERGENCE_NAMES


class CriticConfig(Section, frozen=True):
    """The value function: a separate model, trained only if the advantage needs values (gae)."""

    path: PathText = ""
    """Model directory or hub repository from which the critic starts; empty: model.path."""
    lr: Annotated[float, Meta(gt=0)] = 1e-5
    """Peak learning rate; the critic follows the policy's schedule."""
    warmup_steps: Count = 0
    """Number of initial batches that train only the critic."""
    clip: Annotated[float, Meta(ge=0)] = 0.2
    """Range of the value clip around the value at the start of the batch; 0: off."""


class TrainerConfig(Section, frozen=True):
    """FSDP2 ranks and the optimizer."""

    ranks: Positive = 1
    """Number of trainer processes."""
    replicas: Positive = 1
    """Number of copies of the weights, each sharded over `ranks` / `replicas` ranks (HSDP), to reduce
    traffic."""
    sequence_parallel: Positive = 1
    """Number of ranks that share each micro-batch, each with a part of the packed rows (Ulysses), for long
    rows."""
    lr: Annotated[float, Meta(gt=0)] = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after warm-up, updated at each step, down to `lr_end` * lr at
    `total_steps`."""
    lr_end: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    warmup_steps: Count = 0
    """Linear warm-up steps."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Weight decay (decoupled in AdamW)."""
    optimizer: Plugin = "adamw"
    """Optimizer: a registered name, or a class or function that builds an optimizer from parameters, `lr`
    and options, e.g. `{torch.optim:RMSprop: {momentum: 0.9}}`. `betas` and `weight_decay` are also passed if
    the optimizer accepts them."""
    offload_optimizer: bool = False
    """Keep the shards of weights, gradients and optimizer state in main memory, and run the optimizer on the
    CPU."""
    activation_checkpointing: Literal["auto", "none", "full"] | Positive = "auto"
    """Layers whose activations are recomputed in the backward pass: none, all, or every k-th. `auto`: on a
    GPU, as few as the memory estimate allows; on a CPU, none. After a rank has run out of memory, more
    layers are recomputed."""
    compile: bool = False
    """Compile each layer with torch.compile, once for all lengths; needs a C++ compiler on a CPU."""
    grad_clip: Annotated[float, Meta(ge=0)] = 1.0
    """Maximum gradient norm; 0: off."""
    on_spike: Literal["skip", "rollback", "stop"] = "skip"
    """If a batch's gradient norm is not finite or is a spike: skip the optimizer step; drop the batch's
    episodes, with a recorded reason, and continue from the newest checkpoint with other episodes; or end the
    run."""
    spike_factor: Annotated[float, Meta(ge=0)] = 0.0
    """A norm above this many times the median of the last 32 batches is a spike; 0: off."""
    micro_batch_tokens: Positive = 8192
    """Tokens in a micro-batch (forward and backward), on one rank or on the ranks that share the
    micro-batch. Padding counts with `packing=padded`; a shared prefix counts once with `packing=tree`. A
    longer episode becomes a micro-batch of its own."""
    packing: Packing = "tree"
    """padded: pad the rows of a micro-batch to the length of the longest. packed: concatenate rows. tree:
    compute each shared beginning of rows only once, with all members of a group on one rank. If `packed` or
    `tree` would change the model's gradients, the trainer pads instead, with a warning."""
    router_replay: bool = False
    """Mixture-of-experts models: train each token with the experts that the SGLang server selected when
    sampling it (R3)."""

    @property
    def checkpointed_every(self) -> int:
        """Return k if every k-th layer is recomputed; 0: no layer, as `auto` begins on a CPU."""
        setting = self.activation_checkpointing
        return setting if isinstance(setting, int) else int(setting == "full")


class StoreConfig(Section, frozen=True):
    """The run's store: states, plans and turns of its episodes."""

    keep_bytes: Count = 1 << 30
    """Bytes of the newest turns to keep, in segments of 64 MB, for `asyncrl replay` and `regrade` once a
    resume no longer needs these turns."""


class CheckpointConfig(Section, frozen=True):
    """Checkpoints and the exports that they contain."""

    every: Count = 50
    """Number of steps between checkpoints; 0: a checkpoint at every 1,000th step and at the end. Turns since
    the newest checkpoint stay on disk, because a resume needs them."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    best: bool = False
    """Also keep the checkpoint with the best validation result. A validation scores the version that was
    current when the validation began."""
    directory: PathText = ""
    """Parent of the run's checkpoint directory: an absolute path or an fsspec URL that all trainer ranks
    share; empty: the run directory."""

    @property
    def pause(self) -> int:
        """Return the number of steps between checkpoints."""
        return self.every or 1000
