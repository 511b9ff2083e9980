"""Changes a model's layers: recomputation in the backward, and compilation.

Only a layer's `forward` is replaced, so its parameters keep their names. FSDP2's hooks stay outside: FSDP2
gathers a layer once for the recomputation and the backward.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.model_class import text_part
from asyncrl.state_layers import hand_over_state_layers
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.recompute import Recomputation


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of the text part that the model's author marks as units."""
    unit_names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in text_part(model).modules() if type(module).__name__ in unit_names]


def prepare_layers(
    model: PreTrainedModel, trainer: TrainerConfig, recomputation: Recomputation | None = None
) -> None:
    """Let `recomputation` (None: as `trainer` says) decide which layers are recomputed, and compile all
    layers if configured. Must be called before sharding. Raises ConfigError where the model does not name its
    layers."""
    recomputation = recomputation or Recomputation(trainer)

    recomputed_every = trainer.checkpointed_every
    layers = layers_of(model)
    if not layers and (recomputed_every or trainer.compile):
        config_key = "activation_checkpointing" if recomputed_every else "compile"
        raise ConfigError(
            f"trainer.{config_key}: {type(model).__name__} does not name its layers; remove the key"
        )

    compiler = os.environ.get("CXX", "g++")
    if trainer.compile and not torch.cuda.is_available() and not shutil.which(compiler):
        raise ConfigError(
            f"trainer.compile: compiling for a CPU requires a C++ compiler, but {compiler} (CXX) was "
            "not found; install a compiler, or set trainer.compile=false"
        )

    if trainer.compile:  # attention and states are loops over the nodes of a micro-batch
        AttentionInterface.register(
            FOREST_ATTENTION, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[FOREST_ATTENTION])
        )
        hand_over_state_layers(model, prepare=torch.compiler.disable)

    for index, layer in enumerate(layers):
        layer_forward: Any = layer.forward
        if trainer.compile:
            layer_forward = torch.compile(layer_forward, dynamic=True)
        layer.forward = recomputation.wrap(index, layer_forward)


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled so far; constant after the first batches."""
    from torch._dynamo.utils import counters  # a slow import, needed for compiled layers only

    return int(counters["stats"]["unique_graphs"])
