"""The learning rate as a function of `step`, so that skipped, replayed and resumed steps agree."""

from __future__ import annotations

import math

from asyncrl.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Rate of the optimizer step that trains batch `step` (0-based).

    Linear warm-up reaches the peak with the last warm-up step; then the schedule falls to
    `lr_end`·lr at the last step. A step beyond `total_steps` keeps the final rate.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    length = max(total_steps - 1 - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / length, 1.0)
    shape = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_end + (1 - config.lr_end) * shape)
