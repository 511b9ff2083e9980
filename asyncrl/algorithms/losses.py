"""Policy losses per token, before aggregation. Each is a function of one typed input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from asyncrl.algorithms.correction import Correction, ratio_of
from asyncrl.registry import Registry, bind


@dataclass(frozen=True)
class LossInput:
    """Model tokens [N] of one micro-batch. Only `logp` (log pi) carries a gradient.

    `prox` is log prox; with one optimizer step per batch it is `logp` without gradient. `row` is the episode
    each token belongs to, for losses over sequences; these count `fresh` tokens only (all log-probs are
    finite, and `logp`, `prox` and `mu` equal elsewhere). `reference`: log-probs of the reference policy;
    `prepared`: what the loss's own `prepare` said of each token; None where the loss asked for neither.
    """

    logp: Tensor
    prox: Tensor
    mu: Tensor
    advantage: Tensor
    row: Tensor
    fresh: Tensor
    correction: Correction
    reference: Tensor | None = None
    prepared: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """`value` [N] is the loss of each token, correction weight included; `clipped` [N] tells where the trust
    region cut the gradient, `clipped_lower` where the dual clip did."""

    value: Tensor
    clipped: Tensor
    clipped_lower: Tensor | None = None


@dataclass(frozen=True)
class BatchTrace:
    """One episode of a whole batch at its start, arrays per model token [T]. `fresh`: may contribute."""

    group: str
    reward: float
    advantage: np.ndarray
    prox: np.ndarray
    mu: np.ndarray
    fresh: np.ndarray
    reference: np.ndarray | None


Prepare = Callable[..., list[np.ndarray]]


@dataclass(frozen=True)
class Loss:
    """A registered loss.

    `ratio` says which ratio the formula contains itself. A `mu` loss already weighs by pi/mu: giving it
    a behaviour weight as well would count the correction twice (masks are fine). `clips`: a trust region
    around prox that is inert when pi = prox. `reference`: it reads the reference policy. `prepare`: called with the
    traces of the whole batch and the same options, gives one number per token: such a loss needs the barrier.
    """

    of: Callable[..., TokenLoss]
    ratio: Literal["mu", "prox"]
    clips: bool = False
    reference: bool = False
    prepare: Prepare | None = None

    def bound(self, options: dict[str, Any], where: str) -> Loss:
        """With its options set; `prepare` takes those of them that it names."""
        prepare = self.prepare and bind_known(self.prepare, options, where)
        return replace(self, of=bind(self.of, options, where), prepare=prepare)


losses: Registry[Loss] = Registry("loss")


def bind_known(function: Callable[..., Any], options: dict[str, Any], where: str) -> Callable[..., Any]:
    """`bind` with those of the options that the function takes."""
    code = function.__code__
    known = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    return bind(function, {name: value for name, value in options.items() if name in known}, where)


def loss(name: str, *, ratio: Literal["mu", "prox"], **needs: Any) -> Callable[[Callable[..., TokenLoss]], Loss]:
    """Register a function `(given: LossInput, *, options…) -> TokenLoss` under `name`; `needs` are the other
    fields of `Loss`."""
    return lambda function: losses.register(name)(Loss(function, ratio, **needs))


@loss("reinforce", ratio="prox")
def reinforce(given: LossInput) -> TokenLoss:
    """L = -sg(w)·A·log pi: the gradient of the truncated importance-sampled objective.

    With prox = sg(pi), w = M·min(pi/mu, C): the default for stale data. There is nothing to clip.
    """
    value = -given.correction.weight * given.advantage * given.logp
    return TokenLoss(value, torch.zeros_like(given.fresh))


@loss("decoupled_ppo", ratio="prox", clips=True)
def decoupled_ppo(
    given: LossInput,
    *,
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2,
    clip_high: Annotated[float, Meta(gt=0)] = 0.28,
) -> TokenLoss:
    """L = sg(w)·max(-uA, -A·clip(u, 1-low, 1+high)), u = pi/prox.

    w is the corrected prox/mu (AReaL, arXiv 2505.24298).
    """
    u = ratio_of(given.logp - given.prox)
    bounded = u.clamp(1 - clip_low, 1 + clip_high)
    free, held = -u * given.advantage, -bounded * given.advantage
    return TokenLoss(given.correction.weight * torch.maximum(free, held), held > free)
