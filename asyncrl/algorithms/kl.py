"""Distance to a reference policy, or a teacher, and the coefficient that keeps it in reach.

With d = log pi - log ref at a token sampled from pi, k1, k2 and k3 estimate KL(pi, ref) from one sample
(Schulman, joschu.net/blog/kl-approx.html). A divergence sums over all tokens that could have been sampled in
a state, or over classes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algorithms.correction import ratio_of

VALUE_LIMIT = 10.0  # k3 grows like ref/pi: one token must not dominate the sum
LARGEST_CHANGE = 0.2
FLOOR = -50.0  # of log-probs in a divergence: what is excluded (-inf) must not make it infinite
LEAST_REST = 1e-7  # what rounding leaves of 1 minus float32 probabilities that sum to 1


def kl_tokens(logp: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimated KL(pi, ref) of each token [N], from log pi and log ref [N], in nats.

    In the loss only k2 and straight_through have the gradient of the KL in expectation; that of k1 is zero in
    expectation, that of k3 is the gradient of KL(ref, pi).
    """
    return ESTIMATORS[estimator](logp - reference)


def k1(d: Tensor) -> Tensor:
    """k = d (Schulman, joschu.net/blog/kl-approx.html).

    Use: in the reward, at any staleness. Unbiased but noisy; can be negative.
    """
    return d


def absolute(d: Tensor) -> Tensor:
    """k = |d| (plain).

    Use: in the reward, at any staleness, if no token may be rewarded for leaving the reference. Not an
    estimate of the KL.
    """
    return d.abs()


def k2(d: Tensor) -> Tensor:
    """k = d²/2 (Schulman, joschu.net/blog/kl-approx.html).

    Use: in the loss, at any staleness: the gradient, d·∇log pi, is that of the KL in expectation. The value
    is biased.
    """
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """k = min(exp(-d) - 1 + d, 10) (Schulman, joschu.net/blog/kl-approx.html).

    Use: in the reward and in reports, at any staleness: unbiased up to the cap and never negative. In the
    loss, the gradient is that of KL(ref, pi).
    """
    return (ratio_of(-d) - 1 + d).clamp(max=VALUE_LIMIT)


def straight_through(d: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (plain).

    Use: in the loss, at any staleness, if the value of the KL should also be unbiased.
    """
    slope = k2(d)
    return k3(d).detach() + slope - slope.detach()


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "straight_through": straight_through,
}


def divergence(logp: Tensor, teacher: Tensor, name: str) -> Tensor:
    """Return a divergence [N] between teacher and policy, from log pi, which carries the gradient, and log T
    of all classes [N, C]. Only one matrix is kept for the backward.

    The slope by log pi leaves out what is constant times pi, since Σ pi·∇log pi = 0.
    """
    policy_logp = logp.clamp(min=FLOOR)
    with torch.no_grad():
        value, slope = DIVERGENCES[name](policy_logp, teacher.clamp(min=FLOOR))
    slope_term = (slope.nan_to_num() * policy_logp).sum(-1)  # zero times NaN would be NaN
    return value + slope_term - slope_term.detach()


def forward(p: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """D = Σ_v T(v)·(log T(v) - log pi(v)): KL(T, pi) (plain).

    Use: in the loss, at any staleness, if the student should cover everything that the teacher does, or does
    not yet behave like the teacher: where pi(v) is near 0, the slope in the logit of v is about -T(v).
    """
    teacher_probs = t.exp()
    return (teacher_probs * (t - p)).sum(-1), -teacher_probs


def reverse(p: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """D = Σ_v pi(v)·(log pi(v) - log T(v)): KL(pi, T), whose gradient k2 has in expectation (plain).

    Use: in the loss, at any staleness, if the student is too small to cover everything and should do nothing
    that the teacher would not do.
    """
    parts = p.exp() * (p - t)
    return parts.sum(-1), parts


def js(p: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """D = (KL(T, M) + KL(pi, M)) / 2, M = (T + pi) / 2: Jensen-Shannon (GKD, arXiv 2306.13649, beta = 1/2).

    Use: in the loss, at any staleness: a compromise between the other two, bounded by log 2, so that no
    single state dominates a batch.
    """
    mixture = torch.logaddexp(p, t) - math.log(2)
    policy_term = p.exp() * (p - mixture) / 2
    return policy_term.sum(-1) + (t.exp() * (t - mixture)).sum(-1) / 2, policy_term


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "forward": forward,
    "reverse": reverse,
    "js": js,
}


def lumped(top: Tensor, sampled: Tensor, is_excluded: Tensor) -> Tensor:
    """Return log-probs [N, k + 2] of k tokens, the sampled token and all others as one class, float64.

    `is_excluded` [N, k]: which of the k are no class, such as the sampled token, so that it counts once.
    A divergence between classes is at most that between their tokens, whatever the classes are.
    """
    named_logp = torch.cat([top.masked_fill(is_excluded, -math.inf), sampled[:, None]], 1).double()
    other_logp = torch.log1p(-named_logp.exp().sum(-1, keepdim=True).clamp(max=1 - LEAST_REST))
    return torch.cat([named_logp, other_logp], 1)


def adapted(coefficient: float, mean_kl: float, target: float, episodes: int, horizon: int) -> float:
    """The coefficient for the next batch: β·(1 + clip(kl/target - 1, ±0.2)·n/horizon) (arXiv 1909.08593).

    `mean_kl`: mean per token of a batch of n `episodes`. `target` 0 keeps β, as does a KL that is not finite.
    A batch of more than `horizon` episodes counts as `horizon`, so that β stays positive.
    """
    if not target or not math.isfinite(mean_kl):
        return coefficient
    clipped_surplus = min(max(mean_kl / target - 1, -LARGEST_CHANGE), LARGEST_CHANGE)
    return coefficient * (1 + clipped_surplus * min(episodes / horizon, 1.0))
