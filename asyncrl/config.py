"""The configuration: every key, its type, its bounds and what it means. The only definition of each.

Hydra composes a mapping from `configs/` and the command line; `parse` turns it into a frozen
`RunConfig` or raises ConfigError naming the key. `docs/configuration.md` is generated from this file:
the string under a field is its documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.errors import ConfigError

BYTES_PER_TOKEN = 24  # worst case of an encoded token: id, log-prob, share of a span

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every group of keys: immutable, and an unknown key is an error."""


class ModelConfig(Section, frozen=True):
    """The policy, a Hugging Face causal language model with its tokenizer."""

    path: Text
    """Directory with config.json, model.safetensors, tokenizer.json and a chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and compute type of the trainer and the embedded engine."""
    fp32_head: bool = False
    """Compute logits in float32 under bfloat16 (in trainer)."""
    lora_rank: Count = 0
    """Train low-rank adapters of this rank on the linear layers instead of the weights; 0: all weights."""
    lora_alpha: Annotated[float, Meta(gt=0)] = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""


class DataConfig(Section, frozen=True):
    """Prompts, as parquet files with verl's columns."""

    train: Text
    """Parquet file of training samples."""
    test: str = ""
    """Parquet file of held-out samples; empty: no validation."""
    shuffle: bool = True
    """Shuffle the samples anew in each epoch, by `seed`."""
    epochs: Count = 0
    """Passes over the training samples; 0: as many as `total_steps` needs."""
    at_end: Literal["flush", "drop"] = "flush"
    """Data exhausted with less than a batch live: train a short batch, or drop it (`end_of_data`)."""


Options = dict[str, str | int | float | bool]
Plugin = str | dict[str, Options]  # a name, or one name with its options


class RolloutConfig(Section, frozen=True):
    """Episodes: sampling, limits, what the model meets, and reward."""

    workers: Positive = 1
    """Number of rollout worker processes."""
    slots: Positive = 64
    """Episodes that one worker runs at once."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature of training episodes. Top-p and top-k are off in training, so that the
    recorded log-probs are those of the distribution sampled from."""
    max_new_tokens: Positive = 128
    """Token limit of one turn."""
    max_tokens: Positive = 1024
    """Token limit of a row, prompt and tool replies included. An episode has one row, unless its history is
    rewritten or branches."""
    max_turns: Positive = 16
    """Model turns per episode."""
    max_calls: Positive = 64
    """Tool calls per episode."""
    max_bad_calls: Positive = 3
    """Malformed tool calls in a row that end an episode."""
    max_reply_tokens: Positive = 2048
    """A longer tool reply is cut."""
    cut_replies: Literal["head", "middle", "tail"] = "middle"
    """Where a tool reply that is too long is cut."""
    history: Literal["append", "fork", "fold"] = "append"
    """What a chat template that rewrites earlier turns does: it is refused (`append`), or begins a new row
    (`fork`, `fold`). A full row ends the episode, or (`fold`) goes on as a new one without the oldest tool
    replies."""
    max_rows: Positive = 8
    """Rows that one episode may become, where it may become several."""
    tools: list[str] = []
    """Tools: registered names, `module:function`, `file.py:function`, or a folder of such files."""
    tool_args: dict[str, Options] = {}
    """Constructor arguments per tool, e.g. `{calculator: {latency_mean: 0.3}}`."""
    tool_timeout: Seconds = 30.0
    """Deadline of one tool call; the episode goes on with an error reply."""
    parser: str = "hermes"
    """Format in which the model writes tool calls."""
    environment: Plugin = ""
    """What answers turns without tool calls (a game, a simulated user): a registered name, `module:class` or
    `file.py:class`, or one with options, e.g. `{gymnasium: {id: FrozenLake-v1}}`; empty: such a turn is the
    answer."""
    agent: Plugin = ""
    """A program that leads the episode through an OpenAI-compatible endpoint: `module:function` or
    `file.py:function`, or `{command: {line: python agent.py}}`; empty: the model is asked turn by turn."""
    reward: Plugin = "final_number"
    """Reward function (verl's signature, or of one trajectory): a registered name, `module:function` or
    `file.py:function`; or several with options and weights, e.g. `{gsm8k: {}, format: {weight: 0.2}}`."""
    reward_timeout: Seconds = 60.0
    """Deadline of one reward call; afterwards the episode fails with `reward_error`."""
    episode_timeout: Seconds = 600.0
    """Wall-clock limit of one episode; afterwards it fails with `deadline`."""
    retries: Count = 2
    """Re-issues of an episode that failed for a reason that is not the policy's."""
    threads: Positive = 1
    """OpenMP threads of a worker with an embedded engine."""

    @property
    def rows(self) -> int:
        """Rows that an episode can become."""
        return self.max_rows if self.agent or self.history != "append" else 1


class EngineConfig(Section, frozen=True):
    """What samples tokens."""

    name: Text = "torch"
    """`torch`: embedded in the rollout worker. `sglang`: servers of their own, shared by all workers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine computes."""
    max_batch_tokens: Positive = 4096
    """Prompt tokens that the embedded engine prefills at most between two decode steps."""
    servers: Positive = 1
    """sglang: servers to start."""
    urls: list[str] = []
    """sglang: attach to these servers instead of starting any, e.g. `[http://10.0.0.5:30000]`."""
    tp: Positive = 1
    """sglang: tensor-parallel size of a server (GPUs per server)."""
    memory_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.85
    """sglang: share of a GPU's memory for weights and KV cache; lower it where the trainer shares the GPU."""
    server_args: dict[str, str | int | float | bool] = {}
    """sglang: further arguments of started servers, by their names without `--`."""
    server_command: list[str] = []
    """sglang: command that starts a server; default: this Python with `-m sglang.launch_server`."""
    api_key_env: str = ""
    """sglang: environment variable with the servers' API key; empty: none."""
    admin_key_env: str = ""
    """sglang: environment variable with the servers' admin key; empty: the API key."""
    start_timeout: Seconds = 600.0
    """sglang: deadline for a server to become ready."""
    request_timeout: Seconds = 300.0
    """sglang: a request whose stream is silent for this long is given up and continued elsewhere."""
    max_requests: Positive = 256
    """sglang: requests that one worker has open at one server at once; more wait in the worker."""

    @property
    def remote(self) -> bool:
        """Engines are servers with keepers, not parts of the workers."""
        return self.name == "sglang"

    @property
    def keepers(self) -> int:
        return (len(self.urls) or self.servers) if self.remote else 0


class BufferConfig(Section, frozen=True):
    """The replay buffer: batches, groups, staleness."""

    groups_per_batch: Positive = 16
    """Groups (samples) per optimizer batch."""
    episodes_per_group: Positive = 8
    """Episodes per sample."""
    max_staleness: Count = 4
    """Bound on the lag of every trained token, in optimizer batches. 0: synchronous."""
    target_staleness: Count | None = None
    """Admission pace: live groups <= (1 + target) * groups_per_batch. Default: min(1, max_staleness)."""
    on_stale: Literal["mask", "hold", "drop"] = "mask"
    """Tokens over the bound at take: weight zero; never let it happen (`hold`); drop the trajectory."""
    group_policy: Literal["complete", "partial"] = "complete"
    """Train whole groups, or the members landed by a deadline (late ones are still trained)."""
    group_deadline: Seconds = 60.0
    """`partial`: seconds from the issue of a group to the deadline of its baseline."""
    min_group: Positive = 2
    """Usable members under which a group is dropped (`group_short`)."""
    filter_zero_variance: bool = True
    """Filter groups whose rewards are all equal, and refill the batch."""
    max_refill: Positive = 8
    """Batches' worth of groups filtered while one batch fills; then it is trained with what there is."""
    retire_pass_rate: Fraction = 1.0
    """Samples whose share of positive rewards in a group reached this are not drawn again
    (no-positive-resampling); 1: off."""
    max_barren_batches: Positive = 50
    """Abort the run after this many batches' worth of groups in a row that left untrained."""
    max_bytes: Positive = 1 << 30
    """Admission stops while payloads of live episodes, at their worst case, would exceed this."""

    @property
    def batch_size(self) -> int:
        return self.groups_per_batch * self.episodes_per_group

    @property
    def target(self) -> int:
        return min(1, self.max_staleness) if self.target_staleness is None else self.target_staleness

    @property
    def max_live_groups(self) -> int:
        return (1 + self.target) * self.groups_per_batch


class AlgorithmConfig(Section, frozen=True):
    """Advantages, loss and behaviour correction; formulas and options of each name in docs/algorithms.md."""

    advantage: Text = "dr_grpo"
    """How rewards become advantages: a registered name or `module:function`."""
    advantage_args: Options = {}
    """Options of the advantage, e.g. `{gamma: 0.99, lam: 0.95}`."""
    normalise: Literal["auto", "none", "batch_std", "nonzero", "whiten", "whiten_running"] = "auto"
    """Scaling of advantages by the batch; `auto`: what the advantage is defined with."""
    loss: Text = "reinforce"
    """Policy loss: a registered name or `module:function`."""
    loss_args: Options = {}
    """Options of the loss, e.g. `{clip_low: 0.2, clip_high: 0.28}`."""
    correction: dict[str, Options] | None = None
    """Behaviour correction: rules on rho by name, each with its options, e.g. `{mask: {low: 0.5}}`; null:
    `mask` and `truncate`, but nothing for a loss that contains pi/mu itself. `{}`: none, refused for stale
    data."""
    aggregation: Text = "token_mean"
    """How token losses become one number; normalisers are exact over the whole batch."""
    shaping: dict[str, Options] = {}
    """Changes to the reward before advantages, by name, each with its options."""
    mask_truncated: bool = False
    """Keep episodes that hit a limit out of the loss (overlong filtering); their reward stays in the
    baseline."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the bonus for entropy over the whole vocabulary."""
    steps_per_batch: Positive = 1
    """Mini-batches, one optimizer step each, per batch and epoch. More than one: a barrier, the whole batch
    is in hand before the first."""
    epochs: Positive = 1
    """Passes over a batch; more than one needs the barrier, too."""
    prox: Literal["auto", "recompute", "loglinear", "current"] = "auto"
    """log prox: recomputed at the start of the batch, interpolated between mu and pi, or pi itself. `auto`:
    `current` for one optimizer step per batch, where that is exact, else `recompute`."""
    ess_lr: bool = False
    """Scale the learning rate by the square root of the batch's effective sample share, at least 0.1."""


class KLConfig(Section, frozen=True):
    """Distance to a reference policy."""

    where: Literal["none", "reward", "loss"] = "none"
    """Subtract coef * KL from the token rewards, or add it to the loss."""
    estimator: Literal["auto", "k1", "abs", "k2", "k3", "straight_through"] = "auto"
    """Estimator per token; `straight_through`: the value of k3, the gradient of k2. `auto`: k1 in the reward,
    k2 in the loss, whose gradients are those of the KL."""
    coef: Annotated[float, Meta(ge=0)] = 1e-3
    """Initial coefficient."""
    target: Annotated[float, Meta(ge=0)] = 0.0
    """KL per token that the coefficient is adapted to; 0: it is fixed."""
    horizon: Positive = 10_000
    """target: episodes over which the coefficient adapts."""
    reference: str = ""
    """Model directory of the reference; empty: the initial policy (with LoRA: the base of the adapter)."""
    offload: bool = False
    """Keep the reference's shards in main memory between its forwards."""


class CriticConfig(Section, frozen=True):
    """Value function, trained where the advantage wants one (gae)."""

    backbone: Literal["own", "shared"] = "own"
    """A model of its own, or a value head on the policy's last hidden states."""
    path: str = ""
    """own: model directory it starts from; empty: model.path."""
    lr: Annotated[float, Meta(gt=0)] = 1e-5
    """own: peak learning rate of its AdamW; the schedule is the policy's."""
    warmup_steps: Count = 0
    """First batches that train the critic only."""
    clip: Annotated[float, Meta(ge=0)] = 0.2
    """Range of the value clip around the value at the start of the batch; 0: off."""
    coef: Annotated[float, Meta(gt=0)] = 0.5
    """shared: weight of the value loss beside the policy loss."""


class TrainerConfig(Section, frozen=True):
    """FSDP2 ranks and the optimizer."""

    ranks: Positive = 1
    """Trainer processes."""
    lr: Annotated[float, Meta(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, by step, down to `lr_end` * lr at `total_steps`."""
    lr_end: Fraction = 0.1
    """Final learning rate as a share of the peak."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: Annotated[float, Meta(ge=0)] = 1.0
    """Gradient norm limit; 0: off."""
    micro_batch_tokens: Positive = 8192
    """Padded tokens of one forward/backward on one rank."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""
    threads: Positive = 1
    """OpenMP threads of a rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute."""


class WeightsConfig(Section, frozen=True):
    """How new versions reach the engines."""

    every: Positive = 1
    """Publish after every k-th step."""
    directory: Text = "auto"
    """`shm`: files on /dev/shm; `run`: in the run directory; `auto`: /dev/shm if it has room; or an absolute
    path, which other nodes may share: files in a directory of the run's own there."""
    keep: Annotated[int, Meta(ge=2)] = 3
    """Versions kept on disk."""
    deadline: Seconds = 60.0
    """An engine that has not loaded a version by then is reported and gets the latest one."""
    transport: Literal["disk", "collective"] = "disk"
    """`disk`: files. `collective` (sglang): broadcast through a process group of each server's own."""
    delta: bool = False
    """Publish only the bytes that changed, compressed, with a whole version every `full_every`."""
    full_every: Positive = 16
    """delta: versions from one that is published whole to the next."""
    bucket_bytes: Annotated[int, Meta(ge=1 << 10)] = 256 << 20
    """Tensors are gathered, written and broadcast in buckets of about this size."""
    mode: Literal["in_place", "retract", "abort"] = "in_place"
    """sglang, requests under way at an update: keep their KV cache, recompute it, or end and resume them."""
    rolling: bool = True
    """Update servers one after another, so that generation never stops everywhere."""


class ValidationConfig(Section, frozen=True):
    """Held-out episodes at one fixed version, through the same workers."""

    every: Count = 0
    """Steps between validations; 0: only before and after training."""
    samples: Count = 128
    """Held-out samples per validation in mid-run (sampled and greedy each)."""
    final_samples: Count = 512
    """Held-out samples of the first and the last validation; 0: none."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Temperature of the sampled half."""
    max_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of a worker's slots that validation may take in mid-run."""


class ObserveConfig(Section, frozen=True):
    """What a person sees."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Live view on a terminal, plain lines elsewhere."""
    trackers: list[Literal["wandb", "tensorboard", "swanlab"]] = []
    """Trackers beside metrics.jsonl."""
    project: Text = "asyncrl"
    """Project name for trackers."""
    plot: bool = True
    """Draw run.png at the end."""
    transcripts: Count = 8
    """Validation episodes saved as text per validation."""


class LaunchConfig(Section, frozen=True):
    """Processes and their supervision."""

    kind: Literal["local", "ray"] = "local"
    """Local subprocesses, or Ray actors."""
    ray_address: str = ""
    """Ray cluster; empty: a local one is started."""
    host: Text = "127.0.0.1"
    """Address the coordinator binds to."""
    port: Annotated[int, Meta(ge=0, le=65534)] = 0
    """Control port; port + 1 is the bulk port. 0: free ones."""
    restarts: Count = 5
    """Restarts per role before the run is given up."""
    lease: Seconds = 10.0
    """A worker silent for this long loses its episodes."""
    start_timeout: Seconds = 120.0
    """Deadline for a role to report in."""
    stop_timeout: Seconds = 10.0
    """Deadline of a graceful stop, checkpoint included."""
    stall_timeout: Seconds = 300.0
    """The watchdog ends a run in which nothing has moved for this long, and says who waits on whom."""


class RunConfig(Section, frozen=True, kw_only=True):
    """One run."""

    name: Text
    """Name of the run; its directory is `<run_dir>/<name>`."""
    run_dir: Text = "runs"
    """Parent of run directories; a local disk."""
    seed: int = 0
    """Seed of data order, sampling and initialisation."""
    total_steps: Positive = 100
    """Optimizer batches to train."""
    resume: Literal["auto", "never", "must"] = "never"
    """Continue the run of that name: if there is one; never (an existing one is an error); or fail."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    validation: ValidationConfig = ValidationConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def group_bytes(self) -> int:
        """Worst-case payload of a group."""
        episode = self.rollout.rows * self.rollout.max_tokens * BYTES_PER_TOKEN
        return self.buffer.episodes_per_group * episode


def parse(mapping: Any) -> RunConfig:
    """Validate a plain mapping. Raises ConfigError with the path of the wrong key."""
    try:
        config = msgspec.convert(mapping, RunConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from None
    _check_combinations(config)
    return config


def _check_combinations(config: RunConfig) -> None:
    """Refuse what each key allows but together cannot work."""
    buffer, algorithm = config.buffer, config.algorithm
    refusals = {
        f"$.buffer.target_staleness ({buffer.target}) exceeds max_staleness ({buffer.max_staleness}): "
        "admission would run ahead of the bound; lower it": buffer.target > buffer.max_staleness,
        f"$.buffer.min_group ({buffer.min_group}) exceeds episodes_per_group ({buffer.episodes_per_group}): "
        "every group would be dropped; lower it": buffer.min_group > buffer.episodes_per_group,
        f"$.algorithm.steps_per_batch ({algorithm.steps_per_batch}) exceeds groups_per_batch "
        f"({buffer.groups_per_batch}): a step would have no group": algorithm.steps_per_batch
        > buffer.groups_per_batch,
        f"$.weights.every ({config.weights.every}) exceeds max_staleness + 1 ({buffer.max_staleness + 1}): "
        "engines would be too old to start an episode": config.weights.every > buffer.max_staleness + 1,
        f"$.engine.urls names a server twice ({', '.join(config.engine.urls)}): each has one keeper": (
            len({url.rstrip("/") for url in config.engine.urls}) < len(config.engine.urls)
        ),
        "$.weights.transport collective needs servers; set engine=sglang, or weights.transport=disk": (
            config.weights.transport == "collective" and not config.engine.remote
        ),
        "$.weights.delta is for files: a broadcast goes straight into a server, which knows no deltas; "
        "use weights.transport=disk": config.weights.delta and config.weights.transport == "collective",
        f"$.buffer.max_bytes ({buffer.max_bytes}) holds less than a batch of episodes of rollout.max_tokens "
        f"({config.group_bytes * buffer.groups_per_batch} bytes); raise it or lower max_tokens": (
            buffer.max_bytes < config.group_bytes * buffer.groups_per_batch
        ),
        f"$.rollout.max_new_tokens ({config.rollout.max_new_tokens}) exceeds max_tokens "
        f"({config.rollout.max_tokens})": config.rollout.max_new_tokens > config.rollout.max_tokens,
        "$.rollout.agent leads episodes itself, with what its requests bring; clear rollout.environment and "
        "rollout.tools, or the agent": bool(
            config.rollout.agent and (config.rollout.environment or config.rollout.tools)
        ),
        f"$.trainer.micro_batch_tokens ({config.trainer.micro_batch_tokens}) is less than rollout.max_tokens "
        f"({config.rollout.max_tokens}): a long episode would not fit; raise it": (
            config.trainer.micro_batch_tokens < config.rollout.max_tokens
        ),
    }
    for message, refused in refusals.items():
        if refused:
            raise ConfigError(message)
