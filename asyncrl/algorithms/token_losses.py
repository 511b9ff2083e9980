"""Policy losses of a token by itself, and those with the ratio of an episode, over its trainable tokens only.

With one optimizer step per batch pi = prox, and every loss here that `clips` has the gradient of `reinforce`.

The ratio of an episode with a stale prefix is the exact ratio of the suffix given the prefix, and the mean
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

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Meta(gt=0, lt=1)]
Positive = Annotated[float, Meta(gt=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
LEAST_COMPLEMENT = 1e-12  # 1 - p of a certain token, so that its logarithm is finite


@loss("reinforce", ratio="prox", linear=True)
def reinforce(tokens: LossInput) -> TokenLoss:
    """L = −sg(w)·A·log π: the gradient of the truncated importance-sampled objective (IMPALA, arXiv
    1802.01561).

    With one optimizer step per batch w = M·min(π/μ, C); clipping would have no effect.

    Use: the default, with one optimizer step per batch; staleness 0 to 8.
    """
    return policy_gradient(tokens, torch.ones_like(tokens.logp), torch.zeros_like(tokens.trainable))


@loss("sft", ratio="mu", demonstrations=True)
def sft(tokens: LossInput) -> TokenLoss:
    """L = −log π: the negative log-likelihood of demonstrated tokens, whatever A is (plain).

    Use: `asyncrl sft`, on conversations from the data instead of sampled episodes; there is neither μ nor
    staleness.
    """
    return TokenLoss(tokens.weighed(-tokens.logp), torch.zeros_like(tokens.trainable))


@loss("ppo", ratio="prox", clips=True, linear=True)
def ppo(
    tokens: LossInput, *, clip_low: Share = 0.2, clip_high: Positive = 0.2, dual_clip: AtLeastZero = 3.0
) -> TokenLoss:
    """L = sg(w)·max(−uA, −A·clip(u, 1−clip_low, 1+clip_high)), where A < 0 at most −dual_clip·A; u = π/prox
    (PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729). `dual_clip` is 1 or more, or 0 for none. With a
    weight, this is decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298).

    Use: several optimizer steps per batch, or any number with prox=mu; staleness 0 without a weight, as in
    the paper (`correction={}`), and up to 8 with one.
    """
    value, clipped = clip_surrogate(
        ratio_of(tokens.logp - tokens.prox), tokens.advantage, clip_low, clip_high
    )
    if not dual_clip:
        return TokenLoss(tokens.weighed(value), clipped)
    ceiling = -dual_clip * tokens.advantage
    below_ceiling = (tokens.advantage < 0) & (value > ceiling)
    return TokenLoss(tokens.weighed(torch.where(below_ceiling, ceiling, value)), clipped, below_ceiling)


@loss("cispo", ratio="prox", clips=True, linear=True)
def cispo(
    tokens: LossInput, *, clip_low: Annotated[float, Meta(gt=0, le=1)] = 1.0, clip_high: Positive = 0.28
) -> TokenLoss:
    """L = −sg(w)·sg(clip(u, 1−clip_low, 1+clip_high))·A·log π, u = π/prox (CISPO, MiniMax-M1, arXiv
    2506.13585).

    The ratio is bounded, but no token loses its gradient; clip_low = 1 means no lower bound.

    Use: several optimizer steps per batch, to keep rare tokens that PPO's clip would drop; staleness 0 to 8.
    """
    ratio = ratio_of(tokens.logp.detach() - tokens.prox)
    bounded_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    return policy_gradient(tokens, bounded_ratio, bounded_ratio != ratio)


@loss("cispo_scalerl", ratio="mu", linear=True)
def cispo_scalerl(tokens: LossInput, *, cap: Positive = 5.0) -> TokenLoss:
    """L = −sg(min(π/μ, cap))·A·log π: CISPO with two policies (ScaleRL, arXiv 2510.13786).

    ScaleRL found caps of 4 to 8 equally good; cap = 2 is AIPO (LlamaRL, arXiv 2505.24034).

    Use: one or several optimizer steps per batch, if you do not want to choose a weight; staleness 0 to 8,
    with a cap of 2 to 4.
    """
    return _capped(tokens, cap)


@loss("sapo", ratio="prox", clips=True, linear=True)
def sapo(tokens: LossInput, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> TokenLoss:
    """L = −sg(w)·A·(4/τ)·sigmoid(τ·(u−1)), u = π/prox, τ = tau_positive where A > 0, else tau_negative (SAPO,
    arXiv 2511.20347).

    The gradient fades with the distance from u = 1 instead of ending at a bound.

    Use: several optimizer steps per batch, and mixture-of-experts models; staleness 0 to 8.
    """
    ratio = ratio_of(tokens.logp - tokens.prox)
    token_tau = _by_sign(tokens, tau_positive, tau_negative)
    value = -tokens.advantage * (4 / token_tau) * torch.sigmoid(token_tau * (ratio - 1))
    return TokenLoss(tokens.weighed(value), torch.zeros_like(tokens.trainable))


@loss("dppo_tv", ratio="mu", linear=True)
def dppo_tv(
    tokens: LossInput, *, delta_low: Share = 0.2, delta_high: Share = 0.2, cap: AtLeastOne = 20.0
) -> TokenLoss:
    """L = −sg(min(π/μ, cap))·A·log π while π−μ ≤ delta_high (A > 0) or π−μ ≥ −delta_low (A ≤ 0), else 0 (DPPO
    with binary total variation, arXiv 2602.04879).

    The trust region limits probabilities, so rare tokens may change their ratio a lot, but frequent ones may
    not.

    Use: large vocabularies, and engines whose numerical results differ from the trainer's; staleness 0 to 8.
    """
    probability_change = tokens.logp.detach().exp() - tokens.mu.exp()
    is_cut = torch.where(
        tokens.advantage > 0, probability_change > delta_high, probability_change < -delta_low
    )
    return _capped(tokens, cap, is_cut)


@loss("dppo_kl", ratio="mu", linear=True)
def dppo_kl(
    tokens: LossInput, *, delta_low: Positive = 0.05, delta_high: Positive = 0.05, cap: AtLeastOne = 20.0
) -> TokenLoss:
    """L = −sg(min(π/μ, cap))·A·log π, but 0 where KL((μ, 1−μ) ‖ (π, 1−π)) > delta_high with A > 0 and π > μ,
    or > delta_low with A ≤ 0 and π < μ (DPPO with binary KL, arXiv 2602.04879).

    A divergence of δ keeps π−μ within √(δ/2).

    Use: like dppo_tv, but stricter where μ is near 0 or 1; staleness 0 to 8.
    """
    logp = tokens.logp.detach()
    moves_away = torch.where(tokens.advantage > 0, logp > tokens.mu, logp < tokens.mu)
    is_cut = moves_away & (binary_kl(tokens.mu, logp) > _by_sign(tokens, delta_high, delta_low))
    return _capped(tokens, cap, is_cut)


@loss("dro", ratio="mu")
def dro(tokens: LossInput, *, beta: Positive = 0.05) -> TokenLoss:
    """L = −(A·log π − (β/2)·(log π − log μ)²) (DRO, arXiv 2405.19107): a quadratic pull to μ instead of a
    ratio.

    Use: off-policy data without importance weights; any staleness; a larger β gives more stability, but also
    more bias.
    """
    distance = tokens.logp - tokens.mu
    value = -(tokens.advantage * tokens.logp - beta / 2 * distance**2)
    return TokenLoss(tokens.weighed(value), torch.zeros_like(tokens.trainable))


def policy_gradient(tokens: LossInput, ratio: Tensor, clipped: Tensor) -> TokenLoss:
    """−w·ratio·A·log π; `ratio` [N] has no gradient."""
    return TokenLoss(tokens.weighed(-ratio * tokens.advantage * tokens.logp), clipped, ratio=ratio)


def clip_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(−uA, −A·clip(u, 1−low, 1+high)) [N], and where the clip took the gradient."""
    free_loss = -ratio * advantage
    clipped_loss = -ratio.clamp(1 - low, 1 + high) * advantage
    return torch.where(clipped_loss > free_loss, clipped_loss, free_loss), clipped_loss > free_loss


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL((p, 1−p) ‖ (q, 1−q)) [N] of log-probabilities; finite for certain tokens, too."""
    rest_p, rest_q = (-torch.expm1(x.clamp(max=-LEAST_COMPLEMENT)) for x in (p, q))
    return p.exp() * (p - q) + rest_p * (rest_p.log() - rest_q.log())


def _by_sign(tokens: LossInput, positive: float, negative: float) -> Tensor:
    """[N] `positive` where A > 0, else `negative`."""
    return torch.full_like(tokens.advantage, negative).masked_fill(tokens.advantage > 0, positive)


def _capped(tokens: LossInput, cap: float, is_cut: Tensor | None = None) -> TokenLoss:
    """−min(π/μ, cap)·A·log π, 0 where `cut`."""
    ratio = ratio_of(tokens.logp.detach() - tokens.mu)
    bounded_ratio = ratio.clamp(max=cap)
    if is_cut is None:
        return policy_gradient(tokens, bounded_ratio, ratio > cap)
    return policy_gradient(tokens, bounded_ratio.masked_fill(is_cut, 0.0), is_cut)


# -- with the ratio of an episode ----------------------------------------------------------------------


@loss("gspo", ratio="prox", clips=True, linear=True, level="geometric")
def gspo(tokens: LossInput, *, clip_low: Share = 3e-4, clip_high: Positive = 4e-4) -> TokenLoss:
    """L = sg(w)·max(−sA, −A·clip(s, 1−clip_low, 1+clip_high)), s = exp(mean over the episode of log π − log
    prox) in value, with the gradient of the token itself (GSPO-token, arXiv 2507.18071).

    Clip and ratio are relative to prox, never to μ, because the bounds are far too tight for stale data. μ
    enters through the weight, preferably `truncate` with level=geometric.

    Use: mixture-of-experts models, whose token ratios are noisy, with aggregation seq_mean_token_mean and
    several optimizer steps per batch; staleness 0 to 4.
    """
    ratio = _through(tokens.episode_mean(tokens.logp - tokens.prox), tokens.logp)
    value, clipped = clip_surrogate(ratio, tokens.advantage, clip_low, clip_high)
    return TokenLoss(tokens.weighed(value), clipped)


@loss("gmpo", ratio="prox", clips=True, linear=True)
def gmpo(tokens: LossInput, *, clip_low: Positive = 0.4, clip_high: Positive = 0.4) -> TokenLoss:
    """L = −sg(w)·sA, s = exp(mean over the episode of c), c = min(log u, clip_high) where A > 0, else max(log
    u, −clip_low), u = π/prox (GMPO, arXiv 2507.20673).

    The bounds on log-ratios of tokens are one-sided; a token beyond its bound has no gradient. If the tokens
    of an episode differ in A or w, each token keeps its own, unlike in verl's geo_mean, which takes the mean
    of A and the geometric mean of w.

    Use: long episodes with several optimizer steps per batch and aggregation seq_mean_token_mean; staleness 0
    to 4.
    """
    log_ratio = tokens.logp - tokens.prox
    bounded_log_ratio = torch.where(
        tokens.advantage > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    value = -tokens.advantage * _through(tokens.episode_mean(bounded_log_ratio), bounded_log_ratio)
    return TokenLoss(tokens.weighed(value), bounded_log_ratio.detach() != log_ratio.detach())


@loss("topr", ratio="mu", linear=True)
def topr(tokens: LossInput) -> TokenLoss:
    """L = −sg(r)·A·log π, r = 1 where A > 0, else min(Π over the episode of π/μ, 1) (TOPR, arXiv 2503.14286).

    Successes are imitated at any age; failures lose weight as the policy moves away from them.

    Use: stale or offline data with outcome rewards; any staleness.
    """
    sequence_ratio = ratio_of(tokens.episode_sum(tokens.logp.detach() - tokens.mu)).clamp(max=1.0)
    is_positive = tokens.advantage > 0
    is_tapered = ~is_positive & (sequence_ratio < 1)
    return policy_gradient(tokens, sequence_ratio.masked_fill(is_positive, 1.0), is_tapered)


def _through(mean: Tensor, own_log_ratio: Tensor) -> Tensor:
    """exp(mean) [N] in value, with the gradient as if each token's ratio were its own."""
    return ratio_of(mean.detach() + own_log_ratio - own_log_ratio.detach())
