"""Inputs of policy losses, made from plain lists or at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction
from asyncrl.algorithms.credit import NONE, Trace
from asyncrl.algorithms.losses import LossInput, TokenLoss
from asyncrl.algorithms.recipe import losses
from asyncrl.types import EpisodeResult


def real(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(list(values), dtype=dtype)


def loss_input(
    logp: Sequence[float],
    *,
    dtype: torch.dtype = torch.float64,
    trainable: Sequence[bool] | None = None,
    row: Sequence[int] | None = None,
    weight: Sequence[float] | None = None,
    **columns: Sequence[float],
) -> LossInput:
    """Return a loss's input.

    Log-probs that are left out equal `logp`; advantage and weight are 1, and all tokens belong to a
    trainable episode.
    """
    count = len(logp)
    named = {"prox": logp, "mu": logp, "advantage": [1.0] * count, **columns}
    weights = real(weight or [1.0] * count, dtype)
    nowhere = torch.zeros(count, dtype=torch.bool)
    return LossInput(
        logp=real(logp, dtype).requires_grad_(),
        row=torch.tensor([0] * count if row is None else list(row)),
        turn=torch.zeros(count, dtype=torch.long),
        lag=torch.zeros(count, dtype=torch.long),
        trainable=torch.tensor([True] * count if trainable is None else trainable),
        correction=Correction(weights, torch.ones_like(weights), nowhere, nowhere),
        **{name: real(values, dtype) for name, values in named.items()},
    )


def evaluate(name: str, inputs: LossInput, **options: Any) -> tuple[TokenLoss, Tensor]:
    """Return the loss, and the derivative of its sum by log pi [N]."""
    token = losses.get(name).bound(options, "algorithm.loss").of(inputs)
    (gradient,) = torch.autograd.grad(token.value.sum(), inputs.logp)
    return token, gradient


def random_input(
    seed: int, *, behaviour: bool, by_episode: bool = False, spread: float = 0.5, prepared: Any = None
) -> LossInput:
    """Episodes of 1 to 8 tokens, every other one with a stale prefix, log-ratios of size `spread`.

    Where tokens are not trainable all log-probs are equal. `behaviour`: weights of any size, else 0 or 1.
    `by_episode`: one advantage and weight per episode. `prepared`: drawn per token from these values.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=12)
    row = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    trainable = (row % 2 == 0) | (positions >= lengths[row] // 2)
    logp = -rng.exponential(1.0, len(row)) - 0.01
    prox, mu, reference = (
        np.where(trainable, np.minimum(logp + spread * rng.normal(size=len(row)), 0.0), logp)
        for _ in range(3)
    )
    drawn = row if by_episode else np.arange(len(row))
    advantage = rng.normal(size=len(row))[drawn]
    weight = rng.choice([0.0, 0.6, 1.0, 1.7] if behaviour else [0.0, 1.0, 1.0], size=len(row))[drawn]
    more = {} if prepared is None else {"prepared": rng.choice(prepared, size=len(row))}
    return loss_input(
        logp.tolist(),
        prox=prox,
        mu=mu,
        advantage=advantage,
        reference=reference,
        row=row.tolist(),
        trainable=trainable.tolist(),
        weight=weight.tolist(),
        **more,
    )


def trace(
    prox: Sequence[float],
    mu: Sequence[float] | None = None,
    advantage: Sequence[float] | None = None,
    *,
    trainable: Sequence[bool] | None = None,
    reference: Sequence[float] | None = None,
    group: str = "g",
    reward: float = 0.0,
) -> Trace:
    count = len(prox)
    return Trace(
        uid="u",
        group=group,
        own=EpisodeResult(reward),
        advantage=np.asarray(advantage if advantage is not None else [1.0] * count, dtype=float),
        prox=np.asarray(prox, dtype=float),
        mu=np.asarray(mu if mu is not None else prox, dtype=float),
        trainable=np.asarray([True] * count if trainable is None else trainable, dtype=bool),
        reference=NONE if reference is None else np.asarray(reference, dtype=float),
    )
