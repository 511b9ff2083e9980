"""The critic: a backbone of its own with a value per token, trained by the same micro-batches as the policy.

V_t, the value before token t is sampled, reads the hidden state that predicts token t.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from asyncrl.config import RunConfig
from asyncrl.trainer.layers import prepare_layers
from asyncrl.trainer.loading import add_value_head, read_model, shard_and_fill, values
from asyncrl.trainer.optimizer import make_optimizer
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.sequence import in_parts
from asyncrl.trainer.ulysses import SequenceRanks
from asyncrl.trainer.world import World


class Critic(nn.Module):
    """The FSDP root around a backbone with `value_head`, which starts at zero."""

    optimizer: torch.optim.Optimizer

    def __init__(self, backbone: PreTrainedModel, ranks: SequenceRanks | None) -> None:
        super().__init__()
        self.backbone, self.ranks = backbone, ranks
        add_value_head(backbone, backbone.config.get_text_config().hidden_size)

    def forward(self, tokens: Selected) -> Tensor:
        """Values [N] with gradient, float32 at least."""
        (found,) = in_parts(self._values, tokens, self.ranks)
        assert found is not None
        return found

    def _values(self, tokens: Selected) -> tuple[Tensor]:
        hidden = self.backbone(**tokens.inputs).last_hidden_state
        return (values(self.backbone, tokens.predictors(hidden)),)


def load_critic(config: RunConfig, world: World) -> Critic:
    """The critic of a run (`critic.backbone: own`) with its optimizer, sharded over the ranks. A collective.

    All its weights are trained, also where the policy has adapters. Raises ConfigError when its directory
    holds no model.
    """
    path, key = config.critic.path, "critic.path"
    if not path:
        path, key = config.model.path, "model.path"
    source = read_model(AutoModel, path, config.model.dtype, world, key)
    critic = Critic(source.model, world.sequence)
    prepare_layers(source.model, config.trainer)
    shard_and_fill(critic, source, world, offload=config.trainer.offload_optimizer)
    critic.optimizer = make_optimizer(critic, config.trainer, lr=config.critic.lr)
    return critic
