"""What a layer of transformers asks of an attention function: how scores are computed, and which keys a token
sees.

    layer ──arguments of the call, settings of the layer──► Scoring ──► the trainer's and the engine's kernels

A layer passes most of its rules as arguments. Some rules are only in the mask that transformers would build,
which no packed row uses: these are read from the layer's configuration. Nothing here knows a model by its
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

# Arguments that `read_scoring` reads, and arguments that an attention function may ignore.
READ_ARGUMENTS = {"scaling", "sliding_window", "softcap", "s_aux"}
IGNORABLE_ARGUMENTS = {"position_ids", "use_cache", "cache_position", "is_causal", "seq_idx"}
# The setting of a configuration that limits the reach of a kind of layers, in tokens.
REACH_SETTINGS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

Positions = TypeVar("Positions", int, Tensor)


class Reach(NamedTuple):
    """Says how far back a token sees. `window`: the number of tokens that a token sees, including itself.
    `chunk`: sequences are cut into chunks of this many tokens, and a token sees its own chunk only. None: no
    limit."""

    window: int | None = None
    chunk: int | None = None

    def first_visible(self, position: Positions) -> Positions:
        """Return the first position that a token at `position` sees; a number, or a tensor of any shape."""
        first_position = position * 0
        if self.window is not None:
            window_start = position - (self.window - 1)
            first_position = first_position + window_start * (window_start > 0)
        if self.chunk is not None:
            skipped = position - position % self.chunk - first_position
            first_position = first_position + skipped * (skipped > 0)
        return first_position

    def within(self, length: int) -> Reach:
        """Return the reach without the limits that sequences of at most `length` tokens never meet."""
        window, chunk = (limit if limit is not None and limit < length else None for limit in self)
        return Reach(window, chunk)


class Scoring(NamedTuple):
    """Says how a layer computes scores: the query's product with the key, times `scale`. `softcap`: the bound
    of a tanh on scores; None: no bound. `sinks` [heads]: the score of one more key for each head, whose value
    is zero; None: no such key."""

    scale: float
    reach: Reach = Reach()
    softcap: float | None = None
    sinks: Tensor | None = None


def read_scoring(layer: nn.Module, query: Tensor, arguments: Mapping[str, Any]) -> Scoring:
    """Return how `layer` computes scores. `query` [..., d]: the queries, and `arguments`: the keyword
    arguments, that the layer passes to its attention function."""
    scale = arguments.get("scaling")
    window = arguments.get("sliding_window")
    chunk = None
    layer_kind = _layer_kind(layer)
    if layer_kind in REACH_SETTINGS:
        limit = getattr(layer.config, REACH_SETTINGS[layer_kind], None)
        if layer_kind == "chunked_attention":
            chunk = limit
        elif "sliding_window" not in arguments:
            window = limit

    return Scoring(
        query.shape[-1] ** -0.5 if scale is None else scale,
        Reach(window, chunk),
        arguments.get("softcap"),
        arguments.get("s_aux"),
    )


def unknown_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of keyword arguments that a layer passes to its attention function, and that
    `read_scoring` does not read. They must be refused: ignoring one can change
    results too little to be noticed."""
    return sorted(
        name
        for name, value in arguments.items()
        if name not in READ_ARGUMENTS | IGNORABLE_ARGUMENTS
        if isinstance(value, Tensor) or value not in (None, False)
    )


def scales_by_index(layer: nn.Module) -> bool:
    """Return True for a layer that `queries_at_positions` corrects."""
    return bool(getattr(layer, "attn_temperature_tuning", False)) and not getattr(layer, "use_rope", True)


def queries_at_positions(layer: nn.Module, query: Tensor, indices: Tensor, positions: Tensor) -> Tensor:
    """Return `query` [..., N, d] scaled by each token's position in its sequence.

    A layer without rope may scale queries by a step function of the position (arXiv 2501.19399), but take a
    token's index in its row for the position. Of N tokens: `indices` in the row that the layer saw, and
    `positions` in their sequences, [N]. Returns `query` itself where the layer does not scale.
    """
    if not scales_by_index(layer):
        return query

    settings: Any = layer

    def scale_at(index: Tensor) -> Tensor:
        steps = torch.floor((index.float() + 1.0) / settings.floor_scale)
        return torch.log1p(steps) * settings.attn_scale + 1.0

    correction = scale_at(positions) / scale_at(indices)
    return (query * correction[:, None]).to(query.dtype)


def empty_reach(config: Any) -> str:
    """Return the setting with which tokens of some layer see no key, not even themselves, for example
    `sliding_window is 0`; '' if there is none. transformers computes such a layer without an error.
    `config`: the configuration of a model's text part."""
    layer_types = getattr(config, "layer_types", None)
    for layer_kind, setting in REACH_SETTINGS.items():
        limit = getattr(config, setting, None)
        is_used = layer_kind in layer_types if layer_types else layer_kind == "sliding_attention"
        if is_used and isinstance(limit, int) and limit < 1:
            return f"{setting} is {limit}"
    return ""


def _layer_kind(layer: nn.Module) -> str | None:
    """Return the kind of a layer as its configuration lists it; None where it lists no kinds."""
    layer_types: Any = getattr(getattr(layer, "config", None), "layer_types", None)
    layer_index = getattr(layer, "layer_idx", None)
    if not layer_types or not isinstance(layer_index, int) or layer_index >= len(layer_types):
        return None
    return str(layer_types[layer_index])
