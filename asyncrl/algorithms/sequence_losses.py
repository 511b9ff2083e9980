"""Policy losses whose ratio is that of an episode, over its fresh tokens only.

Of an episode with a stale prefix that is the exact ratio of the suffix given the prefix, and the mean
length is the suffix's. Each token carries the episode's ratio and passes its own part of the gradient, so
any weight, mask and aggregation composes; with equal weights `seq_mean_token_mean` gives the papers'
sequence objective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from msgspec import Meta

from asyncrl.algorithms.correction import ratio_of
from asyncrl.algorithms.losses import LossInput, TokenLoss, loss
from asyncrl.algorithms.token_losses import clip_surrogate, policy_gradient

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Meta(gt=0, lt=1)]
Positive = Annotated[float, Meta(gt=0)]


@loss("gspo", ratio="prox", clips=True, linear=True, level="geometric")
def gspo(given: LossInput, *, clip_low: Share = 3e-4, clip_high: Positive = 4e-4) -> TokenLoss:
    """L = sg(w)·max(−sA, −A·clip(s, 1−clip_low, 1+clip_high)), s = exp(mean over the episode of log π − log
    prox) in value, with the gradient of the own token (GSPO-token, arXiv 2507.18071).

    Clip and ratio are against prox, never μ: its bounds are far too tight for stale data. What μ adds is the
    weight, best `truncate` with level=geometric.

    Use: mixture-of-experts models, whose token ratios are noisy, with aggregation seq_mean_token_mean and
    several optimizer steps per batch; staleness 0 to 4.
    """
    ratio = _through(given.episode_mean(given.logp - given.prox), given.logp)
    value, clipped = clip_surrogate(ratio, given.advantage, clip_low, clip_high)
    return TokenLoss(given.weighed(value), clipped)


@loss("gmpo", ratio="prox", clips=True, linear=True)
def gmpo(given: LossInput, *, clip_low: Positive = 0.4, clip_high: Positive = 0.4) -> TokenLoss:
    """L = −sg(w)·sA, s = exp(mean over the episode of c), c = min(log u, clip_high) where A > 0, else max(log
    u, −clip_low), u = π/prox (GMPO, arXiv 2507.20673).

    Bounds are on log-ratios of tokens, and one-sided; a token beyond its bound has no gradient. Where the
    tokens of an episode have different A or w, each keeps its own: another gradient than verl's geo_mean,
    which takes the mean of A and the geometric mean of w.

    Use: long episodes with several optimizer steps per batch, with aggregation seq_mean_token_mean;
    staleness 0 to 4.
    """
    log_ratio = given.logp - given.prox
    bounded = torch.where(given.advantage > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    value = -given.advantage * _through(given.episode_mean(bounded), bounded)
    return TokenLoss(given.weighed(value), bounded.detach() != log_ratio.detach())


@loss("topr", ratio="mu", linear=True)
def topr(given: LossInput) -> TokenLoss:
    """L = −sg(r)·A·log π, r = 1 where A > 0, else min(Π over the episode of π/μ, 1) (TOPR, arXiv 2503.14286).

    Successes are imitated at any age; the weight of failures falls as the policy moves away from them.

    Use: stale or offline data with outcome rewards; any staleness.
    """
    sequence = ratio_of(given.episode_sum(given.logp.detach() - given.mu)).clamp(max=1.0)
    positive = given.advantage > 0
    tapered = ~positive & (sequence < 1)
    return policy_gradient(given, sequence.masked_fill(positive, 1.0), tapered)


def _through(mean: Tensor, own: Tensor) -> Tensor:
    """exp(mean) [N] in value, with the gradient as if each token's ratio were its own."""
    return ratio_of(mean.detach() + own - own.detach())
