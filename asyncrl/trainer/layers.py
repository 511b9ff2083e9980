"""Changes a model's layers: recomputation in the backward, compilation, and low-rank adapters.

Of what is recomputed or compiled only a layer's `forward` is replaced, so its parameters keep their names;
FSDP2's hooks stay outside: it gathers a layer once for the recomputation and the backward. Adapters are
added by a hook.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import NAME


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that the model's author marks as units."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def prepare_layers(model: PreTrainedModel, trainer: TrainerConfig) -> None:
    """Activation checkpointing (arXiv 1604.06174) of every k-th layer, and compilation of all. To be called
    before they are sharded. Raises ConfigError where the model does not say what its layers are."""
    every, layers = trainer.checkpointed_every, layers_of(model)
    if not layers and (every or trainer.compile):
        key = "activation_checkpointing" if every else "compile"
        raise ConfigError(f"trainer.{key}: {type(model).__name__} does not name its layers; leave it out")
    compiler = os.environ.get("CXX", "g++")
    if trainer.compile and not torch.cuda.is_available() and not shutil.which(compiler):
        raise ConfigError(
            f"trainer.compile: needs a C++ compiler on a CPU, and {compiler} (CXX) is not there"
        )
    if trainer.compile:  # it loops over as many nodes of packed rows as a micro-batch has
        AttentionInterface.register(NAME, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[NAME]))
    for index, layer in enumerate(layers):
        run: Any = layer.forward
        if trainer.compile:
            run = torch.compile(run, dynamic=True)
        if every and index % every == 0:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)  # no dropout
        layer.forward = run


def compiled_graphs() -> int:
    """Graphs that this process has compiled so far: after the first batches it stays the same."""
    from torch._dynamo.utils import counters  # a slow import, which only they need

    return int(counters["stats"]["unique_graphs"])


A, B = "lora_a", "lora_b"  # [rank, in], [out, rank]


class Adapters:
    """Adapts all linear layers of a model but the output layer; its own parameters do not train:
    y = W·x + (alpha/rank)·B·A·x with W frozen (LoRA, arXiv 2106.09685).

    A and B are parameters of the adapted layer itself (`q_proj.lora_a` beside `q_proj.weight`), added to its
    output by a hook. So the weights keep their names, and merging is arithmetic on shards.
    `coverage`: what is adapted and what is not, for people. `leaves_experts`: experts are stacked, so not."""

    def __init__(self, model: PreTrainedModel, rank: int, alpha: float) -> None:
        self._on = True
        self._scale = alpha / rank
        self._layers = {  # by the name of the weight
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear | Conv1D) and layer is not model.get_output_embeddings()
        }
        if not self._layers:
            raise ConfigError("model.lora_rank: this model has no linear layers to adapt; set it to 0")
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.coverage = coverage(shapes, self._layers.keys())
        stacks = (name for name, parameter in model.named_parameters() if parameter.dim() > 2)
        self.leaves_experts = any(".experts." in name for name in stacks)
        model.requires_grad_(False)
        for layer in self._layers.values():
            _add(layer, rank)
            layer.register_forward_hook(self._adapt)

    def _adapt(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self._on:
            return output
        inner = self._scale * linear(args[0], getattr(layer, A))  # scaled where it is small
        return output + linear(inner, getattr(layer, B))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without them: the base."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def merged(self, name: str, weight: DTensor) -> DTensor:
        """W + (alpha/rank)·B·A for the parameter called `name`, sharded as it is; W if it is not adapted. A
        collective: A is gathered."""
        layer = self._layers.get(name)
        if layer is None:
            return weight
        change = cast(DTensor, self.change(name, getattr(layer, A), getattr(layer, B)))
        return cast(DTensor, weight + change.redistribute(weight.device_mesh, weight.placements))

    def change(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Returns what adapters A, B add to the weight called `name`."""
        change = self._scale * (b @ a)
        return change.t() if isinstance(self._layers[name], Conv1D) else change  # which keeps it transposed

    def names(self, name: str) -> tuple[str, str] | None:
        """Returns the names of a weight's adapters; None if it has none."""
        stem = name.removesuffix("weight")
        return (stem + A, stem + B) if name in self._layers else None


def coverage(shapes: Mapping[str, Sequence[int]], adapted: Container[str]) -> str:
    """The matrices that adapters adapt and those they leave, by kind, with their number and their share of
    all parameters. (Stacked experts are no linear layers.)"""
    sizes = {True: defaultdict[str, list[int]](list), False: defaultdict[str, list[int]](list)}
    for name, shape in shapes.items():
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        if len(shape) > 1:
            sizes[name in adapted][".".join(parts[-2:])].append(math.prod(shape))
    total = sum(map(math.prod, shapes.values()))
    yes, no = (
        ", ".join(f"{len(n)} x {kind} ({sum(n) / total:.1%})" for kind, n in sizes[which].items())
        for which in (True, False)
    )
    return f"{yes}; not adapted: {no or 'nothing'} (shares of all parameters)"


def _add(layer: nn.Linear | Conv1D, rank: int) -> None:
    weight = layer.weight
    out_size, in_size = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
    layer.register_parameter(A, nn.Parameter(weight.new_empty(rank, in_size)))
    layer.register_parameter(B, nn.Parameter(weight.new_empty(out_size, rank)))


def initial(name: str, parameter: Tensor) -> Tensor:
    """First values of what a model directory does not hold: A uniform in ±1/√in, the rest zero. So an adapted
    model starts as its base does, and a value head at 0."""
    values = torch.zeros(parameter.shape, dtype=parameter.dtype)
    if name.endswith(A):
        values.uniform_(-1, 1).div_(math.sqrt(parameter.shape[1]))
    return values
