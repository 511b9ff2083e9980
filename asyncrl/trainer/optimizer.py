"""AdamW whose state is there from the start, so a checkpoint always holds, and expects, all of it."""

from __future__ import annotations

import torch
from torch import nn

from asyncrl.config import TrainerConfig


def make_adamw(model: nn.Module, trainer: TrainerConfig, *, lr: float) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) on what trains of `model`, with the moments and the decay of `trainer`.

    torch makes a parameter's state when its first gradient comes. What is saved before (a critic's warm-up,
    a batch that was skipped or is under way) would not fit a learner that expects the state of them all.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=trainer.betas, weight_decay=trainer.weight_decay)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
