"""The loss of one micro-batch, from log-probs, advantages and values, by the recipe.

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
from asyncrl.trainer.scores import Scores

KL_CAP = 2.0  # bound of rho in a KL term without a correction weight
Terms = dict[str, tuple[Tensor, Tensor | None]]  # metric → (sum, count); no count: per D


@dataclass(frozen=True)
class MicroBatchLoss:
    """Holds the loss of a micro-batch. `loss_sum`: Σ w·L, a scalar with gradient. `token_state`: the
    tokens, for diagnostics. `loss_terms`: sums of the terms added to the policy loss, by metric."""

    loss_sum: Tensor
    token_state: TokenState
    loss_terms: Terms


def evaluate(
    micro_batch: MicroBatch,
    scores: Scores,
    value: Tensor | None,
    config: RunConfig,
    recipe: Recipe,
    kl_coef: float,
    progress: float = 0.0,
) -> MicroBatchLoss:
    """Compute loss and diagnostics. `value`: the critic's, with gradient; `progress`: fraction of the batch's
    steps."""
    inputs = loss_input(micro_batch, scores, recipe, progress)
    trainable = inputs.trainable
    correction = inputs.correction
    logp = inputs.logp
    reference = inputs.reference
    token_loss = recipe.loss.of(inputs)
    token_weight = torch.where(trainable, micro_batch.weight, 0.0)
    policy_loss = torch.where(trainable, token_weight * token_loss.value, 0.0)
    loss_sum = policy_loss.sum()
    terms = Terms()

    def weighted_sum(metric_name: str, token_values: Tensor) -> Tensor:  # Σ w·value, also reported
        term_sum = (token_weight * token_values).sum()
        terms[metric_name] = (term_sum.detach(), None)
        return term_sum

    if recipe.loss.demonstrations:
        terms["actor/nll"] = (torch.where(trainable, -logp.detach(), 0.0).sum(), trainable.sum())

    if reference is not None:
        reference_kl = torch.where(trainable, kl_tokens(logp.detach(), reference, "k3"), 0.0)
        terms["actor/ref_kl"] = (reference_kl.sum(), trainable.sum())

    if config.kl.in_loss and reference is not None:
        if scores.divergence is None:
            divergence = kl_tokens(logp, reference, recipe.kl_estimator)
            kl_correction = correction
        else:
            divergence = scores.divergence
            kl_correction = correct_distributions(inputs, recipe)

        kl_weights = kl_weight(kl_correction, recipe, config.kl.where == "loss")
        kl_values = kl_weights * torch.where(trainable, divergence, 0.0)
        loss_sum = loss_sum + kl_coef * weighted_sum("actor/kl_loss", kl_values)

    entropy_sum = weighted_sum("actor/entropy_loss", torch.where(trainable, scores.entropy, 0.0))
    if config.algorithm.entropy_coef:
        loss_sum = loss_sum - config.algorithm.entropy_coef * entropy_sum

    if value is not None:
        assert micro_batch.returns is not None
        old_value = value.detach() if micro_batch.value is None else micro_batch.value
        critic_loss, is_clipped = value_loss(value, old_value, micro_batch.returns, config.critic.clip)
        loss_sum = loss_sum + weighted_sum("critic/vf_loss", torch.where(trainable, critic_loss, 0.0))
        terms["critic/vf_clipfrac"] = ((is_clipped & trainable).sum(), trainable.sum())

    without_proximal = recipe.prox == "mu"  # reports are of pi/mu then
    token_state = TokenState(
        prox=logp.detach() if without_proximal else inputs.prox,
        mu=inputs.mu,
        drift=inputs.prox - logp.detach(),
        entropy=scores.entropy.detach(),
        loss=policy_loss.detach(),
        advantage=inputs.advantage,
        weight=micro_batch.weight,
        clipped_lower=token_loss.clipped_lower,
        ruled_out=correction.masked,
        clipped=token_loss.clipped,
        correction=with_loss_ratio(correction, token_loss) if recipe.loss.ratio == "mu" else correction,
        counted=micro_batch.is_counted,
        within_staleness=micro_batch.within_staleness,
        trainable=trainable,
        exact=micro_batch.is_exact & (progress == 0) if without_proximal else micro_batch.is_exact,
        row=micro_batch.episode,
        lag=micro_batch.lag,
    )

    return MicroBatchLoss(loss_sum, token_state, terms)


def loss_input(micro_batch: MicroBatch, scores: Scores, recipe: Recipe, progress: float) -> LossInput:
    """Return the inputs of the loss. A token with a number that is not finite, of any model, is not
    trainable."""
    logprobs = scores.logp.detach()
    proximal_logprobs = proximal_of(micro_batch, logprobs, recipe, progress)
    trainable = micro_batch.within_staleness
    reference = scores.reference if micro_batch.reference is None else micro_batch.reference
    for column in (micro_batch.rollout_logprobs, logprobs, proximal_logprobs, reference, scores.divergence):
        trainable = trainable if column is None else trainable & torch.isfinite(column)

    # Bad numbers must be gone before exp: zero times infinity is not zero.
    proximal_logprobs = torch.where(trainable, proximal_logprobs, 0.0)
    rollout_logprobs = proximal_logprobs
    if not recipe.loss.demonstrations:
        rollout_logprobs = torch.where(trainable, micro_batch.rollout_logprobs, proximal_logprobs)
    logp = torch.where(trainable, scores.logp, proximal_logprobs)
    reference = None if reference is None else torch.where(trainable, reference, logp.detach())
    assert micro_batch.advantage is not None

    current_log_ratio = logp.detach() - rollout_logprobs
    correction_input = CorrectionInput(
        log_ratio=current_log_ratio if recipe.loss.ratio == "mu" else proximal_logprobs - rollout_logprobs,
        current=current_log_ratio,
        advantage=micro_batch.advantage,
        row=micro_batch.episode,
        turn=micro_batch.turn,
        trainable=trainable,
    )

    return LossInput(
        logp=logp,
        prox=proximal_logprobs,
        mu=rollout_logprobs,
        advantage=micro_batch.advantage,
        row=micro_batch.episode,
        turn=micro_batch.turn,
        lag=micro_batch.lag,
        trainable=trainable,
        correction=correct(recipe.rules, correction_input),
        reference=reference,
        prepared=micro_batch.prepared,
    )


def correct_distributions(inputs: LossInput, recipe: Recipe) -> Correction:
    """Correct a loss of whole distributions, which is independent of the sampled token."""
    current_log_ratio = inputs.logp.detach() - inputs.mu
    correction_input = CorrectionInput(
        log_ratio=current_log_ratio if recipe.loss.ratio == "mu" else inputs.prox - inputs.mu,
        current=current_log_ratio,
        advantage=inputs.advantage,
        row=inputs.row,
        turn=inputs.turn,
        trainable=inputs.trainable,
    )
    return correct_states(recipe.rules, correction_input)


def with_loss_ratio(correction: Correction, token_loss: TokenLoss) -> Correction:
    """Return the correction for reports: the ratio of a loss that contains pi/mu counts as its weight."""
    if token_loss.ratio is None:
        return correction
    is_dropped = token_loss.ratio == 0
    return Correction(
        weight=correction.weight * token_loss.ratio,
        ratio=correction.ratio,
        masked=correction.masked | is_dropped,
        truncated=token_loss.clipped & ~is_dropped,
    )


def kl_weight(correction: Correction, recipe: Recipe, is_weighted: bool) -> Tensor:
    """Return the weight of a KL term, [N]: the correction's weight or, where the recipe has none, a truncated
    rho, as tokens come from mu and the KL is of pi. Not `is_weighted`: 1. Masked tokens always have 0."""
    if is_weighted and recipe.weighted:
        return correction.weight
    token_weight = correction.ratio.clamp(max=KL_CAP) if is_weighted else torch.ones_like(correction.ratio)
    return token_weight.masked_fill(correction.masked, 0.0)


def proximal_of(micro_batch: MicroBatch, logprobs: Tensor, recipe: Recipe, progress: float) -> Tensor:
    """Return log prox [N]. loglinear (A-3PO): log mu + a·(log pi − log mu), a = (v_prox − v_mu)/(v − v_mu);
    prox is the policy before the batch, v − v_prox = `progress` of one version."""
    if recipe.prox == "mu":
        return micro_batch.rollout_logprobs
    if micro_batch.proximal_logprobs is not None:
        return micro_batch.proximal_logprobs
    if recipe.prox != "loglinear" or progress == 0:
        return logprobs
    fraction = micro_batch.lag / (micro_batch.lag + progress)

    return micro_batch.rollout_logprobs + fraction.to(logprobs.dtype) * (
        logprobs - micro_batch.rollout_logprobs
    )
