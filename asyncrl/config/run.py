"""Keys of a run as a whole."""

from __future__ import annotations

import threading
from hashlib import blake2s
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.config.base import (
    Count,
    Options,
    PathText,
    Plugin,
    Positive,
    RequiredPath,
    Seconds,
    Section,
    Text,
)
from asyncrl.config.episodes import AgentConfig, AgentName, EngineConfig, RolloutConfig, ValidationConfig
from asyncrl.config.old_keys import with_current_keys
from asyncrl.config.scorers import ENGINES_URL, ScorerConfig, ScorerName, scorers_named_by
from asyncrl.config.training import (
    AlgorithmConfig,
    BufferConfig,
    CheckpointConfig,
    CriticConfig,
    KLConfig,
    StoreConfig,
    TrainerConfig,
)
from asyncrl.errors import UNDECODABLE, ConfigError, one_line

BYTES_PER_TOKEN = 24  # bytes of an encoded token at worst: id, log-prob, part of a span


class ModelConfig(Section, frozen=True):
    """The policy: a Hugging Face language model, alone or inside a composite checkpoint, with its
    tokenizer."""

    path: RequiredPath
    """Directory with config.json, model.safetensors, tokenizer.json and a chat template, or `owner/name` on
    the Hugging Face hub, with `@revision` for a revision other than the newest."""
    template: PathText = ""
    """Chat template that replaces the model's: a Jinja file, or the built-in `chatml_tools`. Exported models
    contain this template."""
    template_args: Options = {}
    """Arguments for the chat template, e.g. `{enable_thinking: false}`, `{reasoning_effort: high}`."""
    read_images: bool = True
    """If false, images become notes; set by the launcher where not all models read the same images."""
    max_image_tokens: Count = 0
    """Scale larger images down to this many tokens; 0: the limit of the model's image processor."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Compute type of the trainer, also used for frozen weights, published weights and the embedded engine.
    Trained weights and the optimizer are float32. auto: bfloat16 on a GPU (assumed on Ray, unless `device`
    is cpu) or on a CPU with bfloat16 instructions, otherwise float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer ranks and embedded engines. Embedded engines use any GPUs that no rank or scorer
    uses (with `engine.colocated`: the GPUs of the ranks). On Ray, an embedded engine gets its own GPU only
    with `cuda`."""
    train_vision: bool = False
    """Also train a vision-language model's vision tower and projector. If false, only the text part is
    trained."""
    fp32_head: bool = False
    """Compute the trainer's logits in float32 even if `dtype` is bfloat16."""
    lora_rank: Count = 0
    """Rank of the low-rank adapters on the linear layers, which are trained instead of the weights; 0: train
    all weights."""
    lora_alpha: Annotated[float, Meta(gt=0)] = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_modules: list[str] = []
    """Linear layers to adapt, by the last part of their names, e.g. `[q_proj, v_proj]`; empty: all linear
    layers in the text part, except kinds for which servers do not accept separate adapters."""


class WeightedSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source of several, with its fraction of the draws: its weight divided by the sum of all weights."""

    path: RequiredPath
    weight: Annotated[float, Meta(gt=0)]


class DataConfig(Section, frozen=True):
    """Prompts, in the same columns as verl's or in others."""

    train: RequiredPath | Annotated[list[RequiredPath | WeightedSource], Meta(min_length=1)]
    """Training samples: a file (parquet, jsonl, json, csv), a directory of tasks, a glob pattern, or a hub
    data set `hf:OWNER/NAME:CONFIG:SPLIT`; or a list of these, either all with weights (`{path, weight}`) or
    all without."""
    test: PathText | list[RequiredPath] = ""
    """Held-out samples, specified like `train` but without weights; empty: no validation."""
    columns: dict[str, str] = {}
    """Columns that hold the parts of a sample, e.g. `{prompt: question, ground_truth: answer.value}`."""
    dataset: Plugin = ""
    """Custom reader, `module:class` or `file.py:class`: the reader is called with the path of each source
    and returns an iterable of rows; empty: use the readers for the formats above."""
    system_prompt: str = ""
    """System message for prompts that have none."""
    filter_overlong: bool = False
    """Leave out prompts that leave no room within `rollout.max_tokens` for a turn of
    `rollout.max_new_tokens`, and demonstrations longer than `rollout.max_tokens`. If false, asyncrl
    only warns about such samples."""
    order: Plugin = ""
    """Custom order of samples in an epoch, `module:function` or `file.py:function`: called with the samples,
    the numbers of the samples drawn, and the epoch, it returns these numbers in a new order."""
    shuffle: bool = True
    """Reshuffle the samples in each epoch; `seed` determines the order."""
    epochs: Count = 0
    """Passes over the training samples; 0: as many as `total_steps` requires."""
    at_end: Literal["flush", "drop"] = "flush"
    """If the data ends and the remaining live groups do not fill a batch: train on a short batch, or drop
    the groups (`end_of_data`)."""


class WeightsConfig(Section, frozen=True):
    """How new versions reach the engines."""

    every: Positive = 1
    """Publish the weights after every k-th step."""
    directory: RequiredPath = "auto"
    """`shm`: files in /dev/shm; `run`: in the run directory; `auto`: /dev/shm if there is room. Versions are
    copied to other machines. All machines must share an absolute path, in which the run creates a
    directory."""
    deadline: Seconds = 60.0
    """An engine that has not loaded a version within this time is reported, and is sent the newest
    version."""
    transport: Literal["disk", "collective"] = "disk"
    """`disk`: through files. `collective` (sglang only): broadcast through a process group per server."""
    full_every: Positive = 1
    """disk: publish every k-th version in full; for the other versions, publish only the changed bytes,
    compressed."""
    bucket_bytes: Annotated[int, Meta(ge=1 << 10)] = 256 << 20
    """Approximate size of the buckets in which tensors are gathered, written and broadcast."""
    mode: Literal["in_place", "retract", "abort"] = "in_place"
    """sglang: at an update, requests in progress keep their KV cache (`in_place`), recompute it (`retract`),
    or are aborted and resumed (`abort`)."""
    rolling: bool = True
    """Update servers one after another, so that generation never stops on all servers at once."""
    on_mismatch: Literal["replace", "stop", "warn"] = "replace"
    """What happens if an engine's log-probs or samples differ from the trainer's model by more than rounding
    and chance explain: `replace` its process once, then stop; `stop` the run with a checkpoint; or only
    `warn`."""
    adapters: Literal["auto"] | bool = "auto"
    """Publish LoRA adapters alone, to be loaded alongside the model (true), or merged into its weights,
    which lets servers sample faster (false). auto: alone for the embedded engine, and for servers started by
    the run if `agents` have adapters."""


Tracker = Literal[
    "wandb", "tensorboard", "swanlab", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "trackio"
]


class ObserveConfig(Section, frozen=True):
    """Console and trackers."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Live view in a terminal (in `asyncrl train` and `sft`, the keys `g` and `b` show the newest good and
    bad transcripts); elsewhere, one line per step."""
    trackers: list[Tracker] = []
    """Trackers in addition to metrics.jsonl. wandb and swanlab need a login or offline mode
    (`WANDB_MODE=offline`); the other trackers, except tensorboard, get only numbers and the
    configuration."""
    project: Text = "asyncrl"
    """Project name for trackers."""


class LaunchConfig(Section, frozen=True):
    """Processes and their supervision."""

    kind: Literal["local", "ray"] = "local"
    """Run the processes as local subprocesses, or as Ray actors."""
    ray_address: str = ""
    """Address of the Ray cluster to use; empty: start a local cluster."""
    pools: dict[Literal["engine", "rollout", "scorer", "trainer"], Text] = {}
    """Ray: resource that machines for a role must have, as set by `ray start --resources='{"NAME": 1}'` or
    Ray's own `accelerator_type:H100`, e.g. `{engine: NAME}`."""
    gpus: dict[Literal["engine", "rollout", "scorer", "trainer"], Annotated[float, Meta(ge=0)]] = {}
    """Ray: GPUs per process of a role, e.g. `{rollout: 0.5}` for two workers on one GPU. The default is one
    GPU per rank, `tp` per server, and one per worker with an embedded engine if `model.device` is cuda."""
    host: Text = "127.0.0.1"
    """Address of this machine that the coordinator binds to and all other processes connect to. `0.0.0.0`:
    the coordinator binds to all addresses, and the others connect to the address of the default route."""
    port: Annotated[int, Meta(ge=0, le=65533)] = 0
    """Control port; the next two ports are for bulk data and weights. 0: use free ports."""
    restarts: Count = 5
    """Maximum number of restarts per role before the run ends. A restart stops counting after 10 minutes
    during which a step was completed."""
    threads: Positive = 1
    """OpenMP threads in each worker (for an embedded engine) and trainer rank. More threads than cores slow
    each other down."""
    lease: Seconds = 30.0
    """A worker that is silent for this long loses its episodes. An embedded engine is silent during a weight
    swap."""
    start_timeout: Seconds = 120.0
    """Deadline for a role to report, in addition to the time needed to read models and a checkpoint at 50
    MB/s."""
    stop_timeout: Seconds = 600.0
    """Deadline for a graceful stop, which writes a checkpoint (12 bytes per parameter) after any checkpoint
    that is already being written. A second Ctrl-C kills the run immediately."""
    stall_timeout: Seconds = 300.0
    """A run that shows no sign of life for this long, beyond the longest deadline of any wait, has stalled:
    hanging processes are replaced, or the run ends with a checkpoint."""


class RunConfig(Section, frozen=True, kw_only=True):
    """The run as a whole."""

    name: Text
    """Name of the run; its directory is `<run_dir>/<name>`."""
    run_dir: RequiredPath = "runs"
    """Directory that contains the run directories, on a local disk."""
    seed: int = 0
    """Seed for data order, sampling and initialisation."""
    total_steps: Count = 100
    """Batches to train on; 0: no training, only one validation of the model as it is (`asyncrl eval`)."""
    resume: Literal["auto", "never", "must"] = "never"
    """Whether to continue a run of this name. `auto`: if one exists; `never`: an existing run is an error;
    `must`: a missing run is an error."""
    model: ModelConfig
    agents: dict[AgentName, AgentConfig] = {}
    """LoRA adapters of agents, by the name that the agents send as `model` in their requests, e.g.
    `{planner: {lora_rank: 16}}`. Each adapter trains on the turns of its agent. Turns of other agents train
    the adapter of `model.lora_rank`, or no adapter if that rank is 0."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    scorers: dict[ScorerName, ScorerConfig] = {}
    """Frozen models on servers that score turns or episodes, e.g. `{reference: {path: MODEL, tp: 2}}`."""
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: StoreConfig = StoreConfig()
    weights: WeightsConfig = WeightsConfig()
    validation: ValidationConfig = ValidationConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def held_out_settings(self) -> str:
        """Return a fingerprint of the settings that decide how held-out episodes are played and scored. The
        weights and the number of simultaneous episodes do not count."""
        rollout = msgspec.structs.replace(self.rollout, workers=1, slots=1)
        shared = (self.data, rollout, self.validation, self.model, self.engine.name, self.seed)
        return blake2s(msgspec.json.encode(shared), digest_size=8).hexdigest()

    def largest_rows(self, budget: int) -> int:
        """Count the rows of `rollout.max_tokens` tokens in the largest micro-batch: as many as fit into
        `budget` tokens, or as one episode may have."""
        return max(self.rollout.full_rows, budget // self.rollout.max_tokens)

    def reader(self, source: str) -> str:
        """Return the scorer that reads each turn of an episode of this data source; '' if there is none."""
        scorer_of_source = {
            data_source: name
            for name, scorer in self.scorers.items()
            for data_source in scorer.sources or [""]
            if name != "reward"
        }
        return scorer_of_source.get(source, scorer_of_source.get("", ""))

    @property
    def scorer_places(self) -> list[tuple[str, int]]:
        """Return the name of each scorer's server, and the server's number among servers of that name."""
        return [
            (name, number) for name in self.scorers_used for number in range(self.scorers[name].server_count)
        ]

    @property
    def scorers_used(self) -> list[str]:
        """Return the scorers that have something to score: without training, the reward's scorers."""
        asked_scorers = {"reward"} | scorers_named_by(self.rollout.reward)
        return [name for name in self.scorers if self.total_steps or name in asked_scorers]

    @property
    def scorers_lent(self) -> list[str]:
        """Return the scorers whose servers are the run's engines."""
        return [name for name in self.scorers_used if ENGINES_URL in self.scorers[name].urls]

    def serving(self, name: str) -> RunConfig:
        """Return the configuration of a scorer's servers: the scorer's model and number of servers, in place
        of the policy's and the engines'. An unknown `model.path` is empty. For '': the engines' own."""
        if not name:
            return self

        scorer = self.scorers[name]
        replace_fields = msgspec.structs.replace
        engine = replace_fields(
            self.engine, name="sglang", servers=scorer.servers, urls=scorer.urls, tp=scorer.tp
        )
        trainer = replace_fields(self.trainer, router_replay=False)
        weights = WeightsConfig()
        model = replace_fields(self.model, path=scorer.path, lora_rank=0)

        return replace_fields(self, model=model, agents={}, engine=engine, trainer=trainer, weights=weights)

    @property
    def scored_reference(self) -> bool:
        """Tell whether the log-probs of the reference come with the turns."""
        return any(name != "reward" for name in self.scorers)

    @property
    def adapters(self) -> dict[str, tuple[int, float]]:
        """Return rank and alpha of each agent's adapter; '' stands for all other agents."""
        ranks = {"": self.model.lora_rank} | {
            name: agent_config.lora_rank for name, agent_config in self.agents.items()
        }
        return {agent: (rank, self.model.lora_alpha) for agent, rank in ranks.items() if rank}

    @property
    def adapters_apart(self) -> bool:
        """Tell whether versions consist of adapters alone."""
        weights = self.weights
        whole_files = weights.transport == "disk" and weights.full_every == 1
        separable = whole_files and (not self.engine.remote or (bool(self.agents) and not self.engine.urls))
        return bool(self.adapters) and (separable if weights.adapters == "auto" else weights.adapters)

    @property
    def versions_held(self) -> int:
        """Count the versions of adapters that requests at one server use at once: the versions within the
        usual staleness, and the previous version, whose requests are about to end. 0: no adapters."""
        return self.buffer.usual_staleness + 2 if self.adapters_apart and self.engine.remote else 0

    @property
    def adapters_held(self) -> int:
        """Count the adapters of these versions and, as servers do, the base, if agents or scorers use it."""
        return self.versions_held * len(self.adapters) + ("" not in self.adapters or bool(self.scorers_lent))

    @property
    def shifts(self) -> bool:
        """Tell whether engines and trainer use the same devices, one side at a time."""
        return self.engine.colocated > 0 and self.total_steps > 0

    @property
    def ranks_on_gpus(self) -> int:
        """Count the trainer ranks that use GPUs if the machine has GPUs: none in an evaluation."""
        return self.trainer.ranks if self.total_steps and self.model.device != "cpu" else 0

    @property
    def update_mode(self) -> Literal["in_place", "retract", "abort"]:
        """Return what an update does with requests under way. A sleeping engine keeps no KV cache."""
        return "retract" if self.shifts and self.weights.mode == "in_place" else self.weights.mode

    @property
    def side_requests(self) -> bool:
        """Tell whether some turns of an agent program may be untrained."""
        return bool(self.rollout.untrained_agents or (self.agents and not self.model.lora_rank))

    @property
    def group_bytes(self) -> int:
        """Return the worst-case payload of a group in bytes."""
        token_bytes = BYTES_PER_TOKEN + self.scored_reference * (4 + 8 * self.kl.top_k)
        episode_bytes = self.rollout.rows * self.rollout.max_tokens * token_bytes
        return self.buffer.episodes_per_group * episode_bytes


DECODE_LOCK = threading.Lock()  # msgspec crashes where two threads use a type for the first time


def read_config(run_dir: Path) -> RunConfig:
    """Read a run's config.yaml, which may have keys of an earlier version. Raises ConfigError if this version
    cannot read the file."""
    path = run_dir / "config.yaml"
    try:
        recorded = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
        with DECODE_LOCK:
            return msgspec.convert(with_current_keys(recorded), RunConfig)
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(
            f"{path}: this version of asyncrl cannot read the file ({one_line(error)}); use the version "
            "that wrote it"
        ) from None
