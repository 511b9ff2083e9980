"""Computes the critic's targets and loss, and metrics of how well it predicts."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.normalise import Moments


def value_loss(value: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """½·max((V − G)², (V_old + clamp(V − V_old, ±clip) − G)²) and where the clipped term decides, both [N].

    Source: the value clipping of PPO's implementations (arXiv 1707.06347, 2005.12729). `value` carries the
    gradient; `old` is V at the start of the batch, `returns` G = advantage before whitening + V_old. clip 0:
    plain ½·(V − G)².
    """
    free = (value - returns) ** 2
    if not clip:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    move = value - old
    held = (old + move.clamp(-clip, clip) - returns) ** 2
    return torch.maximum(free, held) / 2, (held > free) & (move.abs() > clip)


def explained_variance(returns: Moments, errors: Moments) -> float | None:
    """1 − Var(G − V)/Var(G) over the batch's tokens. None where returns do not vary: nothing to explain."""
    return 1 - errors.spread / returns.spread if returns.varies else None
