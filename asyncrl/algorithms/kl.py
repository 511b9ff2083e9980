"""Distance to a reference policy, estimated per sampled token, and the coefficient that keeps it in reach.

With d = log pi - log ref at a token sampled from pi, k1, k2 and k3 estimate KL(pi, ref) from one sample
(Schulman, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from asyncrl.algorithms.correction import ratio_of

VALUE_LIMIT = 10.0  # k3 grows like ref/pi: one token must not dominate the sum
LARGEST_CHANGE = 0.2


def kl_tokens(logp: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimated KL(pi, ref) of each token [N], from log pi and log ref [N], in nats.

    In the loss only k2 and straight_through have the gradient of the KL in expectation; that of k1 is zero in
    expectation, that of k3 is the gradient of KL(ref, pi).
    """
    return ESTIMATORS[estimator](logp - reference)


def k1(d: Tensor) -> Tensor:
    """k = d (Schulman, joschu.net/blog/kl-approx.html).

    Use: in the reward, at any staleness. Unbiased, noisy, of either sign.
    """
    return d


def absolute(d: Tensor) -> Tensor:
    """k = |d| (plain).

    Use: in the reward, where no token may be rewarded for leaving the reference; not the KL. Any staleness.
    """
    return d.abs()


def k2(d: Tensor) -> Tensor:
    """k = d²/2 (Schulman, joschu.net/blog/kl-approx.html).

    Use: in the loss, at any staleness: its gradient d·∇log pi is in expectation that of the KL. Its value is
    biased.
    """
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """k = min(exp(-d) - 1 + d, 10) (Schulman, joschu.net/blog/kl-approx.html).

    Use: in the reward and in reports, at any staleness: unbiased up to the cap, never negative. In the loss
    its gradient is that of KL(ref, pi).
    """
    return (ratio_of(-d) - 1 + d).clamp(max=VALUE_LIMIT)


def straight_through(d: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (plain).

    Use: in the loss, at any staleness, to see an unbiased value there.
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


def adapted(coef: float, kl: float, target: float, episodes: int, horizon: int) -> float:
    """The coefficient for the next batch: β·(1 + clip(kl/target - 1, ±0.2)·n/horizon) (arXiv 1909.08593).

    `kl`: mean per token of a batch of n `episodes`. `target` 0 keeps β, as does a KL that is not finite. A
    batch of more than `horizon` episodes counts as `horizon`, so that β stays positive.
    """
    if not target or not math.isfinite(kl):
        return coef
    surplus = min(max(kl / target - 1, -LARGEST_CHANGE), LARGEST_CHANGE)
    return coef * (1 + surplus * min(episodes / horizon, 1.0))
