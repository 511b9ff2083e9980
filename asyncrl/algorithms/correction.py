"""Behaviour correction: weights and masks for tokens that an older policy, or another engine, sampled.

rho = prox/mu, with mu the engine's log-prob and prox the policy at the start of the batch; with one
optimizer step per batch prox is the current policy itself. Rules compose: masks say which tokens stay,
at most one weight rule says how much they count; each looks at the uncorrected rho (`negative` at pi/mu).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from msgspec import Meta

from asyncrl.algorithms.renamed import renamed_attribute
from asyncrl.errors import ConfigError
from asyncrl.registry import Registry, bind_options

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
Level = Literal["token", "turn", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionInput:
    """Tokens [N]. `log_ratio` is log prox - log mu, `current` is log pi - log mu, both without gradient,
    finite, and 0 for tokens that are not `trainable`. `row`: the episode of each token; `turn`: its turn.
    Ratios over several tokens use only the trainable ones."""

    log_ratio: Tensor
    current: Tensor
    advantage: Tensor
    row: Tensor
    turn: Tensor
    trainable: Tensor

    if not TYPE_CHECKING:  # a type checker is to see that the attribute is missing

        def __getattr__(self, name: str) -> object:
            raise renamed_attribute(self, name, {"fresh": "trainable"})


@dataclass(frozen=True)
class CorrectionMask:
    """The result of one rule, [N]. A mask rule sets `keep`; a weight rule sets `weight`, and where it was
    `cut`."""

    keep: Tensor | None = None
    weight: Tensor | None = None
    cut: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """A registered rule. kind `weight`: gives weights; `mask`: only removes tokens; `scale`: divides all
    weights by the mean of those kept in the batch, once at its end (`of` is not called)."""

    of: Callable[..., CorrectionMask]
    kind: Literal["weight", "mask", "scale"]


@dataclass(frozen=True)
class Correction:
    """Tokens [N], without gradient. `weight` multiplies the loss and is 0 where `masked`. `ratio`: rho."""

    weight: Tensor
    ratio: Tensor
    masked: Tensor
    truncated: Tensor


corrections: Registry[Rule] = Registry("correction", Rule)


def correction(
    name: str, *, kind: Literal["weight", "mask", "scale"]
) -> Callable[[Callable[..., CorrectionMask]], Rule]:
    """Register a function `(tokens: CorrectionInput, *, options…) -> CorrectionMask` under `name`."""
    return lambda function: corrections.register(name)(Rule(function, kind))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±20, so that it stays finite in float32."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def select_rules(named_rules: Mapping[str, Mapping[str, Any]], where: str) -> list[Rule]:
    """The rules of a configuration with their options bound. ConfigError for two weight rules, and for a band
    that holds nothing."""
    selected_rules = []
    for name, options in named_rules.items():
        rule = corrections.load(name, where)
        bound: Any = bind_options(rule.of, options, f"{where}.{name}")
        low, high = (bound.keywords.get(limit) for limit in ("low", "high"))
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"{where}.{name}: low ({low}) is above high ({high}), so no token would be kept; swap "
                "the two values"
            )
        selected_rules.append(replace(rule, of=bound))

    if sum(rule.kind == "weight" for rule in selected_rules) > 1:
        raise ConfigError(
            f"{where}: {', '.join(named_rules)} contain two weights, so rho would be applied twice; "
            "keep only one of the two"
        )

    return selected_rules


def correct(rules: Sequence[Rule], tokens: CorrectionInput) -> Correction:
    """Apply all rules. Without a weight rule every kept token weighs 1; the ratio is reported in any case."""
    ratio = ratio_of(tokens.log_ratio)
    weight = torch.ones_like(ratio)

    masked = torch.zeros_like(ratio, dtype=torch.bool)
    is_truncated = masked
    for rule in rules:
        if rule.kind == "scale":
            continue
        rule_result = rule.of(tokens)
        if rule_result.keep is not None:
            masked = masked | ~rule_result.keep
        if rule_result.weight is not None:
            weight = rule_result.weight
        if rule_result.cut is not None:
            is_truncated = rule_result.cut

    return Correction(weight.masked_fill(masked, 0.0), ratio, masked, is_truncated & ~masked)


def correct_states(rules: Sequence[Rule], tokens: CorrectionInput) -> Correction:
    """Correct a loss of the state in front of each token, whatever is sampled there, as `correct` does.

    Its ratio is that of the tokens of the turn or episode that led to it, where the weight is over turns or
    episodes, and 1 at level token or geometric. Masks of single tokens do not apply.
    """
    rules_with_level = [(rule, getattr(rule.of, "keywords", {}).get("level")) for rule in rules]

    level: Any = next((level for rule, level in rules_with_level if rule.kind == "weight"), "token")
    leading_log_ratio = torch.zeros_like(tokens.log_ratio)
    if level in ("turn", "sequence") and len(leading_log_ratio):
        span, span_order = places(tokens, level).sort(stable=True)  # those of several agents take turns
        values = torch.where(tokens.trainable, tokens.log_ratio, 0.0).double()[span_order]
        sum_before = values.cumsum(0) - values
        span_start = torch.searchsorted(span, span)
        leading_log_ratio[span_order] = (sum_before - sum_before[span_start]).to(leading_log_ratio.dtype)

    masked = correct(
        [rule for rule, rule_level in rules_with_level if rule.kind == "mask" and rule_level != "token"],
        tokens,
    ).masked
    weights = [
        replace(r, of=partial(r.of, level="token"))
        for r, rule_level in rules_with_level
        if r.kind == "weight" and rule_level
    ]
    corrected = correct(
        weights, replace(tokens, log_ratio=leading_log_ratio, advantage=torch.zeros_like(leading_log_ratio))
    )

    return replace(corrected, weight=corrected.weight.masked_fill(masked, 0.0), masked=masked)


def places(tokens: CorrectionInput, level: Level) -> Tensor:
    """Return the episode of each token or, at level `turn`, the turn of its episode, as numbers."""
    if level != "turn":
        return tokens.row
    return tokens.row * (int(tokens.turn.max()) + 1) + tokens.turn


def pooled(values: Tensor, tokens: CorrectionInput, level: Level) -> tuple[Tensor, Tensor]:
    """Σ of `values` over the trainable tokens of each token's turn or episode, and their number (at least 1),
    [N] both. At level `token` the values themselves."""
    if level == "token" or not len(values):
        return values, torch.ones_like(values)
    return summed(values, places(tokens, level), tokens.trainable)


def summed(values: Tensor, spans: Tensor, trainable: Tensor) -> tuple[Tensor, Tensor]:
    """At each token, the sum of `values` over the trainable tokens of its place, and their number (at least
    1); [N] all."""
    # float64: the log-ratios of a long episode cancel.
    summed_terms = torch.stack([torch.where(trainable, values, 0.0).double(), trainable.double()])
    span_count = int(spans.max()) + 1
    span_sums, span_counts = torch.zeros(
        2, span_count, dtype=summed_terms.dtype, device=summed_terms.device
    ).index_add(1, spans, summed_terms)
    return span_sums[spans].to(values.dtype), span_counts[spans].clamp(min=1).to(values.dtype)


def mean_over(values: Tensor, tokens: CorrectionInput, level: Level) -> Tensor:
    """Mean of `values` over the trainable tokens of the turn or episode, [N]."""
    total, count = pooled(values, tokens, level)
    return total / count


def ratio_at(tokens: CorrectionInput, level: Level) -> Tensor:
    """rho of a token [N], or over its turn or episode: the product of its tokens' or their geometric mean."""
    total, count = pooled(tokens.log_ratio, tokens, level)
    return ratio_of(total / count if level == "geometric" else total)


Positive = Annotated[float, Meta(gt=0)]


@correction("truncate", kind="weight")
def truncate(
    tokens: CorrectionInput, *, level: Level = "token", positive: Positive = 5.0, negative: Positive = 2.0
) -> CorrectionMask:
    """w = min(ρ, C), C = `positive` or, where A < 0, `negative` (truncated importance sampling: IMPALA,
    arXiv 1802.01561). Over turns and episodes the sign is that of the mean A of their trainable tokens.

    Use: the default weight. Set `positive` to 2 for a lag of 1, 5 for a lag of 4 to 8, and 8 for longer
    lags. `turn` and `sequence` also weigh the context of a token, with a variance that grows with length;
    `geometric` suits models whose token ratios are noisy.
    """
    ratio = ratio_at(tokens, level)
    credit = mean_over(tokens.advantage, tokens, level)
    cap = torch.full_like(ratio, positive).masked_fill(credit < 0, negative)
    return CorrectionMask(weight=torch.minimum(ratio, cap), cut=ratio > cap)


@correction("ratio", kind="weight")
def plain_ratio(tokens: CorrectionInput, *, level: Level = "token") -> CorrectionMask:
    """w = ρ (plain importance sampling).

    Use: together with a band (`mask`) that bounds it: the two make IcePop. Use it alone only to measure the
    bias of other rules at a lag of 1.
    """
    return CorrectionMask(weight=ratio_at(tokens, level))


@correction("mask", kind="mask")
def mask(
    tokens: CorrectionInput,
    *,
    low: Annotated[float, Meta(ge=0)] = 0.5,
    high: Positive = 5.0,
    level: Level = "token",
) -> CorrectionMask:
    """Keep iff low ≤ ρ ≤ high (IcePop, arXiv 2510.18855). The bounds are on ρ, not on its negative logarithm.

    Use: together with a weight: [0.5, 5] for staleness up to 8, [0.5, 2] for engine mismatch alone.
    """
    ratio = ratio_at(tokens, level)
    return CorrectionMask(keep=(ratio >= low) & (ratio <= high))


@correction("reject_sequence", kind="mask")
def reject_sequence(
    tokens: CorrectionInput, *, low: Annotated[float, Meta(ge=0)] = 0.9, high: Positive = 1.1
) -> CorrectionMask:
    """Keep the episode iff low ≤ exp(mean log ρ) ≤ high, the mean over its trainable tokens (geometric
    rejection; plain). Its reward stays in the group's baseline.

    Use: to drop episodes that have drifted as a whole, at staleness 1 to 8. Bounds of [0.99, 1.001] are for
    engine mismatch at one version and would drop nearly all stale episodes.
    """
    return mask.of(tokens, low=low, high=high, level="geometric")


@correction("reject", kind="mask")
def reject(
    tokens: CorrectionInput,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    limit: Positive = 0.1,
    level: Literal["token", "turn", "sequence"] = "sequence",
) -> CorrectionMask:
    """Keep iff |mean k| ≤ limit over the level's trainable tokens: k1 = -log ρ, k2 = (log ρ)²/2, k3 = ρ - 1
    - log ρ (Schulman, joschu.net/blog/kl-approx.html). k1 is signed, so both sides are bounded: e^-limit ≤
    geometric ρ ≤ e^limit.

    Use: to bound KL(mu, prox) per token, in nats: k3 for the KL itself, k2 if large values of ρ should not
    dominate, k1 for the drift. Staleness 1 to 8.
    """
    log_ratio = tokens.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[estimator]
    return CorrectionMask(keep=mean_over(value, tokens, level).abs() <= limit)


@correction("veto", kind="mask")
def veto(tokens: CorrectionInput, *, least: Annotated[float, Meta(gt=0, lt=1)] = 1e-5) -> CorrectionMask:
    """Drop the episode if any trainable token has ρ < least (plain).

    Use: protection against broken log-probs, such as that of a token that the policy would hardly ever
    write. Any staleness; at long lags, valid tokens are also dropped.
    """
    is_absurd = (tokens.log_ratio < math.log(least)).to(tokens.log_ratio.dtype)
    return CorrectionMask(keep=pooled(is_absurd, tokens, "sequence")[0] == 0)


@correction("negative", kind="mask")
def negative_episodes(tokens: CorrectionInput, *, delta: Positive = 0.1) -> CorrectionMask:
    """Drop the episode if A < 0 and mean(log μ − log π) > delta over its trainable tokens (off-policy
    sequence masking: DeepSeek-V3.2, arXiv 2512.02556). The sign is that of its mean A; π is the current
    policy, so each of several optimizer steps decides again.

    Use: several steps per batch, or staleness above 4: wrong answers that the policy no longer gives teach
    little and destabilise training.
    """
    is_punished = mean_over(tokens.advantage, tokens, "sequence") < 0
    return CorrectionMask(keep=~(is_punished & (mean_over(-tokens.current, tokens, "sequence") > delta)))


@correction("batch_mean", kind="scale")
def batch_mean(tokens: CorrectionInput) -> CorrectionMask:
    """w ← w / mean(w) over the batch's kept tokens (self-normalised importance sampling; plain).

    Use: together with a weight, to keep the step size independent of how far the data has drifted. Staleness
    1 to 8.
    """
    return CorrectionMask()
