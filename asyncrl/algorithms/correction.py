"""Behaviour correction: what becomes of a token that an older policy, or another engine, sampled.

rho = prox/mu, with mu the engine's log-prob and prox the policy at the start of the batch; with one
optimizer step per batch prox is the current policy itself. Rules compose: masks say which tokens stay,
at most one weight rule says how much they count; each looks at the uncorrected rho.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.registry import Registry, bind

LOG_RATIO_LIMIT = 20.0
Level = Literal["token", "turn", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionInput:
    """Tokens [N]. `log_ratio` is log prox - log mu, without gradient and finite, 0 where not `fresh`;
    `row`: episode of each token, `turn`: its turn. Ratios over several tokens are over fresh ones only."""

    log_ratio: Tensor
    advantage: Tensor
    row: Tensor
    turn: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class Verdict:
    """What one rule says, [N]. A mask rule sets `keep`; a weight rule `weight` and where it was `cut`."""

    keep: Tensor | None = None
    weight: Tensor | None = None
    cut: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """A registered rule. kind `weight`: gives weights; `mask`: only removes tokens; `scale`: divides all weights by
    their mean over the batch, once at its end (`of` is not called)."""

    of: Callable[..., Verdict]
    kind: Literal["weight", "mask", "scale"]


@dataclass(frozen=True)
class Correction:
    """Tokens [N], without gradient. `weight` multiplies the loss and is 0 where `masked`. `ratio`: rho."""

    weight: Tensor
    ratio: Tensor
    masked: Tensor
    truncated: Tensor


corrections: Registry[Rule] = Registry("correction")


def correction(name: str, *, kind: Literal["weight", "mask", "scale"]) -> Callable[[Callable[..., Verdict]], Rule]:
    """Register a function `(given: CorrectionInput, *, options…) -> Verdict` under `name`."""
    return lambda function: corrections.register(name)(Rule(function, kind))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±20, so that it stays finite in float32."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def select_rules(named: Mapping[str, Mapping[str, Any]], where: str) -> list[Rule]:
    """The rules of a configuration with their options bound. ConfigError for two weight rules."""
    rules = []
    for name, options in named.items():
        rule = corrections.load(name)
        rules.append(replace(rule, of=bind(rule.of, options, f"{where}.{name}")))
    if sum(rule.kind == "weight" for rule in rules) > 1:
        raise ConfigError(f"{where}: {', '.join(named)} hold two weights; rho would be counted twice; keep one")
    return rules


def correct(rules: Sequence[Rule], given: CorrectionInput) -> Correction:
    """Apply all rules. Without a weight rule every kept token weighs 1; the ratio is reported in any case."""
    ratio = ratio_of(given.log_ratio)
    weight, masked = torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    cut = masked
    for rule in rules:
        if rule.kind == "scale":
            continue
        verdict = rule.of(given)
        if verdict.keep is not None:
            masked = masked | ~verdict.keep
        if verdict.weight is not None:
            weight = verdict.weight
        if verdict.cut is not None:
            cut = verdict.cut
    return Correction(weight.masked_fill(masked, 0.0), ratio, masked, cut & ~masked)


@correction("mask", kind="mask")
def mask(given: CorrectionInput, *, low: float = 0.5, high: float = 5.0) -> Verdict:
    """Keep iff low <= rho <= high (IcePop). The bounds are on rho itself, not on its negative logarithm."""
    ratio = ratio_of(given.log_ratio)
    return Verdict(keep=(ratio >= low) & (ratio <= high))


@correction("truncate", kind="weight")
def truncate(given: CorrectionInput, *, positive: float = 5.0, negative: float = 2.0) -> Verdict:
    """min(rho, C), C = `positive` or, where A < 0, `negative` (TIS)."""
    ratio = ratio_of(given.log_ratio)
    cap = torch.where(given.advantage < 0, negative, positive).to(ratio.dtype)
    return Verdict(weight=torch.minimum(ratio, cap), cut=ratio > cap)
