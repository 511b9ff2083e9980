"""Decides of which layers SGLang servers take adapters alone, without the model's weights."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.weights.checkpoint_match import trained_shapes
from asyncrl.weights.model_files import Shape, read_json
from asyncrl.weights.trained_tensors import linear_kinds, linear_shapes

SERVED_KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
# In a model with experts SGLang takes adapters of these kinds for those of experts.
EXPERT_KINDS = {"gate_proj", "up_proj", "down_proj"}
# A model with this kind has latent attention, whose q_proj SGLang does not find.
LATENT_ATTENTION_KIND = "kv_a_proj_with_mqa"
# SGLang reserves room for queries without their output gate in models of these types, and fuses queries, keys
# and values: the first request with an adapter of these kinds ends the server.
TYPES_WITH_UNKNOWN_GATES = ("qwen3_next",)
FUSED_WITH_QUERIES = {"q_proj", "k_proj", "v_proj"}
# The first request with an adapter ends an SGLang server of these types of models.
TYPES_WITHOUT_ADAPTERS = ("mistral3",)


def servers_get_adapters(config: RunConfig) -> bool:
    """True if versions for SGLang servers consist of adapters alone."""
    return config.adapters_apart and config.engine.remote


def kinds_not_served(path: str) -> dict[str, str]:
    """Return the reason for each kind of linear layers of which SGLang servers take no adapters alone."""
    shapes_by_kind = defaultdict[str, set[Shape]](set)
    kinds = linear_kinds(path)
    for name, shape in linear_shapes(path).items():
        shapes_by_kind[kinds[name]].add(shape)

    has_unknown_gates = _model_type(path) in TYPES_WITH_UNKNOWN_GATES
    has_experts = any(".experts." in name for name in trained_shapes(path))
    reasons = dict[str, str]()
    for kind, shapes in sorted(shapes_by_kind.items()):
        if kind not in SERVED_KINDS or (kind == "q_proj" and LATENT_ATTENTION_KIND in shapes_by_kind):
            reasons[kind] = "servers do not support adapters for these layers"
        elif kind in FUSED_WITH_QUERIES and has_unknown_gates:
            reasons[kind] = "servers expect queries without an output gate"
        elif kind in EXPERT_KINDS and has_experts:
            reasons[kind] = "servers would mistake these adapters for expert adapters"
        elif len(shapes) > 1:
            reasons[kind] = "servers require all layers of this kind to have the same shape"

    return reasons


def type_without_adapters(path: str) -> str:
    """Return the type of a model whose servers take no adapters at all; '' for other models."""
    model_type = _model_type(path)
    return model_type if model_type in TYPES_WITHOUT_ADAPTERS else ""


def _model_type(path: str) -> str:
    return str(read_json(Path(path) / "config.json").get("model_type", ""))
