"""Estimates what a run will take of the machine, and finds settings far from what model and machine take."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from math import sqrt
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.launch.run_directory import creatable
from asyncrl.observe.metrics import duration
from asyncrl.runtime.process import is_imported
from asyncrl.trainer.footprint import own_critic
from asyncrl.weights.model_files import DTYPE_BYTES, parameter_count

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # other CPUs take longer with bfloat16 than with float32

# Learning rates of AdamW that worked, by the number of parameters, all weights trained: 4e-4 for 0.16M and
# 2e-5 for 135M (this repository's demos); 1e-6 to 1e-5 for 0.5B to 32B (verl's and TRL's examples of GRPO,
# DAPO, NeMo RL). 0.23 / sqrt(parameters) goes through them within a factor of 10, so more than that is far
# from all of them; below, 15, for the common 1e-6 at 0.5B. Adapters take 10 times as much, in RL, too
# ("LoRA Without Regret", Schulman and others, 2025).
RATE = 0.23
LORA = 10.0
TIMES_LOWER = 15.0
TIMES_HIGHER = 10.0

LEAST_TIMED = 10e6  # parameters; in smaller models, Python takes more time than products
# bytes per parameter in a checkpoint: float32 weights, AdamW's two moments
MASTER = 4
MOMENTS = 8

_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))


def sees_gpu(config: RunConfig) -> bool | None:
    """Tell whether torch sees a GPU on this machine; None on Ray, whose processes may be elsewhere."""
    if config.launch.kind == "ray":
        return None

    if not (is_imported("torch") or has_driver()):
        return False
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Tell whether there is a driver, without which torch sees no GPU: a start on a CPU imports no torch."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()  # AMD


def count_gpus(config: RunConfig) -> int:
    """Count the GPUs of this machine that torch sees; 0 on Ray."""
    if not sees_gpu(config):
        return 0
    from torch.cuda import device_count

    return device_count()


def multiplies_bfloat16(gpu: bool | None = False) -> bool:
    """Tell whether the CPU has instructions for it, by its flags; or the GPU (None: expected, on Ray)."""
    if gpu is not False:
        import torch

        return gpu is None or torch.cuda.is_bf16_supported(including_emulation=False)
    with suppress(OSError):
        lines = CPUINFO.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return bool(BFLOAT16 & set(flags.split()))
    return False


def cpu_speed(dtype: str, rows: int) -> float:
    """Operations per second of one thread of this CPU in products of so many rows, measured at once."""
    import torch
    from torch.utils.benchmark import Timer

    kind = getattr(torch, dtype)
    given = {"a": torch.ones(rows, 768, dtype=kind), "b": torch.ones(768, 768, dtype=kind)}
    return 2 * rows * 768**2 / Timer("a @ b.T", globals=given, num_threads=1).timeit(5).median


def learning_rates(parameters: int, lora: bool) -> tuple[float, float, float]:
    """The usual learning rate, between the bounds outside of which one is probably a mistake."""
    usual = RATE / sqrt(parameters) * (LORA if lora else 1.0)
    return usual / TIMES_LOWER, usual, usual * TIMES_HIGHER


def checkpoint_bytes(config: RunConfig) -> int:
    """About what one checkpoint takes: the state of the policy and of a critic of its own, and the export."""
    parameters = parameter_count(config.model.path)
    trained = MASTER + MOMENTS
    exported = DTYPE_BYTES[config.model.dtype]
    size = parameters * ((exported if config.adapters else trained) + exported)  # adapters' base is frozen

    if own_critic(config):
        size += parameter_count(config.critic.path or config.model.path) * trained
    return size


def describe_costs(config: RunConfig, gpu: bool | None) -> list[str]:
    """Model and checkpoints for a person to read. `gpu`: whether there is one; None: unknown."""
    kept = _kept(config)
    each = checkpoint_bytes(config)
    place = _place(config)
    room = f" of {sized(_free(place))} free in {place}" if place else ""

    ranks = ", ".join(
        f"{rank} of {agent}" if agent else str(rank) for agent, (rank, _) in config.adapters.items()
    )
    of = f"adapters of rank {ranks}" if ranks else "all weights trained"

    counts = config.model.dtype == "float32" and parameter_count(config.model.path) >= LEAST_TIMED
    note = ""
    if counts and on_gpu(config, gpu) is False:
        times = cpu_speed("bfloat16", 512) / cpu_speed("float32", 512)
        note = f" (bfloat16 multiplies {times:.1f} times as fast on this CPU)" * (times > 1.1)

    size = _short(parameter_count(config.model.path))
    pause = config.checkpoint.pause
    when = f"every {pause} steps" if pause < config.total_steps else "at the end"

    return [
        f"model         {size} parameters, {of}, {config.model.dtype}{note}",
        f"checkpoints   {sized(each)} each, {when}; at most {kept} at once: {sized(kept * each)}{room}",
    ]


def describe_work(config: RunConfig, train: int, test: int, prompt: int) -> list[str]:
    """Describe what a run goes through, with so many samples and tokens of the first prompt."""
    rollout = config.rollout
    held_out = config.validation
    steps = config.total_steps
    batch = config.buffer.groups_per_batch
    epochs = config.data.epochs

    ends = -(-epochs * train // batch)
    share = steps * batch / train
    warming = config.trainer.warmup_steps
    critic = config.critic.warmup_steps * own_critic(config)
    often = " and greedily" * held_out.greedy + f", every {held_out.every} steps," * (held_out.every > 0)

    lines = {
        f"data          {train:,} samples, {batch} a step: {share:.2g} passes in {steps} steps": True,
        f"              data.epochs={epochs} ends the run before, at step {ends}": 0 < ends < steps,
        f"lengths       prompt, turns and replies share rollout.max_tokens={rollout.max_tokens}, a turn has "
        f"at most rollout.max_new_tokens={rollout.max_new_tokens}"
        + f"; the first prompt has {prompt}"
        * (prompt > 0): True,
        f"validation    {min(held_out.samples, test):,} of {test:,} held-out samples (validation.samples), "
        f"{held_out.episodes} x sampled{often} before and after training": test and held_out.samples,
        f"warm-up       of the learning rate: {warming} steps (trainer.warmup_steps)": warming,
        f"warm-up       of the critic, the policy waits: {critic} steps (critic.warmup_steps)": critic,
    }

    return [line for line, applies in lines.items() if applies]


def describe_time(config: RunConfig, test: int, prompt: int) -> Iterator[str]:
    """About how long a run takes on this CPU, if products of the engine and the trainer do most of it."""
    size = 2 * parameter_count(config.model.path)
    dtype = config.model.dtype
    held_out = config.validation

    if config.engine.remote or config.rollout.agent or size < 2 * LEAST_TIMED:
        return

    groups = config.buffer.groups_per_batch
    each = config.buffer.episodes_per_group
    written = groups * each * max(config.rollout.max_tokens - prompt, 1)
    asked = groups * prompt
    read = asked * (1 if config.trainer.packing == "tree" else each)

    passes = 3 + (1 / config.trainer.checkpointed_every if config.trainer.checkpointed_every else 0)
    training = size * (written + read) * passes / cpu_speed(dtype, 512) / config.trainer.ranks
    sampling = size * (written + asked) / cpu_speed(dtype, config.rollout.slots) / config.rollout.workers

    played = min(held_out.samples, test) * (held_out.episodes + held_out.greedy) / (groups * each)
    times = 2 + config.total_steps // (held_out.every or config.total_steps + 1)
    total = config.total_steps * max(training, sampling) + times * played * sampling

    yield (
        f"time          about {duration(total)}, a step {duration(training)} of training and "
        f"{duration(sampling)} of sampling side by side, if episodes fill rollout.max_tokens; by this CPU's "
        "speed in products"
    )


def on_gpu(config: RunConfig, gpu: bool | None) -> bool | None:
    """`gpu`, unless the configuration leaves it aside."""
    return gpu if config.model.device != "cpu" else False


def cost_warnings(config: RunConfig, gpu: bool | None) -> Iterator[str]:
    """Settings far from what model and machine take."""
    parameters = parameter_count(config.model.path)
    if parameters:
        lora = bool(config.adapters)
        low, usual, high = learning_rates(parameters, lora)
        if not low <= config.trainer.lr <= high:
            of = "adapters on " * lora + f"{_short(parameters)} parameters"
            yield (
                f"trainer.lr={config.trainer.lr:g} is far from the usual {usual:.1g} for {of}: less than "
                f"{low:.1e} or more than {high:.1e} is probably a mistake (docs/models.md)"
            )

    needed = _kept(config) * checkpoint_bytes(config)
    place = _place(config)
    if place and needed > _free(place):
        yield (
            f"checkpoints need {sized(needed)} (checkpoint.keep and one being written), and "
            f"{place} has {sized(_free(place))} free; free some, or set checkpoint.directory"
        )

    if config.model.dtype == "bfloat16" and not multiplies_bfloat16(on_gpu(config, gpu)):
        yield (
            "model.dtype=bfloat16 takes many times the time of float32 on this machine, which has no "
            "instructions for it; set model.dtype=float32, or auto"
        )

    embedded = 0 if config.engine.remote else config.rollout.workers
    busy = config.launch.threads * (embedded + config.trainer.ranks)
    cores = len(os.sched_getaffinity(0))
    here = config.launch.kind == "local" and on_gpu(config, gpu) is False
    if here and config.launch.threads > 1 and busy > cores:
        yield (
            f"launch.threads={config.launch.threads} makes {busy} busy threads on {cores} cores: OpenMP "
            "threads that wait for each other take many times as long (7 s became 95 s); set launch.threads=1"
        )


def _kept(config: RunConfig) -> int:
    """Checkpoints there may be at once, one of them being written."""
    return config.checkpoint.keep + config.checkpoint.best + 1


def _place(config: RunConfig) -> str:
    """Return the directory of checkpoints; '' if they are at a URL."""
    directory = config.checkpoint.directory
    return "" if "://" in directory else directory or config.run_dir


def _free(place: str) -> int:
    return shutil.disk_usage(creatable(Path(place), "checkpoint.directory")).free


def _short(count: float) -> str:
    """134515008 as 134.5 M."""
    unit, name = next((u, n) for u, n in _UNITS if count >= u or u == 1)
    return f"{count / unit:.1f} {name}" if name else f"{count:.0f} "


def sized(count: float) -> str:
    """4800000000 as 4.8 GB."""
    return f"{_short(count).replace('B', 'G')}B"
