"""Estimates the resources that a run will use, and finds settings that do not suit the model or the
machine."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from math import sqrt
from pathlib import Path

from asyncrl.config import ModelConfig, RunConfig
from asyncrl.launch.run_directory import check_creatable
from asyncrl.observe.metrics import duration_text
from asyncrl.runtime.process import is_imported
from asyncrl.trainer.footprint import needs_critic
from asyncrl.weights.checkpoint_match import language_match
from asyncrl.weights.model_files import DTYPE_BYTES
from asyncrl.weights.trained_tensors import frozen_counts, parameter_count

CPUINFO = Path("/proc/cpuinfo")
# CPUs without these flags are slower with bfloat16 than with float32.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

# Learning rates of AdamW that worked, by the number of parameters, all weights trained: 4e-4 for 0.16M and
# 2e-5 for 135M (this repository's demos); 1e-6 to 1e-5 for 0.5B to 32B (verl's and TRL's examples of GRPO,
# DAPO, NeMo RL). 0.23 / sqrt(parameters) fits all of these within a factor of 10, so a larger factor is an
# outlier; below, a factor of 15 admits the common 1e-6 at 0.5B. Adapters take 10 times the rate, also in RL
# ("LoRA Without Regret", Schulman and others, 2025).
BASE_LEARNING_RATE = 0.23
LORA_FACTOR = 10.0
LOWEST_RATE_DIVISOR = 15.0
HIGHEST_RATE_FACTOR = 10.0

# Least parameters of a timed model; in smaller models Python takes more time than matrix products.
MIN_TIMED_PARAMETERS = 10e6
# Bytes per parameter in a checkpoint: float32 weights, and AdamW's two moments.
MASTER_BYTES = 4
MOMENT_BYTES = 8

_DECIMAL_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))


def sees_gpu(config: RunConfig) -> bool | None:
    """Return whether torch sees a GPU on this machine; None on Ray, whose processes may run elsewhere."""
    if config.launch.kind == "ray":
        return None

    if not (is_imported("torch") or has_driver()):
        return False
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Return whether there is a GPU driver. Without a driver torch sees no GPU, so that a start on a CPU need
    not import torch."""
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


def multiplies_bfloat16(has_gpu: bool | None = False) -> bool:
    """Return whether the GPU or the CPU has instructions for bfloat16. On Ray (`has_gpu` is None) a GPU with
    such instructions is assumed; CPUs are judged by their flags."""
    if has_gpu is not False:
        import torch

        return has_gpu is None or torch.cuda.is_bf16_supported(including_emulation=False)
    with suppress(OSError):
        lines = CPUINFO.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return bool(BFLOAT16_FLAGS & set(flags.split()))
    return False


def cpu_speed(dtype: str, row_count: int) -> float:
    """Measure the operations per second of one thread of this CPU, in matrix products of `row_count` rows."""
    import torch
    from torch.utils.benchmark import Timer

    tensor_type = getattr(torch, dtype)
    operands = {
        "a": torch.ones(row_count, 768, dtype=tensor_type),
        "b": torch.ones(768, 768, dtype=tensor_type),
    }
    return 2 * row_count * 768**2 / Timer("a @ b.T", globals=operands, num_threads=1).timeit(5).median


def learning_rates(parameters: int, lora: bool) -> tuple[float, float, float]:
    """Return the usual learning rate, between the bounds outside of which a rate is probably a mistake."""
    usual_rate = BASE_LEARNING_RATE / sqrt(parameters) * (LORA_FACTOR if lora else 1.0)
    return usual_rate / LOWEST_RATE_DIVISOR, usual_rate, usual_rate * HIGHEST_RATE_FACTOR


def checkpoint_bytes(config: RunConfig) -> int:
    """Estimate the size of one checkpoint: the state of the policy and of a separate critic, and the
    export."""
    model = config.model
    parameters = parameter_count(model.path, train_vision=model.train_vision)
    trained_bytes = MASTER_BYTES + MOMENT_BYTES
    exported_bytes = DTYPE_BYTES[model.dtype]
    # The base of adapters is frozen.
    total_bytes = parameters * ((exported_bytes if config.adapters else trained_bytes) + exported_bytes)
    # Frozen parts are in the state and in the export, too.
    frozen = frozen_counts(model.path, train_vision=model.train_vision)
    total_bytes += 2 * sum(frozen.values()) * exported_bytes

    if needs_critic(config):
        total_bytes += parameter_count(config.critic.path or config.model.path) * trained_bytes
    return total_bytes


def describe_costs(config: RunConfig, has_gpu: bool | None) -> list[str]:
    """Describe model and checkpoints for people. `has_gpu`: None if unknown."""
    kept_count = _checkpoint_count(config)
    checkpoint_size = checkpoint_bytes(config)
    directory = _checkpoint_directory(config)
    free_text = f" of the {format_bytes(_free_bytes(directory))} free in {directory}" if directory else ""

    adapter_ranks = ", ".join(
        f"{rank} for {agent}" if agent else str(rank) for agent, (rank, _) in config.adapters.items()
    )
    trained_text = f"adapters of rank {adapter_ranks}" if adapter_ranks else "all weights trained"

    parameters = parameter_count(config.model.path, train_vision=config.model.train_vision)
    is_timed = config.model.dtype == "float32" and parameters >= MIN_TIMED_PARAMETERS
    speed_note = ""
    if is_timed and uses_gpu(config, has_gpu) is False:
        speedup = cpu_speed("bfloat16", 512) / cpu_speed("float32", 512)
        if speedup > 1.1:
            speed_note = f" (bfloat16 would be {speedup:.1f} times as fast on this CPU)"

    pause = config.checkpoint.pause
    interval_text = f"every {pause} steps" if pause < config.total_steps else "at the end"
    parts_text, frozen_text = _describe_parts(config.model)
    return [
        f"model         {parts_text}, {trained_text}{frozen_text}, {config.model.dtype}{speed_note}",
        f"checkpoints   {format_bytes(checkpoint_size)} each, {interval_text}; at most {kept_count} at once: "
        f"{format_bytes(kept_count * checkpoint_size)}{free_text}",
    ]


def _describe_parts(model: ModelConfig) -> tuple[str, str]:
    """Describe the class that reads a model, with the part that trains: "LlamaForCausalLM: 8.0 B parameters";
    and the frozen parts: "; frozen: model.visual (0.4 B)", or ''."""
    parameters = parameter_count(model.path, train_vision=model.train_vision)
    trained_text = f"{_format_count(parameters)} parameters"
    if class_name := language_match(model.path).model_class:
        trained_text = f"{class_name}: {trained_text}"

    frozen_parts = frozen_counts(model.path, train_vision=model.train_vision)
    if not frozen_parts:
        return trained_text, ""

    counts = ", ".join(f"{part} ({_format_count(count).strip()})" for part, count in frozen_parts.items())
    return f"{trained_text} in the text part", f"; frozen: {counts}"


def describe_work(config: RunConfig, train_count: int, test_count: int, prompt_tokens: int) -> list[str]:
    """Describe the amount of work of a run, given the numbers of samples and the tokens of the first
    prompt."""
    rollout = config.rollout
    validation = config.validation
    total_steps = config.total_steps
    batch_groups = config.buffer.groups_per_batch
    epochs = config.data.epochs

    last_step = -(-epochs * train_count // batch_groups)
    pass_count = total_steps * batch_groups / train_count
    warmup_steps = config.trainer.warmup_steps
    critic_warmup_steps = config.critic.warmup_steps * needs_critic(config)
    lines = [
        f"data          {train_count:,} samples, {batch_groups} per step: {pass_count:.2g} passes in "
        f"{total_steps} steps"
    ]
    if 0 < last_step < total_steps:
        lines.append(f"              data.epochs={epochs} stops the run early, at step {last_step}")

    lengths = (
        f"lengths       at most {rollout.max_tokens} tokens for prompt, turns and replies "
        f"(rollout.max_tokens) and {rollout.max_new_tokens} for each turn (rollout.max_new_tokens)"
    )
    if prompt_tokens > 0:
        lengths += f"; the first prompt has {prompt_tokens}"
    lines.append(lengths)

    if test_count and validation.samples:
        schedule_text = " and greedy" if validation.greedy else ""
        if validation.every > 0:
            schedule_text += f", every {validation.every} steps and"
        lines.append(
            f"validation    {min(validation.samples, test_count):,} of {test_count:,} held-out samples "
            f"(validation.samples), {validation.episodes} x sampled{schedule_text} before and after training"
        )

    if warmup_steps:
        lines.append(f"warm-up       learning rate: {warmup_steps} steps (trainer.warmup_steps)")
    if critic_warmup_steps:
        lines.append(
            f"warm-up       critic, before the policy trains: {critic_warmup_steps} steps "
            "(critic.warmup_steps)"
        )
    return lines


def describe_time(config: RunConfig, test_count: int, prompt_tokens: int) -> Iterator[str]:
    """Estimate how long a run takes on this CPU, assuming that matrix products of engine and trainer
    dominate."""
    token_operations = 2 * parameter_count(config.model.path)
    dtype = config.model.dtype
    validation = config.validation

    if config.engine.remote or config.rollout.agent or token_operations < 2 * MIN_TIMED_PARAMETERS:
        return

    groups = config.buffer.groups_per_batch
    group_size = config.buffer.episodes_per_group
    written_tokens = groups * group_size * max(config.rollout.max_tokens - prompt_tokens, 1)
    prompt_batch_tokens = groups * prompt_tokens
    read_tokens = prompt_batch_tokens * (1 if config.trainer.packing == "tree" else group_size)

    pass_count = 3 + (1 / config.trainer.checkpointed_every if config.trainer.checkpointed_every else 0)
    training_seconds = (
        token_operations
        * (written_tokens + read_tokens)
        * pass_count
        / cpu_speed(dtype, 512)
        / config.trainer.ranks
    )
    sampling_seconds = (
        token_operations
        * (written_tokens + prompt_batch_tokens)
        / cpu_speed(dtype, config.rollout.slots)
        / config.rollout.workers
    )

    validation_batches = (
        min(validation.samples, test_count)
        * (validation.episodes + validation.greedy)
        / (groups * group_size)
    )
    validation_count = 2 + config.total_steps // (validation.every or config.total_steps + 1)
    total_seconds = (
        config.total_steps * max(training_seconds, sampling_seconds)
        + validation_count * validation_batches * sampling_seconds
    )

    yield (
        f"time          about {duration_text(total_seconds)}: per step, {duration_text(training_seconds)} of "
        f"training and {duration_text(sampling_seconds)} of sampling in parallel, if episodes fill "
        "rollout.max_tokens; estimated from this CPU's matrix-multiplication speed"
    )


def uses_gpu(config: RunConfig, has_gpu: bool | None) -> bool | None:
    """Return `has_gpu`, or False if the configuration asks for the CPU."""
    return has_gpu if config.model.device != "cpu" else False


def cost_warnings(config: RunConfig, has_gpu: bool | None) -> Iterator[str]:
    """Yield warnings about settings that do not suit the model or the machine."""
    parameters = parameter_count(config.model.path)
    if parameters:
        lora = bool(config.adapters)
        lowest_rate, usual_rate, highest_rate = learning_rates(parameters, lora)
        if not lowest_rate <= config.trainer.lr <= highest_rate:
            trained_text = f"{_format_count(parameters)} parameters"
            if lora:
                trained_text = f"adapters on {trained_text}"
            yield (
                f"trainer.lr={config.trainer.lr:g} is far from the usual {usual_rate:.1g} for "
                f"{trained_text}: a rate below {lowest_rate:.1e} or above {highest_rate:.1e} is probably a "
                "mistake (see docs/guides/models.md)"
            )

    needed_bytes = _checkpoint_count(config) * checkpoint_bytes(config)
    directory = _checkpoint_directory(config)
    if directory and needed_bytes > _free_bytes(directory):
        yield (
            f"checkpoints need {format_bytes(needed_bytes)} (checkpoint.keep plus the one being written), "
            f"but {directory} has {format_bytes(_free_bytes(directory))} free; free some space, or set "
            "checkpoint.directory"
        )

    if config.model.dtype == "bfloat16" and not multiplies_bfloat16(uses_gpu(config, has_gpu)):
        yield (
            "model.dtype=bfloat16 is many times slower than float32 on this machine, which has no "
            "bfloat16 instructions; set model.dtype=float32 or auto"
        )

    embedded_engines = 0 if config.engine.remote else config.rollout.workers
    busy_threads = config.launch.threads * (embedded_engines + config.trainer.ranks)
    core_count = len(os.sched_getaffinity(0))
    is_local_cpu = config.launch.kind == "local" and uses_gpu(config, has_gpu) is False
    if is_local_cpu and config.launch.threads > 1 and busy_threads > core_count:
        yield (
            f"launch.threads={config.launch.threads} means {busy_threads} busy threads on {core_count} "
            "cores, where OpenMP threads that wait for each other become many times slower (95 s instead of "
            "7 s in one measurement); set launch.threads=1"
        )


def _checkpoint_count(config: RunConfig) -> int:
    """Return how many checkpoints exist at once, at most; one of them is being written."""
    return config.checkpoint.keep + config.checkpoint.best + 1


def _checkpoint_directory(config: RunConfig) -> str:
    """Return the directory of checkpoints; '' if checkpoints are at a URL."""
    directory = config.checkpoint.directory
    return "" if "://" in directory else directory or config.run_dir


def _free_bytes(directory: str) -> int:
    return shutil.disk_usage(check_creatable(Path(directory), "checkpoint.directory")).free


def _format_count(count: float) -> str:
    """Format 134515008 as 134.5 M."""
    unit, unit_name = next(
        (unit_size, prefix) for unit_size, prefix in _DECIMAL_UNITS if count >= unit_size or unit_size == 1
    )
    return f"{count / unit:.1f} {unit_name}" if unit_name else f"{count:.0f} "


def format_bytes(count: float) -> str:
    """Format 4800000000 as 4.8 GB."""
    return f"{_format_count(count).replace('B', 'G')}B"
