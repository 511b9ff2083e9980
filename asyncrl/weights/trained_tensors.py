"""The tensors of a model directory that train, and the linear layers among them that adapters adapt.

Numbers of parameters, of memory and of published bytes are those of these tensors: towers for pictures are
frozen without `model.train_vision`, and layers for drafts are not read.

Adapters adapt kinds of layers, such as `q_proj`: the last part of a layer's name. The launcher decides on the
kinds, once (`resolve_lora_modules` in launch/models.py); from then on `model.lora_modules` holds them for all
processes.
"""

from __future__ import annotations

from math import prod

from asyncrl.config import RunConfig
from asyncrl.weights.checkpoint_match import frozen_shapes, language_match, trained_shapes
from asyncrl.weights.model_files import DTYPE_BYTES, Shape


def parameter_count(path: str, *, train_vision: bool = False) -> int:
    """Count the parameters that train, shared parameters once; 0 without files of weights."""
    return sum(map(prod, trained_shapes(path, train_vision=train_vision).values()))


def frozen_counts(path: str, *, train_vision: bool = False) -> dict[str, int]:
    """Return the number of parameters of each frozen part, by the part's name in the model."""
    frozen = frozen_shapes(path, train_vision=train_vision)
    return {part: sum(map(prod, shapes.values())) for part, shapes in frozen.items()}


def linear_kinds(path: str) -> dict[str, str]:
    """Return the kind of each linear layer that trains, but the output layer, by the name of its weight in
    the files: the last part of the layer's name in the model, such as `q_proj`. Stacked experts are no linear
    layers."""
    return language_match(path).linear_kinds


def linear_shapes(path: str) -> dict[str, Shape]:
    """Return the shapes of the weights of the layers of `linear_kinds`."""
    shapes = trained_shapes(path)
    return {name: shapes[name] for name in linear_kinds(path)}


def adapted_shapes(config: RunConfig) -> dict[str, Shape]:
    """Return the shapes of the weights that a run's adapters adapt; {} without adapters."""
    if not config.adapters:
        return {}
    lora_modules = config.model.lora_modules
    kinds = linear_kinds(config.model.path)
    return {
        name: shape
        for name, shape in linear_shapes(config.model.path).items()
        if not lora_modules or kinds[name] in lora_modules
    }


def adapter_count(config: RunConfig) -> int:
    """Count the parameters of a run's adapters."""
    total_rank = sum(rank for rank, _ in config.adapters.values())
    return total_rank * sum(map(sum, adapted_shapes(config).values()))


def published_bytes(config: RunConfig) -> int:
    """Return the bytes of a version."""
    model = config.model
    parameters = parameter_count(model.path, train_vision=model.train_vision)
    if config.adapters_apart:
        parameters = adapter_count(config)
    return parameters * DTYPE_BYTES[model.dtype]
