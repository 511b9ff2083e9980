"""The trainer's memory beside that of the machine. These functions import torch."""

from __future__ import annotations

import psutil

from asyncrl.config import LESS_MEMORY, RunConfig, TrainerConfig
from asyncrl.errors import ConfigError, recorded
from asyncrl.launch.estimates import EXPORTED, MASTER, own_critic, sized
from asyncrl.launch.model_directory import parameter_count
from asyncrl.runtime.imports import quick_imports
from asyncrl.runtime.memory import main_memory


def static_bytes(config: RunConfig) -> int:
    """Weights, gradients and optimizer state of all ranks together, also those of a critic and of a reference
    of its own, in all replicas. Of adapters, which take little, the model only: it is a lower bound."""
    trained = MASTER * (2 + _state_share(config.trainer))
    size = parameter_count(config.model.path) * (MASTER if config.model.lora_rank else trained)
    if own_critic(config):
        size += parameter_count(config.critic.path or config.model.path) * trained
    if config.kl.where != "none" and (config.kl.reference or not config.model.lora_rank):
        size += parameter_count(config.kl.reference or config.model.path) * MASTER
    return int(size) * config.trainer.replicas


def version_bytes(config: RunConfig) -> int:
    """Main memory of a trainer rank for versions on their way out, at most: copies of its shards that ranks
    collect, and the next one; where ranks send only what has changed, the one that was sent last."""
    from asyncrl.trainer.publishing import readers

    ranks = config.trainer.ranks
    copies = readers(config, ranks) + 1 + (ranks > 1 and config.weights.full_every > 1)
    shards = ranks // config.trainer.replicas
    return copies * parameter_count(config.model.path) * EXPORTED[config.model.dtype] // shards


def _state_share(trainer: TrainerConfig) -> float:
    """Elements that the optimizer keeps per parameter: 2 for AdamW."""
    from torch import Tensor, nn

    from asyncrl.trainer.optimizer import make_optimizer

    layer = nn.Linear(64, 64, bias=False)
    state = make_optimizer(layer, trainer, lr=1.0).state[layer.weight]
    return sum(value.numel() for value in state.values() if isinstance(value, Tensor)) // 64 / 64


def room(config: RunConfig, gpu: bool | None) -> int | None:
    """Memory for all ranks: that of their GPUs, or of the machine. None where it is not known: on Ray."""
    if gpu is None:
        return None
    if gpu and config.model.device != "cpu" and not config.trainer.offload_optimizer:
        from torch.cuda import device_count, get_device_properties

        devices = range(min(config.trainer.ranks, device_count()))
        return sum(int(get_device_properties(index).total_memory) for index in devices)
    return main_memory().total


def check_memory(config: RunConfig, gpu: bool | None) -> None:
    """ConfigError if what stays in memory cannot fit. What a micro-batch takes on top is only estimated, by
    the dry run, and tried before the first step."""
    needed, there = static_bytes(config), room(config, gpu)
    if there is not None and needed > there:
        raise ConfigError(
            f"weights, gradients and optimizer state of the trainer take {sized(needed)}, and there are "
            f"{sized(there)}; set model.lora_rank, a trainer.optimizer with less state, a model.path with "
            "fewer parameters, fewer trainer.replicas, or, with GPUs, more trainer.ranks or "
            "trainer.offload_optimizer=true"
        )


def describe_memory(config: RunConfig, gpu: bool | None) -> tuple[str, str]:
    """A line of the plan, or two with adapters, and a warning; '' for each that there is not."""
    with quick_imports():
        import torch._dynamo  # noqa: F401 (now, without garbage collection)

        from asyncrl.trainer.footprint import footprint
    with recorded() as failure:
        found = footprint(config)
    if failure:
        return "", f"the memory of a trainer rank is not estimated: {failure.line}"
    ranks, there, own = config.trainer.ranks, room(config, gpu), psutil.Process().memory_info().rss
    out = version_bytes(config)
    parts = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer}
    each = ", ".join(f"{name} {sized(size)}" for name, size in parts.items())
    micro = f"a micro-batch of {found.rows} x {found.length} tokens {sized(found.work)}"
    line = (
        f"memory        tensors of a trainer rank: {each}, {micro}, {sized(found.total)} in all; "
        f"its process takes about {sized(own)} beside them, and versions on their way out "
        f"{sized(out)} of main memory"
    )
    if found.adapted:
        line += f"\nadapters      {found.adapted}"
    needed = ranks * (found.total if gpu else found.total + out)
    if there is None or needed <= there:
        return line, ""
    return line, (
        f"{ranks} trainer ranks need {sized(needed)}, and there are {sized(there)}; set a "
        f"smaller trainer.micro_batch_tokens, {LESS_MEMORY}"
    )
