"""Policy losses that look at the whole batch first: each has a `prepare`, called behind the barrier.

The result of `prepare` does not depend on the cut or the order of the batch: sums are exact or over sorted
values, and tokens are chosen by a threshold, so equal ones are treated alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.algorithms.correction import ratio_of
from asyncrl.algorithms.credit import Trace
from asyncrl.algorithms.losses import LossInput, TokenLoss, loss
from asyncrl.algorithms.token_losses import Positive, Share, clip_surrogate

ROUNDING = 1e-6  # log-ratios of one policy, computed twice


def highest_covariance(traces: Sequence[Trace], *, share: float) -> list[np.ndarray]:
    """1 on the `share` of the batch's trainable tokens (at least one) with the largest (A−Ā)·(log prox −
    mean), else 0.

    Tokens equal to the first that is too many are left out as well: with equal advantages nothing is
    chosen.
    """
    advantage, prox = (_mean(traces, name) for name in ("advantage", "prox"))
    products = [(trace.advantage - advantage) * (trace.prox - prox) for trace in traces]
    ordered_products = np.sort(_trainable(traces, products))[::-1]
    chosen_count = max(1, int(share * len(ordered_products)))
    threshold = ordered_products[chosen_count] if chosen_count < len(ordered_products) else math.inf
    return [
        (trace.trainable & (product > threshold)).astype(float)
        for trace, product in zip(traces, products, strict=True)
    ]


@loss("clip_cov", ratio="prox", anchored=True, prepare=highest_covariance)
def clip_cov(
    tokens: LossInput, *, share: Share = 2e-4, clip_low: Share = 0.2, clip_high: Positive = 0.2
) -> TokenLoss:
    """L = sg(w)·max(−uA, −A·clip(u, 1−clip_low, 1+clip_high)), but 0 on the `share` of the batch's tokens
    with the largest (A−Ā)·(log prox − mean log prox); u = π/prox (Clip-Cov, arXiv 2505.22617).

    These few tokens drive the collapse of entropy. The paper draws them at random from a band of large
    covariances.

    Use: runs whose entropy falls too fast; staleness 0 to 8.
    """
    is_chosen = _prepared(tokens) > 0
    value, clipped = clip_surrogate(
        ratio_of(tokens.logp - tokens.prox), tokens.advantage, clip_low, clip_high
    )
    return TokenLoss(tokens.weighed(value.masked_fill(is_chosen, 0.0)), clipped | is_chosen)


@loss("kl_cov", ratio="prox", clips=True, prepare=highest_covariance)
def kl_cov(tokens: LossInput, *, share: Share = 2e-4, coef: Positive = 0.1) -> TokenLoss:
    """L = sg(w)·(−uA + coef·|log π − log prox| on the tokens that `clip_cov` would drop), u = π/prox (KL-Cov,
    arXiv 2505.22617).

    Use: like clip_cov, but with several optimizer steps per batch; staleness 0 to 8.
    """
    log_ratio = tokens.logp - tokens.prox
    is_chosen = _prepared(tokens)
    # In the first step pi is prox but for rounding, whose sign would be the gradient of |x| there.
    distance = log_ratio.abs().masked_fill(log_ratio.detach().abs() < ROUNDING, 0.0)
    value = -ratio_of(log_ratio) * tokens.advantage + coef * is_chosen * distance
    return TokenLoss(tokens.weighed(value), is_chosen > 0)


def within_second_moment(traces: Sequence[Trace], *, tau: float) -> list[np.ndarray]:
    """1 on the trainable tokens that stay when those with the largest (log prox − log μ)² go until the mean
    of the rest is below `tau`, else 0. Tokens equal to the last that goes, go as well."""
    squares = [(trace.prox - trace.mu) ** 2 for trace in traces]
    ordered_squares = np.sort(_trainable(traces, squares))
    means = np.cumsum(ordered_squares) / np.arange(1, len(ordered_squares) + 1)  # does not decrease
    kept_count = int(np.searchsorted(means, tau))
    threshold = ordered_squares[kept_count] if kept_count < len(ordered_squares) else math.inf
    return [
        (trace.trainable & (square < threshold)).astype(float)
        for trace, square in zip(traces, squares, strict=True)
    ]


@loss("m2po", ratio="mu", prepare=within_second_moment)
def m2po(tokens: LossInput, *, tau: Positive = 0.04) -> TokenLoss:
    """L = −(π/μ)·A, unclipped, but 0 on the tokens of the batch with the largest (log prox − log μ)², as
    many as it takes to bring the mean of the others below tau (M2PO, arXiv 2510.01161).

    Only outliers are masked, however far individual tokens in the batch are from μ.

    Use: very stale data, where a fixed band on the ratio masks too many tokens; staleness of 8 and far
    beyond.
    """
    is_kept = _prepared(tokens)
    ratio = ratio_of(tokens.logp - tokens.mu) * is_kept
    value = -ratio * tokens.advantage
    return TokenLoss(tokens.weighed(value), tokens.trainable & (is_kept == 0), ratio=ratio.detach())


def partition_gap(traces: Sequence[Trace], *, beta: float) -> list[np.ndarray]:
    """log Ẑ − R/β of each episode, on all its tokens.

    log Ẑ is the mean over the group's episodes of log ref − log prox + R/β, sequence sums over trainable
    tokens; episodes without a trainable token are left out.
    """
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for trace in traces:
        if trace.trainable.any():
            log_ratio_sum = math.fsum((trace.reference - trace.prox)[trace.trainable])
            groups[trace.group].append(log_ratio_sum + trace.own.reward / beta)
    log_z = {group: math.fsum(gaps) / len(gaps) for group, gaps in groups.items()}
    return [np.full(len(t.prox), log_z.get(t.group, 0.0) - t.own.reward / beta) for t in traces]


@loss("tba", ratio="mu", reference=True, prepare=partition_gap, whole_group=True)
def tba(tokens: LossInput, *, beta: Positive = 0.05) -> TokenLoss:
    """L = δ²/T per token, so δ² per episode, δ = sg(log Ẑ) + log π − log ref − R/β over its T tokens
    (trajectory balance, TBA, arXiv 2503.18929); log Ẑ is estimated from the group.

    The optimum is ref·exp(R/β)/Z for any sampling policy, hence no ratio. The loss reads R itself, so the
    advantage has no effect. Use aggregation seq_mean_token_sum for the paper's mean over episodes.

    Use: very old or replayed data, and tasks with diverse answers; any staleness.
    """
    assert tokens.reference is not None
    logp = tokens.logp.detach()
    residual = tokens.episode_sum(logp - tokens.reference) + _prepared(tokens)
    token_counts = tokens.episode_sum(torch.ones_like(logp)).clamp_min(1.0)
    value = residual**2 / token_counts + 2 * residual * (tokens.logp - logp)
    return TokenLoss(tokens.weighed(value), torch.zeros_like(tokens.trainable))


def _prepared(tokens: LossInput) -> torch.Tensor:
    assert tokens.prepared is not None, "the loss needs values prepared from the complete batch"
    return tokens.prepared


def _trainable(traces: Sequence[Trace], values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values of all trainable tokens of the batch."""
    return np.concatenate(
        [array[trace.trainable] for trace, array in zip(traces, values, strict=True)] or [np.zeros(0)]
    )


def _mean(traces: Sequence[Trace], name: str) -> float:
    """Sums over all trainable tokens, rounded once: no order of the traces changes a bit."""
    values = _trainable(traces, [getattr(trace, name) for trace in traces]).tolist()
    return math.fsum(values) / max(len(values), 1)
