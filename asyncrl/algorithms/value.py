"""What the critic is trained on, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

TOTAL = "_value/"  # names of the sums among a batch's totals


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


def fit_totals(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Sums of one episode, [T] each, by name; totals of parts of a batch add up to those of the batch."""
    error = returns - values
    sums = {
        "tokens": len(returns),
        "returns": returns.sum(),
        "returns2": (returns**2).sum(),
        "errors": error.sum(),
        "errors2": (error**2).sum(),
    }
    return {TOTAL + name: float(value) for name, value in sums.items()}


def explained_variance(totals: Mapping[str, float]) -> float | None:
    """1 − Var(G − V)/Var(G) over the batch's tokens. None where returns do not vary: nothing to explain."""

    def spread(name: str) -> float:
        return totals[f"{TOTAL}{name}2"] - totals[TOTAL + name] ** 2 / totals[f"{TOTAL}tokens"]

    if not totals.get(f"{TOTAL}tokens") or spread("returns") <= 1e-12 * totals[f"{TOTAL}returns2"]:
        return None
    return 1 - spread("errors") / spread("returns")
