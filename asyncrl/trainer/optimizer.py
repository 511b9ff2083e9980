"""Makes optimizers by name, with their whole state from the start, so that a checkpoint holds all of it;
takes a step; computes the learning rate of a step; detects spikes of the gradient norm.

A batch spikes if its gradient norm is not finite, or if it is more than `trainer.spike_factor` times the
median of the batches before (up to NORM_WINDOW, from LEAST_NORMS on). The policy loss would not do: its
advantages have mean zero, so it is small and of either sign while a run diverges.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from asyncrl.config import TrainerConfig
from asyncrl.errors import AsyncrlError, ConfigError, lacks_memory, one_line
from asyncrl.registry import Registry, name_and_options

optimizers: Registry[Callable[..., Optimizer]] = Registry("optimizer")
optimizers.register("sgd")(SGD)


@optimizers.register("adamw")
def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    **options: Any,
) -> AdamW:
    """Make AdamW (arXiv 1711.05101), fused: a step of 30M float32 parameters takes one CPU thread 0.05 s
    instead of 0.20; weights differ by rounding."""
    all_options: dict[str, Any] = {"fused": True} | options
    return AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, **all_options)


def make_optimizer(model: nn.Module, trainer: TrainerConfig, *, lr: float) -> Optimizer:
    """Make `trainer.optimizer` for the trained parameters of `model`, with all its state.

    torch creates a parameter's state with its first gradient. A checkpoint saved before (during a critic's
    warm-up, after a skipped batch, or while a batch is under way) would not fit a learner that expects the
    state of all parameters. So a first step is taken here, with zero gradients, rate 0 and no decay, and is
    not counted. State that does not begin with zeros stays as that step leaves it: Rprop, NAdam and ASGD
    begin otherwise than in torch.
    Raises ConfigError when the optimizer cannot be built, or cannot step on sharded weights, as torch's
    Adafactor cannot.
    """
    parameters = trainable(model)
    optimizer = build_optimizer(parameters, trainer, lr)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    configured_settings = [
        {key: group[key] for key in group.keys() & {"lr", "weight_decay"}} for group in optimizer.param_groups
    ]
    for group, group_settings in zip(optimizer.param_groups, configured_settings, strict=True):
        group.update(dict.fromkeys(group_settings, 0.0))

    try:
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        if lacks_memory(error):
            raise
        raise ConfigError(f"trainer.optimizer: cannot update sharded weights ({one_line(error)})") from error

    optimizer.zero_grad()
    for group, group_settings in zip(optimizer.param_groups, configured_settings, strict=True):
        group.update(group_settings)

    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()

    return optimizer


def build_optimizer(parameters: list[nn.Parameter], trainer: TrainerConfig, lr: float) -> Optimizer:
    """Make the optimizer that `trainer.optimizer` names, without state. Raises ConfigError."""
    key = "trainer.optimizer"

    name, options = name_and_options(trainer.optimizer, key)
    make_named = optimizers.load(name, key)
    with ConfigError.instead_of(TypeError, ValueError, RuntimeError, text=f"{key}: {name} cannot be built"):
        accepted = inspect.signature(make_named).parameters
        configured = {
            option: value
            for option, value in {"betas": trainer.betas, "weight_decay": trainer.weight_decay}.items()
            if option in accepted
        }
        optimizer = make_named(parameters, **{"lr": lr, **configured, **options})

    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{key}: {name} returns {type(optimizer).__name__}, not a torch.optim.Optimizer")

    return optimizer


def take_step(
    trained_parts: Iterable[list[nn.Parameter]],
    optimizer: Optimizer,
    lr: float,
    scale: float,
    clip_norm: float,
    largest_norm: float = math.inf,
) -> tuple[list[float], bool]:
    """Multiply the gradients by `scale`, which turns them into gradients of the batch's loss; clip each part
    separately; step.

    Returns the parts' norms before clipping, and whether the step was taken: not if a norm is not finite, or
    the total norm is over `largest_norm`. `clip_norm` 0: no clipping.
    """
    norms = []
    for part_parameters in trained_parts:
        gradients = [parameter.grad for parameter in part_parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale)
        total_norm = torch.nn.utils.get_total_norm(gradients)
        total_norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        if clip_norm:
            torch.nn.utils.clip_grads_with_norm_(part_parameters, clip_norm, total_norm)
        norms.append(float(total_norm))

    if not math.isfinite(math.hypot(*norms)) or math.hypot(*norms) > largest_norm:
        return norms, False
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()

    return norms, True


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def learning_rate(config: TrainerConfig, steps_done: int, total_steps: int) -> float:
    """Return the rate of the optimizer step that follows `steps_done` steps, a function of this number alone,
    so that skipped, replayed and resumed steps agree.

    Linear warm-up reaches the peak with the last warm-up step; then the schedule falls to `lr_end`·lr at the
    last step. A step beyond `total_steps` keeps the final rate.
    """
    if steps_done < config.warmup_steps:
        return config.lr * (steps_done + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    decay_steps = max(total_steps - 1 - config.warmup_steps, 1)
    decay_done = min((steps_done - config.warmup_steps) / decay_steps, 1.0)
    decay_factor = (
        1 - decay_done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * decay_done)) / 2
    )

    return config.lr * (config.lr_end + (1 - config.lr_end) * decay_factor)


# Batches whose gradient norms are kept, and batches from which on a limit holds.
NORM_WINDOW = 32
LEAST_NORMS = 8
NORM_PREFIX = "grad_norm/"  # keys in a learner's state, so that repeated steps are judged the same way


class SpikeError(AsyncrlError):
    """The batch of a step spiked, and is to be left out: its gradient `norm` exceeds `limit`."""

    def __init__(self, step: int, norm: float, limit: float) -> None:
        excess = f", above {limit:g} (trainer.spike_factor)" if math.isfinite(norm) else ""
        super().__init__(f"step {step} spiked: its gradient norm is {norm:g}{excess}")


def norm_limit(state: dict[str, float], factor: float) -> float:
    """Return the largest norm that is no spike."""
    norms = [norm for name, norm in state.items() if name.startswith(NORM_PREFIX)]
    return factor * median(norms) if factor and len(norms) >= LEAST_NORMS else math.inf


def record_norm(state: dict[str, float], step: int, norm: float) -> None:
    """Record the norm of a step that was taken."""
    state[f"{NORM_PREFIX}{step % NORM_WINDOW}"] = norm
