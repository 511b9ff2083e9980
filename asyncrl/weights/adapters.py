"""Low-rank adapters of a model, and how a version of them is written down.

    layer: q_proj.weight, frozen │ q_proj.lora_a [rank, in], q_proj.lora_b [out, rank]
    files: base_model.model.…q_proj.lora_A.weight and lora_B.weight, as PEFT and servers read them

The trainer computes with adapters. Engines that support adapters load A and B alone, other engines load the
merged weights. The adapters of agent `coder` are called `q_proj.lora_a_coder`, and in files
`q_proj.lora_A.coder.weight`; no agent is called ''.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.errors import ConfigError
from asyncrl.model_class import frozen_parts, is_within
from asyncrl.weights.manifest import AdapterSpec
from asyncrl.weights.names import FilePiece

ROLE_A = "lora_a"
ROLE_B = "lora_b"
ROLES = {ROLE_A: "lora_A.weight", ROLE_B: "lora_B.weight"}


class Adapters:
    """Adapts linear layers of a model's text part, but not the output layer; the model's own parameters do
    not train: y = W·x + (alpha/rank)·B·A·x with W frozen (LoRA, arXiv 2106.09685).

    `kinds`: the last parts of the names of the layers, such as `q_proj`; empty: all linear layers.

    `sizes`: rank and alpha of each agent's adapter; '': of the adapter of all agents without an entry. Each
    token is computed with the adapter of its agent (`select_adapters`). A and B are parameters of the adapted
    layer itself (`q_proj.lora_a` beside `q_proj.weight`); a hook adds their product to the layer's output.
    So the weights keep their names, and merging is arithmetic on shards. `published`: A and B of all layers,
    by the names in files; `specs`: the description of each agent's adapter in files."""

    def __init__(
        self, model: PreTrainedModel, sizes: Mapping[str, tuple[int, float]], kinds: Collection[str] = ()
    ) -> None:
        self._is_enabled = True
        self._scale_by_agent = {agent: alpha / rank for agent, (rank, alpha) in sizes.items()}
        self._token_masks: dict[str, Tensor | float] = {}
        self.select_adapters(None)
        self._adapted_layers = linear_layers(model, kinds)
        if not self._adapted_layers:
            raise ConfigError(
                "model.lora_rank: this model has no linear layers to adapt; set model.lora_rank=0"
            )

        model.requires_grad_(False)
        for layer in self._adapted_layers.values():
            out_size, in_size = layer.weight.shape
            if isinstance(layer, Conv1D):  # keeps its weight transposed
                out_size, in_size = in_size, out_size
            for agent, (rank, _) in sizes.items():
                lora_a = layer.weight.new_empty(rank, in_size)
                lora_b = layer.weight.new_empty(out_size, rank)
                layer.register_parameter(role_name(ROLE_A, agent), nn.Parameter(lora_a))
                layer.register_parameter(role_name(ROLE_B, agent), nn.Parameter(lora_b))

            layer.register_forward_hook(self._add_adapters)

        transposed = any(isinstance(layer, Conv1D) for layer in self._adapted_layers.values())
        layers = tuple(name.removesuffix(".weight") for name in self._adapted_layers)
        self.specs = {agent: AdapterSpec(*size, layers, transposed) for agent, size in sizes.items()}
        self.published = tuple(
            FilePiece(peft_name(parameter), parameter, tuple(model.get_parameter(parameter).shape))
            for agent in sizes
            for layer in layers
            for parameter in (f"{layer}.{role_name(ROLE_A, agent)}", f"{layer}.{role_name(ROLE_B, agent)}")
        )

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self._scale_by_agent)

    def adapter_index(self, agent: str) -> int:
        """Return the index of an agent's adapter: the agent's own, else the adapter '', else one behind the
        last."""
        return next(
            (self.agents.index(name) for name in (agent, "") if name in self.agents), len(self.agents)
        )

    def select_adapters(self, agents: Tensor | None) -> None:
        """Set the adapters' indices for the next forwards, [tokens] in any shape; None: the first adapter.
        Every adapter is computed for every token, so that ranks agree on the parameters with gradients."""
        for adapter_index, agent in enumerate(self._scale_by_agent):
            self._token_masks[agent] = (
                float(adapter_index == 0) if agents is None else agents == adapter_index
            )

    def _add_adapters(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self._is_enabled:
            return output

        for agent, scale in self._scale_by_agent.items():
            # The scale is applied here, where the tensor is small.
            low_rank = scale * linear(args[0], getattr(layer, role_name(ROLE_A, agent)))
            if len(self._scale_by_agent) > 1 or agent:  # tokens of others
                token_mask = self._token_masks[agent]
                low_rank = low_rank * (
                    token_mask.view(*low_rank.shape[:-1], 1) if isinstance(token_mask, Tensor) else token_mask
                )

            output = output + linear(low_rank, getattr(layer, role_name(ROLE_B, agent)))

        return output

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model, without adapters, during the body."""
        self._is_enabled = False
        try:
            yield
        finally:
            self._is_enabled = True

    def merged_weight(self, name: str, weight: DTensor) -> DTensor:
        """Return W + (alpha/rank)·B·A for the parameter called `name`, sharded as W is; W itself if there is
        no adapter '' for this parameter. A collective: A is gathered."""
        if self.adapter_names(name) is None:
            return weight
        layer = self._adapted_layers[name]
        update = cast(DTensor, self.weight_change(name, getattr(layer, ROLE_A), getattr(layer, ROLE_B)))
        return cast(DTensor, weight + update.redistribute(weight.device_mesh, weight.placements))

    def weight_change(self, name: str, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """Return what the shared adapter (''), A and B, adds to the weight called `name`."""
        product = self._scale_by_agent[""] * (lora_b @ lora_a)
        if isinstance(self._adapted_layers[name], Conv1D):  # keeps its weight transposed
            return product.t()
        return product

    def adapter_names(self, name: str) -> tuple[str, str] | None:
        """Return the names of A and B for a weight, of the adapter ''; None without an adapter."""
        stem = name.removesuffix("weight")
        return (
            (stem + ROLE_A, stem + ROLE_B)
            if name in self._adapted_layers and "" in self._scale_by_agent
            else None
        )


def linear_layers(model: PreTrainedModel, kinds: Collection[str] = ()) -> dict[str, nn.Linear | Conv1D]:
    """Return the linear layers of the text part but the output layer, by the names of their weights. `kinds`:
    the last parts of their names; (): all."""
    frozen_part_names = frozen_parts(model)
    return {
        f"{name}.weight": layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and layer is not model.get_output_embeddings()
        and not is_within(name, frozen_part_names)
        and (not kinds or name.rpartition(".")[2] in kinds)
    }


def role_name(role: str, agent: str) -> str:
    """Name a layer's A or B for an agent."""
    return f"{role}_{agent}" if agent else role


def owning_agent(parameter: str) -> str | None:
    """Return the agent whose adapter a parameter, by its name, belongs to; None: of no adapter."""
    parameter_name = parameter.rpartition(".")[2]
    return parameter_name[len(ROLE_A) + 1 :] if parameter_name[: len(ROLE_A)] in ROLES else None


def peft_name(parameter: str) -> str:
    """Name an adapter's parameter as PEFT's files do, an agent's parameter as PEFT does in memory."""
    layer, _, parameter_name = parameter.rpartition(".")
    role, _, weight = ROLES[parameter_name[: len(ROLE_A)]].partition(".")
    agent = owning_agent(parameter)
    return ".".join(filter(None, ("base_model.model", layer, role, agent, weight)))


def initial_values(name: str, parameter: Tensor) -> Tensor:
    """Return the first values of a parameter that a model directory does not hold: A uniform in ±1/√in, all
    other parameters zero. So an adapted model starts as its base does, and a value head at 0."""
    values = torch.zeros(parameter.shape, dtype=parameter.dtype)
    if owning_agent(name) is not None and f".{ROLE_A}" in name:
        values.uniform_(-1, 1).div_(math.sqrt(parameter.shape[1]))
    return values
