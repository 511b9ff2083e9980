"""Attention over a forest of rows that lie in one sequence: a node attends to its ancestors and itself.

It is registered with transformers under NAME; a forward must be given a `forest`. On a CPU pieces of similar
size are computed together, by matrix products; on a GPU torch's flex attention is given the mask (flex.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from asyncrl.shrunk import unknown
from asyncrl.trainer.flex import FlexKernel, Scoring
from asyncrl.trainer.prefix_tree import Forest
from asyncrl.trainer.ulysses import SequenceRanks

NAME, CPU = "asyncrl_forest", torch.device("cpu")
QUERIES = 256  # of a piece: a longer node is cut, so that a piece does not look at what is ahead of all of it
SCORES = 1 << 19  # of a bucket and a head, unless it is one piece
KEPT = (
    1024  # keys of a bucket whose scores are kept for the backward; of a longer one they are computed again
)
WASTE = 1.3  # pieces of different sizes are padded to each other, up to so many times their own work


class AttentionKernel(Protocol):
    """Attention of one forest, on one device."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [heads, T, d], key and value [kv_heads, T, d]; returns [T, heads, d]."""
        ...


@dataclass(frozen=True)
class ForestAttention:
    """How the tokens of a forest attend, in all layers of a forward. `unknown`: arguments of a layer's
    attention that were ignored."""

    forest: Forest
    device: torch.device = CPU
    unknown: set[str] = field(default_factory=set)

    @cached_property
    def kernel(self) -> AttentionKernel:
        if self.device.type == "cpu":
            return BucketKernel.of(self.forest)
        return FlexKernel(self.forest, self.device)

    def to(self, device: torch.device) -> ForestAttention:
        return replace(self, device=device) if device != self.device else self


class NodePart(NamedTuple):
    """`own` successive tokens of a node, and the indices of all that the last of them sees, itself too."""

    path: np.ndarray
    own: int


class Bucket(NamedTuple):
    """n pieces of similar size. `queries` [n, q] and `keys` [n, k] are indices of tokens, padded at the end;
    `positions` [n, q] are those of the queries; key j of a piece has position j."""

    queries: Tensor
    keys: Tensor
    positions: Tensor


@dataclass(frozen=True)
class BucketKernel:
    """Pieces of similar size together. `order` [T]: where each token is among the queries of all buckets."""

    buckets: tuple[Bucket, ...]
    order: Tensor
    _masks: dict[int | None, list[Tensor]] = field(default_factory=dict)  # by window

    @classmethod
    def of(cls, forest: Forest) -> BucketKernel:
        parts = [_indices(pieces) for pieces in _similar(_pieces(forest))]
        _, order = np.unique(np.concatenate([queries.ravel() for queries, _ in parts]), return_index=True)
        buckets = (
            Bucket(*map(torch.from_numpy, (queries, keys, forest.positions[queries])))
            for queries, keys in parts
        )
        return cls(tuple(buckets), torch.from_numpy(order))  # the first: a token's padding is behind it

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        parts = [
            (_attend_again if bucket.keys.shape[1] > KEPT else _attend)(
                query, key, value, bucket, mask, scoring
            )
            for bucket, mask in zip(self.buckets, self._hidden(scoring.window), strict=True)
        ]
        return torch.cat(parts)[self.order]

    def _hidden(self, window: int | None) -> list[Tensor]:
        """Of each bucket, where a query may not look, [n, q, k]: ahead, or `window` and more back."""
        if window not in self._masks:
            self._masks[window] = [_mask(bucket, window) for bucket in self.buckets]
        return self._masks[window]


def _pieces(forest: Forest) -> list[NodePart]:
    """The longest first."""
    found = []
    for path, size in zip(forest.paths, forest.sizes, strict=True):
        before = len(path) - size
        for start in range(0, size, QUERIES):
            own = min(QUERIES, size - start)
            found.append(NodePart(path[: before + start + own], own))
    return sorted(found, key=lambda piece: (-len(piece.path), -piece.own))


def _similar(pieces: list[NodePart]) -> list[list[NodePart]]:
    """Successive ones in lists of similar sizes."""
    lists: list[list[NodePart]] = []
    work = queries = keys = 0
    for piece in pieces:
        own, reach = piece.own, len(piece.path)
        longest = max(queries, own)
        padded = (len(lists[-1]) + 1) * longest * keys if lists else 0
        if lists and padded <= min(SCORES, WASTE * (work + own * reach)):
            lists[-1].append(piece)
            work, queries = work + own * reach, longest
        else:
            lists.append([piece])
            work, queries, keys = own * reach, own, reach
    return lists


def _indices(pieces: list[NodePart]) -> tuple[np.ndarray, np.ndarray]:
    """Of a bucket's queries and keys."""
    return _padded([piece.path[-piece.own :] for piece in pieces]), _padded([piece.path for piece in pieces])


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    """Each filled up with its last element."""
    longest = max(map(len, arrays))
    return np.stack([np.pad(array, (0, longest - len(array)), mode="edge") for array in arrays])


def _mask(bucket: Bucket, window: int | None) -> Tensor:
    at = bucket.positions[:, :, None]
    keys = torch.arange(bucket.keys.shape[1], device=at.device)
    ahead = keys > at
    return ahead if window is None else ahead | (keys <= at - window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: Bucket,
    hidden: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Of one bucket, [n * q, heads, d]. Query heads that share a KV head are folded into the query's length:
    keys and values are not repeated."""
    (heads, _, dim), kv_heads = query.shape, key.shape[0]
    (count, width), share = bucket.queries.shape, heads // kv_heads
    q = query[:, bucket.queries].view(kv_heads, share, count, width, dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(kv_heads, count, share * width, dim)
    k, v = key[:, bucket.keys], value[:, bucket.keys]
    scores = (q @ k.transpose(-1, -2)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores.view(kv_heads, count, share, width, -1).masked_fill(hidden[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    out = weights.flatten(2, 3) @ v
    out = out.view(kv_heads, count, share, width, -1).permute(1, 3, 0, 2, 4)
    return out.reshape(count * width, heads, -1)


_attend_again = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)


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
