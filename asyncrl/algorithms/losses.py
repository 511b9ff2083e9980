"""Policy losses per token, before aggregation. Each is a function of one typed input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction, ratio_of
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.registry import Registry


@dataclass(frozen=True)
class LossInput:
    """Model tokens [N] of one micro-batch. Only `logp` (log pi) carries a gradient.

    `prox` is log prox; with one optimizer step per batch it is `logp` without gradient. `row` [N] is
    the episode each token belongs to, for losses over sequences.
    """

    logp: Tensor
    prox: Tensor
    mu: Tensor
    advantage: Tensor
    row: Tensor
    correction: Correction
    config: AlgorithmConfig


@dataclass(frozen=True)
class TokenLoss:
    """`value` [N] is the loss of each token, `clipped` [N] tells where the trust region cut the gradient."""

    value: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Loss:
    """A registered loss.

    `ratio` says which ratio the formula contains itself. A `mu` loss already weighs by pi/mu: giving it
    a behaviour weight as well would count the correction twice.
    """

    of: Callable[[LossInput], TokenLoss]
    ratio: Literal["mu", "prox"]


losses: Registry[Loss] = Registry("loss")


def token_loss(name: str, *, ratio: Literal["mu", "prox"]) -> Callable[..., Loss]:
    """Register a function of single tokens under `name`."""
    return lambda function: losses.register(name)(Loss(function, ratio))


def select_loss(config: AlgorithmConfig) -> Loss:
    """The configured loss; ConfigError when its correction would be applied twice."""
    loss = losses.load(config.loss)
    if loss.ratio == "mu" and config.correction == "mask_truncate":
        raise ConfigError(
            f"$.algorithm.loss {config.loss!r} contains pi/mu itself; correction 'mask_truncate' would "
            "count it twice"
        )
    return loss


@token_loss("reinforce", ratio="prox")
def reinforce(given: LossInput) -> TokenLoss:
    """L = -sg(w)·A·log pi: the gradient of the truncated importance-sampled objective.

    With prox = sg(pi), w = M·min(pi/mu, C): the default for stale data. There is nothing to clip.
    """
    value = -given.correction.weight * given.advantage * given.logp
    return TokenLoss(value, torch.zeros_like(given.correction.masked))


@token_loss("decoupled_ppo", ratio="prox")
def decoupled_ppo(given: LossInput) -> TokenLoss:
    """L = sg(w)·max(-uA, -A·clip(u, 1-low, 1+high)), u = pi/prox.

    w is the corrected prox/mu (AReaL, arXiv 2505.24298).
    """
    u = ratio_of(given.logp - given.prox)
    bounded = u.clamp(1 - given.config.clip_low, 1 + given.config.clip_high)
    free, held = -u * given.advantage, -bounded * given.advantage
    return TokenLoss(given.correction.weight * torch.maximum(free, held), held > free)
