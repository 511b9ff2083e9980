"""A custom advantage, correction and loss. Keyword-only parameters are options in the configuration."""

from __future__ import annotations

import statistics
from typing import Annotated

import torch
from msgspec import Meta

from asyncrl.algorithms.advantages import AdvantageInput, AdvantageValues, advantage
from asyncrl.algorithms.correction import CorrectionInput, CorrectionMask, correction
from asyncrl.algorithms.losses import LossInput, TokenLoss, loss

Positive = Annotated[float, Meta(gt=0)]


@advantage("median_baseline")
def median_baseline(episode: AdvantageInput, *, scale: Positive = 1.0) -> AdvantageValues:
    """scale·(R − median): one lucky sibling does not move the baseline."""
    return scale * (episode.own.reward - statistics.median(member.reward for member in episode.siblings))


@correction("soft_cap", kind="weight")
def soft_cap(tokens: CorrectionInput, *, cap: Positive = 2.0) -> CorrectionMask:
    """w = C·tanh(ρ/C): close to ρ below the cap, never above it."""
    return CorrectionMask(weight=cap * torch.tanh(tokens.log_ratio.exp() / cap))


@loss("cautious", ratio="prox")
def cautious(tokens: LossInput, *, negative: Positive = 0.5) -> TokenLoss:
    """L = −sg(w)·A·log π, times `negative` where A < 0: failures push less than successes pull."""
    strength = torch.ones_like(tokens.logp).masked_fill(tokens.advantage < 0, negative)
    value = -tokens.correction.weight * strength * tokens.advantage * tokens.logp
    return TokenLoss(value, clipped=torch.zeros_like(tokens.trainable))
