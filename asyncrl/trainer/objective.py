"""The loss of one micro-batch: what the recipe makes of log-probs, advantages and values.

Σ_t w_t·(L_t + β·ρ_t·KL_t − c·H_t + value loss), undivided: D comes when the batch is complete
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction, CorrectionInput, correct, correct_states
from asyncrl.algorithms.diagnostics import TokenState
from asyncrl.algorithms.kl import kl_tokens
from asyncrl.algorithms.losses import LossInput, TokenLoss, value_loss
from asyncrl.algorithms.recipe import Recipe
from asyncrl.config import RunConfig
from asyncrl.trainer.batch import MicroBatch
from asyncrl.trainer.model import Reference
from asyncrl.trainer.scores import Scores
from asyncrl.trainer.teacher import Teacher

KL_CAP = 2.0  # of rho before a KL term that no correction weighs
Terms = dict[str, tuple[Tensor, Tensor | None]]  # metric → (sum, count); no count: per D


@dataclass(frozen=True)
class Evaluated:
    """`loss`: Σ w·L, a scalar with gradient. `state`: of the tokens, for diagnostics. `terms`: sums of what
    was added to the policy loss, by metric."""

    loss: Tensor
    state: TokenState
    terms: Terms


def evaluate(
    micro: MicroBatch,
    scores: Scores,
    value: Tensor | None,
    config: RunConfig,
    recipe: Recipe,
    kl_coef: float,
    progress: float = 0.0,
) -> Evaluated:
    """Compute loss and diagnostics. `value`: the critic's, with gradient; `progress`: share of the steps."""
    given = loss_input(micro, scores, recipe, progress)
    fresh = given.fresh
    correction = given.correction
    logp = given.logp
    reference = given.reference
    token = recipe.loss.of(given)
    weight = torch.where(fresh, micro.weight, 0.0)
    policy = torch.where(fresh, weight * token.value, 0.0)
    total = policy.sum()
    terms = Terms()

    def add(name: str, term: Tensor, coefficient: float) -> Tensor:
        terms[name] = ((weight * term).detach().sum(), None)
        return total + coefficient * (weight * term).sum()

    if recipe.loss.demonstrations:
        terms["actor/nll"] = (torch.where(fresh, -logp.detach(), 0.0).sum(), fresh.sum())
    if reference is not None:
        distance = torch.where(fresh, kl_tokens(logp.detach(), reference, "k3"), 0.0)
        terms["actor/ref_kl"] = (distance.sum(), fresh.sum())
    if config.kl.in_loss and reference is not None:
        if scores.divergence is None:
            divergence = kl_tokens(logp, reference, recipe.kl_estimator)
            counts = correction
        else:
            divergence = scores.divergence
            counts = of_states(given, recipe)
        by = kl_weight(counts, recipe, config.kl.where == "loss")
        total = add("actor/kl_loss", by * torch.where(fresh, divergence, 0.0), kl_coef)
    entropy = torch.where(fresh, scores.entropy, 0.0)
    if config.algorithm.entropy_coef:
        total = add("actor/entropy_loss", entropy, -config.algorithm.entropy_coef)
    else:
        terms["actor/entropy_loss"] = ((weight * entropy.detach()).sum(), None)
    if value is not None:
        assert micro.returns is not None
        old = value.detach() if micro.value is None else micro.value
        loss, clipped = value_loss(value, old, micro.returns, config.critic.clip)
        share = config.critic.coef if recipe.shared_critic else 1.0
        total = add("critic/vf_loss", torch.where(fresh, loss, 0.0), share)
        terms["critic/vf_clipfrac"] = ((clipped & fresh).sum(), fresh.sum())
    bypass = recipe.prox == "mu"  # reports are of pi/mu then
    state = TokenState(
        prox=logp.detach() if bypass else given.prox,
        mu=given.mu,
        drift=given.prox - logp.detach(),
        entropy=scores.entropy.detach(),
        loss=policy.detach(),
        advantage=given.advantage,
        weight=micro.weight,
        clipped_lower=token.clipped_lower,
        ruled_out=correction.masked,
        clipped=token.clipped,
        correction=with_own_ratio(correction, token) if recipe.loss.ratio == "mu" else correction,
        counted=micro.counted,
        in_bound=micro.within_staleness,
        fresh=fresh,
        exact=micro.exact & (progress == 0) if bypass else micro.exact,
        row=micro.episode,
        lag=micro.lag,
    )
    return Evaluated(total, state, terms)


def teacher_of(micro: MicroBatch, reference: Reference | None, divergence: str, top_k: int) -> Teacher:
    """Return what a divergence compares the policy with: a model here, or what servers told. A collective."""
    if reference is not None:
        return reference.teacher(micro.reference_tokens, divergence, top_k)
    return Teacher(divergence, top_k)


def loss_input(micro: MicroBatch, scores: Scores, recipe: Recipe, progress: float) -> LossInput:
    """Return the inputs of the loss. A token with a bad number, of whichever model, is not fresh."""
    pi = scores.logp.detach()
    prox = proximal(micro, pi, recipe, progress)
    fresh = micro.within_staleness
    reference = scores.reference if micro.reference is None else micro.reference
    for numbers in (micro.rollout_logprobs, pi, prox, reference, scores.divergence):
        fresh = fresh if numbers is None else fresh & torch.isfinite(numbers)
    # It must be gone before exp: weight zero times infinity is not zero.
    prox = torch.where(fresh, prox, 0.0)
    sampled = fresh & (not recipe.loss.demonstrations)
    mu = torch.where(sampled, micro.rollout_logprobs, prox)
    logp = torch.where(fresh, scores.logp, prox)
    reference = None if reference is None else torch.where(fresh, reference, logp.detach())
    assert micro.advantage is not None
    advantage = micro.advantage
    of = (micro.episode, micro.turn)
    current = logp.detach() - mu
    log_ratio = prox - mu if recipe.loss.ratio == "prox" else current
    correction = correct(recipe.rules, CorrectionInput(log_ratio, current, advantage, *of, fresh))
    models = (reference, micro.prepared)
    return LossInput(logp, prox, mu, advantage, *of, micro.lag, fresh, correction, *models)


def of_states(given: LossInput, recipe: Recipe) -> Correction:
    """Correct a loss of whole distributions, which does not depend on the sampled token."""
    logp = given.logp.detach()
    rho = (logp if recipe.loss.ratio == "mu" else given.prox) - given.mu
    of = given.row, given.turn, given.fresh
    return correct_states(recipe.rules, CorrectionInput(rho, logp - given.mu, given.advantage, *of))


def with_own_ratio(correction: Correction, token: TokenLoss) -> Correction:
    """The correction as reports show it: the ratio of a loss that contains pi/mu counts as its weight."""
    if token.ratio is None:
        return correction
    dropped = token.ratio == 0
    return Correction(
        weight=correction.weight * token.ratio,
        ratio=correction.ratio,
        masked=correction.masked | dropped,
        truncated=token.clipped & ~dropped,
    )


def kl_weight(correction: Correction, recipe: Recipe, weighted: bool) -> Tensor:
    """[N] The correction's weight or, where it has none, a truncated rho: tokens come from mu, and the KL is
    of pi. Not `weighted`: 1. In any case 0 where masked."""
    if weighted and recipe.weighted:
        return correction.weight
    weight = correction.ratio.clamp(max=KL_CAP) if weighted else torch.ones_like(correction.ratio)
    return weight.masked_fill(correction.masked, 0.0)


def proximal(micro: MicroBatch, pi: Tensor, recipe: Recipe, progress: float) -> Tensor:
    """log prox [N]. loglinear (A-3PO): log mu + a·(log pi − log mu), a = (v_prox − v_mu)/(v − v_mu); prox is
    the policy before the batch, v − v_prox = `progress` of one version."""
    if recipe.prox == "mu":
        return micro.rollout_logprobs
    if micro.proximal_logprobs is not None:
        return micro.proximal_logprobs
    if recipe.prox != "loglinear" or progress == 0:
        return pi
    share = micro.lag / (micro.lag + progress)
    return micro.rollout_logprobs + share.to(pi.dtype) * (pi - micro.rollout_logprobs)
