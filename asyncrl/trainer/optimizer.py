"""AdamW whose state exists from the start, so that a checkpoint holds all of it; and one step of it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.config import TrainerConfig


def make_adamw(model: nn.Module, trainer: TrainerConfig, *, lr: float) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) on what trains of `model`, with the moments and the decay of `trainer`.

    torch makes a parameter's state when its first gradient comes. What is saved before (a critic's warm-up,
    a batch that was skipped or is under way) would not fit a learner that expects the state of them all.
    """
    parameters = trainable(model)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=trainer.betas, weight_decay=trainer.weight_decay)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, scale: float, clip: float
) -> float | None:
    """Multiply the gradients by `scale`, which makes them those of the batch's loss; clip; step.

    Returns their norm before clipping; None where it is not finite: then no step was taken. `clip` 0: off.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in grads:
        grad.mul_(scale)
    total = torch.nn.utils.get_total_norm(grads)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if clip:
        torch.nn.utils.clip_grads_with_norm_(trainable(model), clip, total)
    if not math.isfinite(norm := float(total)):
        return None
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
