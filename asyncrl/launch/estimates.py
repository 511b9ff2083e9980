"""What a run will take of the machine, and settings that are far from what its model and the machine take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.launch.model_directory import parameter_count
from asyncrl.launch.run_directory import creatable

# Learning rates of AdamW that worked, by the number of parameters, all weights trained: 4e-4 for 0.16M and
# 2e-5 for 135M (this repository's demos); 1e-6 to 1e-5 for 0.5B to 32B (verl's and TRL's examples of GRPO,
# DAPO, NeMo RL). 0.23 / sqrt(parameters) goes through them within a factor of 10, so more than that is far
# from all of them; below, 15, for the common 1e-6 at 0.5B. Adapters take 10 times as much, in RL, too
# ("LoRA Without Regret", Schulman and others, 2025).
RATE, LORA = 0.23, 10.0
TIMES_LOWER, TIMES_HIGHER = 15.0, 10.0

MASTER, MOMENTS = 4, 8  # bytes per parameter in a checkpoint: float32 weights, AdamW's two moments
EXPORTED = {"float32": 4, "bfloat16": 2}

_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))


def learning_rates(parameters: int, lora: bool) -> tuple[float, float, float]:
    """The usual learning rate, between the bounds outside of which one is probably a mistake."""
    usual = RATE / sqrt(parameters) * (LORA if lora else 1.0)
    return usual / TIMES_LOWER, usual, usual * TIMES_HIGHER


def checkpoint_bytes(config: RunConfig) -> int:
    """About what one checkpoint takes: the state of the policy and of a critic of its own, and the export."""
    parameters, trained = parameter_count(config.model.path), MASTER + MOMENTS
    size = parameters * ((MASTER if config.model.lora_rank else trained) + EXPORTED[config.model.dtype])
    if own_critic(config):
        size += parameter_count(config.critic.path or config.model.path) * trained
    return size


def describe_costs(config: RunConfig, gpu: bool | None) -> list[str]:
    """Model and checkpoints for a person to read. `gpu`: whether there is one; None: unknown."""
    kept, each = _kept(config), checkpoint_bytes(config)
    place = _place(config)
    room = f" of {sized(_free(place))} free in {place}" if place else ""
    of = f"adapters of rank {config.model.lora_rank}" if config.model.lora_rank else "all weights trained"
    slow = config.model.dtype == "float32" and (gpu is False or config.model.device == "cpu")
    note = " (about 2.5 times the time of bfloat16, on a CPU with avx512_bf16)" if slow else ""
    size, pause = _short(parameter_count(config.model.path)), config.checkpoint.pause
    when = f"every {pause} steps" if pause < config.total_steps else "at the end"
    return [
        f"model         {size} parameters, {of}, {config.model.dtype}{note}",
        f"checkpoints   {sized(each)} each, {when}; at most {kept} at once: {sized(kept * each)}{room}",
    ]


def cost_warnings(config: RunConfig, gpu: bool | None) -> Iterator[str]:
    """Settings far from what model and machine take."""
    parameters = parameter_count(config.model.path)
    if parameters:
        lora = bool(config.model.lora_rank)
        low, usual, high = learning_rates(parameters, lora)
        if not low <= config.trainer.lr <= high:
            of = "adapters on " * lora + f"{_short(parameters)} parameters"
            yield (
                f"trainer.lr={config.trainer.lr:g} is far from the usual {usual:.1g} for {of}: less than "
                f"{low:.1e} or more than {high:.1e} is probably a mistake (docs/models.md)"
            )
    needed, place = _kept(config) * checkpoint_bytes(config), _place(config)
    if place and needed > _free(place):
        yield (
            f"checkpoints need {sized(needed)} (checkpoint.keep and one being written), and "
            f"{place} has {sized(_free(place))} free; free some, or set checkpoint.directory"
        )
    embedded = 0 if config.engine.remote else config.rollout.workers
    busy, cores = config.launch.threads * (embedded + config.trainer.ranks), len(os.sched_getaffinity(0))
    on_cpu = gpu is False or config.model.device == "cpu"
    if config.launch.threads > 1 and on_cpu and config.launch.kind == "local" and busy > cores:
        yield (
            f"launch.threads={config.launch.threads} makes {busy} busy threads on {cores} cores: OpenMP "
            "threads that wait for each other take many times as long (7 s became 95 s); set launch.threads=1"
        )


def own_critic(config: RunConfig) -> bool:
    """The advantage needs a critic, with a backbone of its own."""
    from asyncrl.algorithms.recipe import compose  # imports torch

    return compose(config).own_critic


def _kept(config: RunConfig) -> int:
    """Checkpoints there may be at once, one of them being written."""
    return config.checkpoint.keep + config.checkpoint.best + 1


def _place(config: RunConfig) -> str:
    """Where checkpoints are; '' if that is at a URL."""
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
