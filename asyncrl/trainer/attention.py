"""Attention over a forest of rows that lie in one sequence: a node attends to its ancestors and itself.

It is registered with transformers under NAME; a forward must be given a `forest`. On a CPU each node is
computed by itself; on a GPU torch's flex attention is given the mask of all (flex.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from asyncrl.shrunk import unknown
from asyncrl.trainer.flex import FlexKernel, Scoring
from asyncrl.trainer.prefix_tree import Forest
from asyncrl.trainer.ulysses import SequenceRanks

NAME, CPU = "asyncrl_forest", torch.device("cpu")
QUERIES = 256  # at once: a longer node is cut, so that fewer keys are computed that none of them may see


class AttentionKernel(Protocol):
    """Attention of one forest, on one device."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [heads, T, d], key and value [kv_heads, T, d]; returns [T, heads, d]."""
        ...


@dataclass(eq=False)  # not frozen: torch 2.11 compiles again for other fields of a frozen one
class ForestAttention:
    """The attention pattern of a forest's tokens, in all layers of a forward; it is not changed. `unknown`:
    arguments of a layer's attention that were ignored."""

    forest: Forest
    device: torch.device = CPU
    unknown: set[str] = field(default_factory=set)

    @cached_property
    def kernel(self) -> AttentionKernel:
        if self.device.type == "cpu":
            return NodeKernel(self.forest)
        return FlexKernel(self.forest, self.device)

    def to(self, device: torch.device) -> ForestAttention:
        return replace(self, device=device) if device != self.device else self


class NodePart(NamedTuple):
    """Successive tokens of a node: `queries` [q] and `keys` [k] are indices of tokens, the former the last of
    the keys. `mask` [q, k] is added to scores; None: each query sees all keys up to itself."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


class NodeKernel:
    """Computes one node after another, on a CPU. Layers share the masks."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._chunks: dict[tuple[int | None, torch.dtype], list[NodePart]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        kind = scoring.window, query.dtype
        if kind not in self._chunks:
            self._chunks[kind] = list(_chunks(self._forest, *kind))
        found = [
            _attend(query[:, chunk.queries], key[:, chunk.keys], value[:, chunk.keys], chunk.mask, scoring)
            for chunk in self._chunks[kind]
        ]
        return torch.cat(found, dim=1).transpose(0, 1)  # nodes lie in the sequence one after another


def _chunks(forest: Forest, window: int | None, dtype: torch.dtype) -> Iterator[NodePart]:
    """Whole nodes without ancestors, others in chunks of QUERIES: few keys are computed that none may see."""
    for path, size in zip(map(torch.from_numpy, forest.paths), forest.sizes, strict=True):
        if len(path) == size and window is None:
            yield NodePart(path, path, None)
            continue
        for start in range(len(path) - size, len(path), QUERIES):
            keys = path[: start + QUERIES]
            back = torch.arange(start, len(keys))[:, None] - torch.arange(len(keys))
            hidden = back < 0 if window is None else (back < 0) | (back >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
            yield NodePart(keys[start:], keys, mask)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attend from query [heads, q, d] to key and value [kv_heads, k, d]; returns [heads, q, d]."""
    key, value = (x.repeat_interleave(len(query) // len(x), dim=0) for x in (key, value))
    if scoring.softcap is None:
        attend = nn.functional.scaled_dot_product_attention
        given = query[None], key[None], value[None], mask
        return attend(*given, is_causal=mask is None, scale=scoring.scale)[0]
    if mask is None:
        mask = torch.full((query.shape[1],) * 2, -torch.inf, dtype=query.dtype).triu(1)
    scores = scoring.softcap * (query @ key.transpose(-1, -2) * scoring.scale / scoring.softcap).tanh() + mask
    return scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    forest: ForestAttention,
    ranks: SequenceRanks | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered function; with `ranks`, of this rank's part of the sequence. What it does not know it
    notes: ignoring it would change gradients by little enough to be missed."""
    forest.unknown.update(unknown(others))
    if dropout:
        forest.unknown.add("dropout")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring, given = Scoring(scale, sliding_window, softcap), (query[0], key[0], value[0])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # of some heads
        return forest.kernel.attend(q, k, v, scoring)

    found = attend(*given) if ranks is None else ranks.attend(*given, len(forest.forest.ids), attend)
    return found[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
