"""The reference policy that a KL term measures the distance to: frozen, scored batch by batch.

It is the policy as it was before the first step, whatever checkpoint a run goes on from: a copy of its own
read from the model directory, or, with adapters, their base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import msgspec
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from asyncrl.config import RunConfig
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World


@dataclass(frozen=True)
class Reference:
    """`policy`: one of its own, or the policy in training, of which the base is scored, without adapters."""

    policy: Policy

    @torch.no_grad()
    def logp(self, tokens: Selected) -> Tensor:
        """Log-probs [N] at the tokens' temperatures, without gradient. A collective. Gathered weights are
        freed."""
        with self.policy.base():  # it goes its own way, as it has its own weights
            found = self.policy(replace(tokens, routes=None)).logp
        if self.policy.adapters is None:  # those of the policy in training are about to be used
            cast(FSDPModule, self.policy).reshard()
        return found


def load_reference(config: RunConfig, world: World, policy: Policy) -> Reference:
    """The reference of a run: `kl.reference`, else the base of the policy's adapters, else the initial
    policy, read once more. A collective. Raises ConfigError when its directory holds no causal LM."""
    if config.model.lora_rank and not config.kl.reference:
        return Reference(policy)
    path, key = (
        (config.kl.reference, "kl.reference") if config.kl.reference else (config.model.path, "model.path")
    )
    model = msgspec.structs.replace(config.model, path=path, lora_rank=0)
    frozen = load_policy(model, world, offload=config.kl.offload, key=key)
    return Reference(frozen.requires_grad_(False))
