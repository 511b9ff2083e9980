"""Behaviour correction: the importance weight of a token sampled by an older policy.

rho = prox/mu, with mu the engine's log-prob and prox the policy at the start of the optimizer step;
with one step per batch prox is the current policy itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config import AlgorithmConfig
from asyncrl.registry import Registry

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class CorrectionInput:
    """Tokens [N]. `log_ratio` is log prox - log mu, without gradient and finite."""

    log_ratio: Tensor
    advantage: Tensor
    config: AlgorithmConfig


@dataclass(frozen=True)
class Correction:
    """Tokens [N], without gradient. `weight` multiplies the loss and is 0 where `masked`."""

    weight: Tensor
    ratio: Tensor
    masked: Tensor
    truncated: Tensor


corrections: Registry[Callable[[CorrectionInput], Correction]] = Registry("correction")


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±20, so that it stays finite in float32."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@corrections.register("mask_truncate")
def mask_truncate(given: CorrectionInput) -> Correction:
    """weight = 1[low <= rho <= high]·min(rho, C), C = cap_positive or, where A < 0, cap_negative.

    Mask: IcePop; truncation: TIS. The bounds are on rho itself, not on its negative logarithm.
    """
    ratio, config = ratio_of(given.log_ratio), given.config
    masked = (ratio < config.mask_low) | (ratio > config.mask_high)
    negative = given.advantage < 0
    cap = torch.where(negative, config.cap_negative, config.cap_positive).to(ratio.dtype)
    weight = torch.minimum(ratio, cap).masked_fill(masked, 0.0)
    return Correction(weight, ratio, masked, (ratio > cap) & ~masked)


@corrections.register("none")
def none(given: CorrectionInput) -> Correction:
    """weight = 1: right only where prox = mu. The ratio is still reported."""
    ratio = ratio_of(given.log_ratio)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return Correction(torch.ones_like(ratio), ratio, nothing, nothing)
