"""Policy losses per token, before aggregation: what they are functions of, and their registry; the critic's.

    token_losses.py   a token by itself, or with a ratio over its episode
    batch_losses.py   against the whole batch

`recipe.py` imports both, so that every name is registered.

pi is the policy with its gradient, prox the policy at the start of the batch, mu the policy that sampled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from asyncrl.algorithms.correction import Correction, Level, summed
from asyncrl.algorithms.renamed import renamed_attribute
from asyncrl.registry import Registry, bind_options

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossInput:
    """Model tokens [N] of one micro-batch. Only `logp` (log pi) carries a gradient.

    `prox` is log prox; with one optimizer step per batch it is `logp` without gradient. `row` is the episode
    that each token belongs to, for losses over sequences; these use only `trainable` tokens (all log-probs
    are finite; elsewhere `logp`, `prox` and `mu` are equal). `turn`: the turn of its episode that wrote the
    token, from 0; `lag`: the version that the step starts from minus the version that sampled the token.
    `reference`: log-probs of the reference policy; `prepared`: the value that the loss's own `prepare`
    returned for each token. Both are None unless the loss declares them.
    """

    logp: Tensor
    prox: Tensor
    mu: Tensor
    advantage: Tensor
    row: Tensor
    turn: Tensor
    lag: Tensor
    trainable: Tensor
    correction: Correction
    reference: Tensor | None = None
    prepared: Tensor | None = None

    def weighed(self, value: Tensor) -> Tensor:
        """[N] `value` times the weight of the correction, which is 0 or 1 for a loss that contains pi/mu; 0
        where not trainable."""
        return torch.where(self.trainable, self.correction.weight * value, 0.0)

    def episode_sum(self, value: Tensor) -> Tensor:
        """[N] at each token, the sum of `value` over the trainable tokens of its episode."""
        return summed(value, self.row, self.trainable)[0]

    def episode_mean(self, value: Tensor) -> Tensor:
        """[N] at each token, the mean of `value` over the trainable tokens of its episode; 0 without any."""
        total, count = summed(value, self.row, self.trainable)
        return total / count

    if not TYPE_CHECKING:  # a type checker is to see that the attribute is missing

        def __getattr__(self, name: str) -> object:
            raise renamed_attribute(self, name, {"fresh": "trainable"})


@dataclass(frozen=True)
class TokenLoss:
    """`value` [N] is the loss of each token, including the correction weight; `clipped` [N] marks where the
    trust region cut or bounded the gradient, `clipped_lower` where the dual clip did. `ratio` [N]: the factor
    with which a `mu` loss weights A·∇log pi, 0 where it drops a token; for reports only."""

    value: Tensor
    clipped: Tensor
    clipped_lower: Tensor | None = None
    ratio: Tensor | None = None


Prepare = Callable[..., list[np.ndarray]]


@dataclass(frozen=True)
class Loss:
    """Describes a registered loss.

    `ratio` says which ratio the formula contains itself. A `mu` loss already weighs by pi/mu, or needs no
    weight: giving it a behaviour weight as well would count the correction twice (masks are fine).
    `clips`: a trust region around prox that is inert when pi = prox, where the gradient is that of
    `reinforce`. `anchored`: several optimizer steps stay near prox, yet a single one is not that of
    `reinforce`. `linear`: proportional to the advantage, so that a number of the batch may divide the
    gradient at the end of a stream. `reference`: it reads the reference policy. `prepare`: called with the
    traces of the whole batch and those options of the loss that it names, gives one number per token; the
    loss needs the barrier then. `whole_group`: every member of a group must be in the batch. `level`: of the
    weight it is corrected with unless the configuration says otherwise. `demonstrations`: it learns from
    conversations of the data, which nothing has sampled: there is no mu, and pi takes its place.
    """

    of: Callable[..., TokenLoss]
    ratio: Literal["mu", "prox"]
    clips: bool = False
    anchored: bool = False
    linear: bool = False
    reference: bool = False
    prepare: Prepare | None = None
    whole_group: bool = False
    level: Level = "token"
    demonstrations: bool = False

    @property
    def trusts(self) -> bool:
        """True if the loss has a trust region around prox."""
        return self.clips or self.anchored

    def bound(self, options: Mapping[str, Any], where: str) -> Loss:
        """Return the loss with its options set. ConfigError as in `bind_options`."""
        of: Any = bind_options(self.of, options, where)
        if self.prepare is None:
            return replace(self, of=of)

        accepted = inspect.signature(self.prepare).parameters
        prepare_options = {name: value for name, value in of.keywords.items() if name in accepted}
        return replace(self, of=of, prepare=functools.partial(self.prepare, **prepare_options))


RENAMED = {  # names of what other options of a loss, or another loss, are
    "gpg": "reinforce",
    "aipo": "{cispo_scalerl: {cap: 2}}",
    "decoupled_ppo": "{ppo: {dual_clip: 0}}",
}
losses: Registry[Loss] = Registry("loss", Loss, RENAMED)


def loss(
    name: str, *, ratio: Literal["mu", "prox"], **declared_fields: Any
) -> Callable[[Callable[..., TokenLoss]], Loss]:
    """Register `(tokens: LossInput, *, options…) -> TokenLoss` as `name`. `declared_fields`: of
    Loss."""
    return lambda function: losses.register(name)(Loss(function, ratio, **declared_fields))


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """½·max((V − G)², (V_old + clamp(V − V_old, ±clip) − G)²) and where the clipped term decides, both [N].

    Source: the value clipping of PPO's implementations (arXiv 1707.06347, 2005.12729). `value` carries the
    gradient; `old_value` is V at the start of the batch, `returns` G = advantage before whitening + V_old.
    clip 0: plain ½·(V − G)².
    """
    free_loss = (value - returns) ** 2
    if not clip:
        return free_loss / 2, torch.zeros_like(free_loss, dtype=torch.bool)
    value_change = value - old_value
    clipped_loss = (old_value + value_change.clamp(-clip, clip) - returns) ** 2
    return torch.maximum(free_loss, clipped_loss) / 2, (clipped_loss > free_loss) & (
        value_change.abs() > clip
    )
