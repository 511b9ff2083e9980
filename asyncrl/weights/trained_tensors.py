"""The tensors of a model directory that train, and the linear layers among them that adapters adapt.

Numbers of parameters, of memory and of published bytes are those of these tensors: towers for pictures are
frozen, and layers for drafts are not read.

Adapters adapt kinds of layers, such as `q_proj`: the last part of a layer's name. `resolve_lora_modules`
decides on the kinds, once, in the launcher; from then on `model.lora_modules` holds them for all processes.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.weights.checkpoint_match import frozen_shapes, language_match, trained_shapes
from asyncrl.weights.model_files import DTYPE_BYTES, Shape, read_json

# Kinds of layers of which SGLang takes adapters.
SERVED_KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
# In a model with experts SGLang takes adapters of these kinds for those of experts.
EXPERT_KINDS = {"gate_proj", "up_proj", "down_proj"}
# A model with this kind has latent attention, whose q_proj SGLang does not find.
LATENT_ATTENTION_KIND = "kv_a_proj_with_mqa"
# The first request with an adapter ends an SGLang server of these types of models.
TYPES_WITHOUT_ADAPTERS = ("mistral3",)


def parameter_count(path: str) -> int:
    """Count the parameters that train, shared parameters once; 0 without files of weights."""
    return sum(map(prod, trained_shapes(path).values()))


def frozen_counts(path: str) -> dict[str, int]:
    """Return the number of parameters of each frozen part, by the part's name in the model."""
    return {part: sum(map(prod, shapes.values())) for part, shapes in frozen_shapes(path).items()}


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
    parameters = adapter_count(config) if config.adapters_apart else parameter_count(config.model.path)
    return parameters * DTYPE_BYTES[config.model.dtype]


def servers_get_adapters(config: RunConfig) -> bool:
    """True if versions for SGLang servers consist of adapters alone."""
    return config.adapters_apart and config.engine.remote


def resolve_lora_modules(config: RunConfig) -> list[str]:
    """Return the kinds of layers that a run's adapters adapt: `model.lora_modules`, or by default all kinds
    of linear layers, without those that servers do not take where they get adapters alone.

    Raises ConfigError for kinds that the model does not have, or that servers do not take.
    """
    path = config.model.path
    chosen_kinds = [*dict.fromkeys(config.model.lora_modules)]
    if not config.adapters:
        return chosen_kinds

    existing_kinds = sorted({*linear_kinds(path).values()})
    if not existing_kinds:
        return chosen_kinds

    unknown_kinds = sorted({*chosen_kinds} - {*existing_kinds})
    if unknown_kinds:
        raise ConfigError(
            f"model.lora_modules: {', '.join(unknown_kinds)}: not among the linear layers that train in "
            f"{path}, which are {', '.join(existing_kinds)}; give some of these"
        )

    unserved_kinds = kinds_not_served(path) if servers_get_adapters(config) else {}
    served_kinds = [kind for kind in existing_kinds if kind not in unserved_kinds]
    refused_kinds = {kind: unserved_kinds[kind] for kind in chosen_kinds if kind in unserved_kinds}
    key, cure = ("agents", "engine=torch") if config.agents else ("weights.adapters", "it to false")

    if servers_get_adapters(config) and _model_type(path) in TYPES_WITHOUT_ADAPTERS:
        raise ConfigError(
            f"{key}: a request with an adapter ends an SGLang server of {path} ({_model_type(path)}); set "
            f"{cure}"
        )
    if refused_kinds:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused_kinds.items())
        raise ConfigError(
            f"model.lora_modules: SGLang takes no adapters alone of {reasons}; leave "
            f"{', '.join(refused_kinds)} out, or for {key} set {cure}"
        )
    if not served_kinds:
        raise ConfigError(f"{key}: SGLang has no adapters for any linear layer of {path}; set {cure}")

    return chosen_kinds or served_kinds


def kinds_not_served(path: str) -> dict[str, str]:
    """Return the reason for each kind of linear layers of which SGLang servers take no adapters alone."""
    shapes_by_kind = defaultdict[str, set[Shape]](set)
    kinds = linear_kinds(path)
    for name, shape in linear_shapes(path).items():
        shapes_by_kind[kinds[name]].add(shape)

    has_experts = any(".experts." in name for name in trained_shapes(path))
    reasons = dict[str, str]()
    for kind, shapes in sorted(shapes_by_kind.items()):
        if kind not in SERVED_KINDS or (kind == "q_proj" and LATENT_ATTENTION_KIND in shapes_by_kind):
            reasons[kind] = "servers have no adapters of these layers"
        elif kind in EXPERT_KINDS and has_experts:
            reasons[kind] = "servers would take the adapters for those of experts"
        elif len(shapes) > 1:
            reasons[kind] = "servers have one shape for all layers of a kind"

    return reasons


def _model_type(path: str) -> str:
    return str(read_json(Path(path) / "config.json").get("model_type", ""))
