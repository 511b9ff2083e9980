"""Measures how far the tokens of a micro-batch are off-policy, as sums, and makes metrics of a batch's sums.

    micro-batch ──report_tokens──► sums ──(+ over micro-batches and ranks)──► metrics_of

Everything before `metrics_of` is a sum or an extreme over tokens or episodes, so the cut does not matter.
rho = prox/mu; k1 = -log rho and k3 = rho - 1 - log rho estimate KL(mu, prox). Weights are what the correction
makes of rho, 0 where it masks: verl's rollout_is_*, before a normalisation by the batch. The effective sample
size of weights is (Σ w)²/(n·Σ w²): 1 when all are equal. That of tokens stays near 1 while that of episodes,
whose weight is the product of their tokens' rho, collapses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from asyncrl.algorithms.correction import LOG_RATIO_LIMIT, Correction

SEQUENCE_LOG_LIMIT = 8.0  # so that one episode cannot dominate the effective sample size
NOTHING = float("-inf")  # the maximum over no token
LAG_EDGES = (0, 1, 2, 4, 8, 16)  # highest lag of each bucket; one more holds what is older
LAGS = 1024  # kept tokens are counted by exact lag; older ones share the last place
# histogram of log rho: bins of even ratio between ±1e-3 and ±20
FINEST = 1e-3
STEPS = 44
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}


LAG_NAMES = [f"{low + 1}-{high}" if high > low + 1 else f"{high}" for low, high in pairwise((-1, *LAG_EDGES))]
LAG_NAMES.append(f"{LAG_EDGES[-1] + 1}+")
_ABOVE = [FINEST * (LOG_RATIO_LIMIT / FINEST) ** (step / STEPS) for step in range(STEPS + 1)]
BIN_EDGES = [-edge for edge in reversed(_ABOVE)] + _ABOVE


@dataclass(frozen=True)
class TokenState:
    """Tokens [N]: log-probs without gradient, and which count. `drift`: from the policy that clips are
    around to the current one, log prox - log pi. `counted`: real model tokens; `within_staleness`:
    of these, with a lag within the bound; `trainable`: of these, with finite log-probs (the others' mu was
    replaced by prox); `exact`: sampled by the policy in training, whole context included. `row`: episode
    of each token; `weight`: by aggregation; `loss`: weighted loss; `clipped_lower`: by a dual clip."""

    prox: Tensor
    mu: Tensor
    drift: Tensor
    entropy: Tensor
    advantage: Tensor
    weight: Tensor
    loss: Tensor
    clipped: Tensor
    correction: Correction
    counted: Tensor
    within_staleness: Tensor
    trainable: Tensor
    exact: Tensor
    row: Tensor
    lag: Tensor
    ruled_out: Tensor
    clipped_lower: Tensor | None = None


class FieldSums(msgspec.Struct):
    """Base of sums that add up field by field: numbers, sums in their turn, and dicts of both, key by key."""

    def __add__(self, addend: Self) -> Self:
        return type(self)(
            **{name: _added(getattr(self, name), getattr(addend, name)) for name in self.__struct_fields__}
        )


def _added(left: Any, right: Any) -> Any:
    if not isinstance(left, dict):
        return left + right
    return left | {key: _added(left[key], value) if key in left else value for key, value in right.items()}


class RatioSums(FieldSums):
    """Sums over trainable tokens: how many, how many of these the correction masks or truncates, and numbers
    of their rho. `histogram`: tokens in each bin of log rho, by the bin's index; empty bins are left out.
    `episodes`: those with such a token; `episode_weight`: the product of its tokens' rho."""

    trainable_tokens: float = 0.0
    masked_tokens: float = 0.0
    truncated_tokens: float = 0.0
    log_rho: float = 0.0
    rho: float = 0.0
    rho_squared: float = 0.0
    k3: float = 0.0
    episodes: float = 0.0
    episode_weight: float = 0.0
    episode_weight_squared: float = 0.0
    histogram: dict[int, float] = {}


class TokenSums(RatioSums):
    """Sums over all tokens, for the kinds of tokens that TokenState tells apart; in `by_lag_bucket` those of
    RatioSums for each bucket. `kept_tokens` enter the loss, and `kept_by_lag` counts them by lag; a trust
    region may clip the `eligible_tokens`. `exact_difference` is |log prox - log mu|, `weight` the
    correction's, 0 where masked, `push` the advantage of a kept token times the weights of correction and
    aggregation."""

    micro_batches: int = 0
    model_tokens: float = 0.0
    kept_tokens: float = 0.0
    nonfinite_tokens: float = 0.0
    eligible_tokens: float = 0.0
    clipped_tokens: float = 0.0
    clipped_lower_tokens: float = 0.0
    exact_tokens: float = 0.0
    exact_difference: float = 0.0
    exact_k3: float = 0.0
    loss: float = 0.0
    drift: float = 0.0
    entropy: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    zero_advantage_tokens: float = 0.0
    positive_advantage: float = 0.0
    negative_advantage: float = 0.0
    kept_positive_advantage: float = 0.0
    kept_negative_advantage: float = 0.0
    push: float = 0.0
    push_size: float = 0.0
    kept_by_lag: dict[int, int] = {}
    by_lag_bucket: dict[str, RatioSums] = {}


@dataclass(frozen=True)
class TokenReport:
    """Describes the tokens of a micro-batch by sums, and by the maximum (`highest`) and minimum (`lowest`)
    of some metrics."""

    sums: TokenSums
    highest: dict[str, float]
    lowest: dict[str, float]


RATIO_FIELDS = frozenset(RatioSums.__struct_fields__)
# Reported for every lag bucket → its metric over all tokens.
OVERALL = {
    "kl": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "chi2": "rollout_corr/chi2_token",
    "masked_frac": "rollout_corr/rollout_rs_masked_fraction",
    "truncated_frac": "rollout_corr/truncated_fraction",
    "ess": "rollout_corr/rho_eff_sample_size",
    "seq_ess": "rollout_corr/rho_seq_eff_sample_size",
    **{f"rho_{name}": f"rollout_corr/rho_{name}" for name in QUANTILES},
}


def metrics_of(sums: TokenSums) -> dict[str, float]:
    """The metrics of a whole batch from its sums. What has nothing to be a share of is left out."""
    if not sums.micro_batches:
        return {}

    ratios = {
        "actor/pg_clipfrac": (sums.clipped_tokens, sums.eligible_tokens),
        "actor/pg_clipfrac_lower": (sums.clipped_lower_tokens, sums.eligible_tokens),
        "actor/ppo_kl": (sums.drift, sums.trainable_tokens),
        "actor/entropy": (sums.entropy, sums.model_tokens),
        "rollout_corr/rollout_is_mean": (sums.weight, sums.trainable_tokens),
        "rollout_corr/rho_mean": (sums.rho, sums.trainable_tokens),
        "rollout_corr/logprob_diff_mean": (sums.exact_difference, sums.exact_tokens),
        "rollout_corr/k3_kl_same_version": (sums.exact_k3, sums.exact_tokens),
        "rollout_corr/zero_advantage_frac": (sums.zero_advantage_tokens, sums.trainable_tokens),
        # How much of Σ|A| the correction leaves, by sign of A, and whether what is left pushes one way.
        "rollout_corr/kept_advantage/positive": (sums.kept_positive_advantage, sums.positive_advantage),
        "rollout_corr/kept_advantage/negative": (sums.kept_negative_advantage, sums.negative_advantage),
        "rollout_corr/residual_drift": (sums.push, sums.push_size),
    }
    metrics = {metric: a / b for metric, (a, b) in ratios.items() if b}
    metrics["rollout_corr/logprob_diff_tokens"] = sums.exact_tokens
    metrics["rollout_corr/nonfinite_tokens"] = sums.nonfinite_tokens

    if sums.weight_squared:
        metrics["rollout_corr/rollout_is_eff_sample_size"] = sums.weight**2 / (
            sums.trainable_tokens * sums.weight_squared
        )

    metrics |= {OVERALL[name]: value for name, value in _spread(sums).items() if name in OVERALL}

    for lag, lag_sums in sums.by_lag_bucket.items():
        metrics |= {f"rollout_corr/by_lag/{lag}/{name}": value for name, value in _spread(lag_sums).items()}

    return metrics


def _spread(sums: RatioSums) -> dict[str, float]:
    """How far rho is from 1, by the sums of a lag bucket or of all tokens. Empty without trainable tokens."""
    trainable_count = sums.trainable_tokens
    if not trainable_count:
        return {}
    log_rho = sums.log_rho / trainable_count
    rho2 = sums.rho_squared / trainable_count

    return {
        "tokens": trainable_count,
        "log_rho": log_rho,
        "kl": -log_rho,
        "k3": sums.k3 / trainable_count,
        "chi2": rho2 - 1,
        "masked_frac": sums.masked_tokens / trainable_count,
        "truncated_frac": sums.truncated_tokens / trainable_count,
        "ess": (sums.rho / trainable_count) ** 2 / rho2,
        "seq_ess": sums.episode_weight**2 / (sums.episode_weight_squared * sums.episodes),
        **{f"rho_{name}": _rho_at(sums.histogram, q) for name, q in QUANTILES.items()},
    }


def _rho_at(bins: Mapping[int, float], quantile: float) -> float:
    """Return the q-quantile of rho, interpolated within its bin of log rho."""
    rank = quantile * sum(bins.values())
    count_below = 0.0
    for index, count in sorted(bins.items()):
        if count_below + count >= rank:
            low, high = BIN_EDGES[index : index + 2]
            return math.exp(low + (high - low) * (rank - count_below) / count)
        count_below += count

    raise AssertionError("a quantile needs at least one token")


def report_tokens(state: TokenState) -> TokenReport:
    """Reduce one micro-batch. One transfer from the device."""
    log_ratio = (state.prox - state.mu).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_ratio = torch.where(state.trainable, log_ratio, 0.0)

    # Rows of sums by lag bucket, the last column over all tokens: fields of TokenSums, then the bins.
    lag_bucket = torch.bucketize(state.lag, torch.tensor(LAG_EDGES, device=state.lag.device))
    token_columns = _columns(state, log_ratio)
    column_sums = _scatter(
        lag_bucket, torch.stack([column.double() for column in token_columns.values()]), len(LAG_NAMES)
    )
    bin_edges = torch.tensor(BIN_EDGES[1:-1], dtype=torch.float64, device=log_ratio.device)
    bin_count = len(BIN_EDGES) - 1
    bin_index = torch.bucketize(log_ratio, bin_edges) * len(LAG_NAMES) + lag_bucket
    bin_sums = _scatter(bin_index, state.trainable.double()[None], bin_count * len(LAG_NAMES))
    bucket_sums = torch.cat([column_sums, bin_sums.view(bin_count, -1)])
    column_sums, bin_sums = torch.cat([bucket_sums, bucket_sums.sum(1, keepdim=True)], 1).split(
        [len(token_columns), bin_count]
    )
    table = torch.cat([column_sums, _episodes(state, log_ratio, lag_bucket), bin_sums])
    names = [*token_columns, "episodes", "episode_weight", "episode_weight_squared"]

    extremes = _extremes(state, log_ratio)
    enters_loss = _kept(state).double()
    lag_counts = enters_loss.new_zeros(LAGS).index_add(0, state.lag.clamp(max=LAGS - 1), enters_loss)
    flat_sums = torch.cat([table.flatten(), torch.stack(list(extremes.values())), lag_counts]).tolist()
    extreme_values = dict(zip(extremes, flat_sums[table.numel() :], strict=False))
    extreme_values = {name: value for name, value in extreme_values.items() if value != NOTHING}

    width = table.shape[1]
    rows = [flat_sums[start : start + width] for start in range(0, table.numel(), width)]
    named_rows = dict(zip(names, rows, strict=False))

    def ratio_fields(column: int) -> dict[str, Any]:
        named_sums = {name: row[column] for name, row in named_rows.items() if name in RATIO_FIELDS}
        histogram = {index: row[column] for index, row in enumerate(rows[len(names) :]) if row[column]}
        return {**named_sums, "histogram": histogram}

    return TokenReport(
        sums=TokenSums(
            **ratio_fields(-1),
            **{name: row[-1] for name, row in named_rows.items() if name not in RATIO_FIELDS},
            micro_batches=1,
            kept_by_lag={lag: int(count) for lag, count in enumerate(flat_sums[-LAGS:]) if count},
            by_lag_bucket={lag: RatioSums(**ratio_fields(column)) for column, lag in enumerate(LAG_NAMES)},
        ),
        highest={name: value for name, value in extreme_values.items() if not name.startswith("-")},
        lowest={name[1:]: -value for name, value in extreme_values.items() if name.startswith("-")},
    )


def _columns(state: TokenState, log_ratio: Tensor) -> dict[str, Tensor]:
    """Return the columns [N] whose sums are the fields of TokenSums, 0 where the token is out of scope."""
    trainable = state.trainable
    enters_loss = _kept(state)
    is_exact = state.exact & state.trainable
    rho = log_ratio.exp()
    advantage = torch.where(trainable, state.advantage.double(), 0.0)
    weight = torch.where(enters_loss, state.correction.weight.double(), 0.0)
    weighted_push = torch.where(enters_loss, state.weight.double(), 0.0) * weight * advantage
    k3_values = rho - 1 - log_ratio
    is_eligible = trainable & ~state.ruled_out
    clipped_lower = state.clipped_lower if state.clipped_lower is not None else torch.zeros_like(enters_loss)

    return {
        "loss": torch.where(enters_loss, state.loss, 0.0),
        "model_tokens": state.counted,
        "trainable_tokens": trainable,
        "kept_tokens": enters_loss,
        "nonfinite_tokens": state.within_staleness & ~trainable,
        "eligible_tokens": is_eligible,
        "clipped_tokens": state.clipped & is_eligible,
        "clipped_lower_tokens": clipped_lower & is_eligible,
        "masked_tokens": state.correction.masked & trainable,
        "truncated_tokens": state.correction.truncated & trainable,
        "log_rho": log_ratio,
        "rho": torch.where(trainable, rho, 0.0),
        "rho_squared": torch.where(trainable, rho**2, 0.0),
        "k3": k3_values,
        "drift": torch.where(trainable, state.drift, 0.0),
        "entropy": torch.where(state.counted, state.entropy.nan_to_num(0.0), 0.0),
        "exact_tokens": is_exact,
        "exact_difference": torch.where(is_exact, (state.prox - state.mu).abs(), 0.0),
        "exact_k3": torch.where(is_exact, k3_values, 0.0),
        "weight": weight,
        "weight_squared": weight**2,
        "zero_advantage_tokens": trainable & (advantage == 0),
        "positive_advantage": advantage.clamp(min=0),
        "negative_advantage": (-advantage).clamp(min=0),
        "kept_positive_advantage": weight * advantage.clamp(min=0),
        "kept_negative_advantage": weight * (-advantage).clamp(min=0),
        "push": weighted_push,
        "push_size": weighted_push.abs(),
    }


def _episodes(state: TokenState, log_ratio: Tensor, bucket: Tensor) -> Tensor:
    """[3, lag buckets + 1]: episodes with trainable tokens there, Σ w and Σ w² of their weights Π rho."""
    bucket_count = len(LAG_NAMES)
    episode_count = int(state.row.max()) + 1
    values = torch.stack([log_ratio, state.trainable.double()])
    total, count = _scatter(state.row * bucket_count + bucket, values, episode_count * bucket_count).view(
        2, episode_count, bucket_count
    )
    total, count = (torch.cat([x, x.sum(1, keepdim=True)], 1) for x in (total, count))
    is_present = (count > 0).double()
    episode_weight = total.clamp(-SEQUENCE_LOG_LIMIT, SEQUENCE_LOG_LIMIT).exp() * is_present
    return torch.stack([is_present.sum(0), episode_weight.sum(0), (episode_weight**2).sum(0)])


def _extremes(state: TokenState, log_ratio: Tensor) -> dict[str, Tensor]:
    """Return maxima by metric; with a leading minus the maximum of the negative."""
    rho = log_ratio.exp()
    weight = state.correction.weight.double()

    named_ratios = {"rho": rho, "rollout_is": torch.where(_kept(state), weight, 0.0)}
    extremes = {}
    for name, values in named_ratios.items():
        extremes[f"rollout_corr/{name}_max"] = torch.where(state.trainable, values, NOTHING).max()
        extremes[f"-rollout_corr/{name}_min"] = torch.where(state.trainable, -values, NOTHING).max()

    logprob_difference = torch.where(
        state.exact & state.trainable, (state.prox - state.mu).abs().double(), NOTHING
    )
    return {**extremes, "rollout_corr/logprob_diff_max": logprob_difference.max()}


def _kept(state: TokenState) -> Tensor:
    """Return tokens that enter the loss."""
    return state.trainable & ~state.correction.masked


def _scatter(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """[k, size]: Σ of `values` [k, N] by place [N]."""
    return values.new_zeros(len(values), size).index_add(1, indices, values)
