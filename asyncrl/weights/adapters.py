"""Low-rank adapters of a model, and how a version of them is written down.

    layer: q_proj.weight, frozen │ q_proj.lora_a [rank, in], q_proj.lora_b [out, rank]
    files: base_model.model.…q_proj.lora_A.weight and lora_B.weight, as PEFT and servers read them

The trainer computes with them, engines that know them load A and B alone, others the merged weights. Of the
agent `coder` they are `q_proj.lora_a_coder`, and in files `q_proj.lora_A.coder.weight`; '' is nobody's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import AdapterSpec
from asyncrl.weights.names import FilePiece

A = "lora_a"
B = "lora_b"
ROLES = {A: "lora_A.weight", B: "lora_B.weight"}


class Adapters:
    """Adapts all linear layers of a model but the output layer; its own parameters do not train:
    y = W·x + (alpha/rank)·B·A·x with W frozen (LoRA, arXiv 2106.09685).

    `sizes`: rank and alpha of the adapter of each of these agents; '': of all others. Each token is computed
    with that of its agent (`use`). A and B are parameters of the adapted layer itself (`q_proj.lora_a` beside
    `q_proj.weight`), added to its output by a hook. So the weights keep their names, and merging is
    arithmetic on shards. `published`: A and B of all layers, as files name them; `specs`: what files say of
    each agent's."""

    def __init__(self, model: PreTrainedModel, sizes: Mapping[str, tuple[int, float]]) -> None:
        self._on = True
        self._scales = {agent: alpha / rank for agent, (rank, alpha) in sizes.items()}
        self._parts: dict[str, Tensor | float] = {}
        self.use(None)
        self._layers = {  # by the name of the weight
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear | Conv1D) and layer is not model.get_output_embeddings()
        }
        if not self._layers:
            raise ConfigError("model.lora_rank: this model has no linear layers to adapt; set it to 0")
        model.requires_grad_(False)
        for layer in self._layers.values():
            out_size, in_size = layer.weight.shape[:: -1 if isinstance(layer, Conv1D) else 1]
            for agent, (rank, _) in sizes.items():
                a = layer.weight.new_empty(rank, in_size)
                b = layer.weight.new_empty(out_size, rank)
                layer.register_parameter(named(A, agent), nn.Parameter(a))
                layer.register_parameter(named(B, agent), nn.Parameter(b))
            layer.register_forward_hook(self._adapt)
        transposed = any(isinstance(layer, Conv1D) for layer in self._layers.values())
        layers = tuple(name.removesuffix(".weight") for name in self._layers)
        self.specs = {agent: AdapterSpec(*size, layers, transposed) for agent, size in sizes.items()}
        self.published = tuple(
            FilePiece(peft_name(parameter), parameter, tuple(model.get_parameter(parameter).shape))
            for agent in sizes
            for layer in layers
            for parameter in (f"{layer}.{named(A, agent)}", f"{layer}.{named(B, agent)}")
        )

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self._scales)

    def index(self, agent: str) -> int:
        """Find the place of an agent's adapter: its own, else that of all others, else behind the last."""
        known = [*self._scales]
        return next((known.index(name) for name in (agent, "") if name in known), len(known))

    def use(self, agents: Tensor | None) -> None:
        """From here on, tokens are computed with the adapters at these places, [tokens] in any shape. None:
        with the first one. All are computed for all, so that ranks agree on what has a gradient."""
        for place, agent in enumerate(self._scales):
            self._parts[agent] = float(place == 0) if agents is None else agents == place

    def _adapt(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self._on:
            return output
        for agent, scale in self._scales.items():
            inner = scale * linear(args[0], getattr(layer, named(A, agent)))  # scaled where it is small
            if len(self._scales) > 1 or agent:  # tokens of others
                part = self._parts[agent]
                inner = inner * (part.view(*inner.shape[:-1], 1) if isinstance(part, Tensor) else part)
            output = output + linear(inner, getattr(layer, named(B, agent)))
        return output

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without them: the base."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def merged(self, name: str, weight: DTensor) -> DTensor:
        """Return W + (alpha/rank)·B·A for the parameter called `name`, sharded as it is; W if it is not
        adapted, or by agents' own adapters alone. A collective: A is gathered."""
        if self.names(name) is None:
            return weight
        layer = self._layers[name]
        change = cast(DTensor, self.change(name, getattr(layer, A), getattr(layer, B)))
        return cast(DTensor, weight + change.redistribute(weight.device_mesh, weight.placements))

    def change(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Returns what adapters A, B of all agents add to the weight called `name`."""
        change = self._scales[""] * (b @ a)
        return change.t() if isinstance(self._layers[name], Conv1D) else change  # which keeps it transposed

    def names(self, name: str) -> tuple[str, str] | None:
        """Returns the names of a weight's adapters for all agents; None if it has none."""
        stem = name.removesuffix("weight")
        return (stem + A, stem + B) if name in self._layers and "" in self._scales else None


def named(role: str, agent: str) -> str:
    """Names a layer's A or B for an agent."""
    return f"{role}_{agent}" if agent else role


def owner(parameter: str) -> str | None:
    """Return the agent whose adapter a parameter, by its name, belongs to; None: it is of no adapter."""
    last = parameter.rpartition(".")[2]
    return last[len(A) + 1 :] if last[: len(A)] in ROLES else None


def peft_name(parameter: str) -> str:
    """Names an adapter's parameter as PEFT's files do, an agent's as PEFT does in memory."""
    layer, _, last = parameter.rpartition(".")
    role, _, weight = ROLES[last[: len(A)]].partition(".")
    agent = owner(parameter)
    return ".".join(filter(None, ("base_model.model", layer, role, agent, weight)))


def initial(name: str, parameter: Tensor) -> Tensor:
    """Return the first values of what a model directory does not hold: A uniform in ±1/√in, the rest zero. So
    an adapted model starts as its base does, and a value head at 0."""
    values = torch.zeros(parameter.shape, dtype=parameter.dtype)
    if owner(name) is not None and f".{A}" in name:
        values.uniform_(-1, 1).div_(math.sqrt(parameter.shape[1]))
    return values
