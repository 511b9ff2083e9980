"""Computes attention over a forest of rows that lie in one sequence: a node sees its ancestors and itself.

It is registered with transformers under NAME; a forward must be given a `forest`. On a CPU each node is
computed by itself, short ones side by side. On a GPU torch's flex attention gets one mask for all; but where
rows are long and share little, they are computed one by one, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from asyncrl.shrunk import unknown
from asyncrl.trainer.prefix_tree import Forest
from asyncrl.trainer.recompute import VISIBLE
from asyncrl.trainer.staging import to_device
from asyncrl.trainer.world import SequenceRanks

NAME = "asyncrl_forest"
CPU = torch.device("cpu")
QUERIES = 256  # at once: a longer node is cut, so that fewer keys are computed that none of them may see


class AttentionKernel(Protocol):
    """Computes attention of one forest, on one device."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [heads, T, d], key and value [kv_heads, T, d]; returns [T, heads, d]."""
        ...


@dataclass(eq=False)  # not frozen: torch 2.11 compiles again for other fields of a frozen one
class ForestAttention:
    """Holds what attention needs to know of a forest, in all layers of a forward. `unknown`: arguments of a
    layer's attention that were ignored."""

    forest: Forest
    device: torch.device = CPU
    unknown: set[str] = field(default_factory=set)

    @cached_property
    def kernel(self) -> AttentionKernel:
        if self.device.type == "cpu":
            return NodeKernel(self.forest)
        flex = FlexKernel(self.forest, self.device)
        lengths = [len(row) for row in self.forest.rows]
        alone = np.mean(lengths) >= LONG and sum(lengths) <= ALONE * len(self.forest.ids)
        hopper = torch.cuda.get_device_capability(self.device)[0] == 9  # on others cuDNN is no faster
        return RowKernel(self.forest, self.device, flex) if alone and hopper else flex

    def to(self, device: torch.device) -> ForestAttention:
        return replace(self, device=device) if device != self.device else self


Chunk = tuple[np.ndarray, int]
"""Successive tokens of a node: the indices of all keys, and how many of them, the last ones, are queries."""


class NodeBatch(NamedTuple):
    """Holds n chunks. `queries` [n, q] and `keys` [n, k] are indices of tokens, padded with 0. `mask`
    [1, n, q, k] is added to scores; None: each query sees all keys up to itself."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


class NodeKernel:
    """Computes nodes by themselves, on a CPU: short ones in batches of about the same size. Layers share the
    masks."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._batches: dict[tuple[int | None, torch.dtype], tuple[list[NodeBatch], Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        kind = scoring.window, query.dtype
        if kind not in self._batches:
            self._batches[kind] = _batches(self._forest, *kind)
        batches, places = self._batches[kind]
        found = [
            _attend(query[:, b.queries], key[:, b.keys], value[:, b.keys], b.mask, scoring).flatten(1, 2)
            for b in batches
        ]
        return torch.cat(found, dim=1)[:, places].transpose(0, 1)


def _batches(forest: Forest, window: int | None, dtype: torch.dtype) -> tuple[list[NodeBatch], Tensor]:
    """Return the batches, and the place of each token in their results, one after another. Long nodes with
    ancestors are cut into chunks of QUERIES: few keys are computed that none may see."""
    alike: dict[tuple[int, ...], list[Chunk]] = {}
    for path, size in zip(forest.paths, forest.sizes, strict=True):
        step = size if len(path) == size and window is None else QUERIES
        for start in range(len(path) - size, len(path), step):
            keys = path[: start + step]
            count = len(keys) - start
            short = count.bit_length(), len(keys).bit_length(), count == len(keys)
            alike.setdefault(short if len(keys) <= QUERIES else (len(alike),), []).append((keys, count))
    places = np.empty(len(forest.ids), dtype=np.int64)
    end = 0
    for chunks in alike.values():
        longest = max(count for _, count in chunks)
        for keys, count in chunks:
            places[keys[-count:]] = np.arange(end, end + count)
            end += longest
    return [_batch(chunks, window, dtype) for chunks in alike.values()], torch.from_numpy(places)


def _batch(chunks: Sequence[Chunk], window: int | None, dtype: torch.dtype) -> NodeBatch:
    keys = pad_sequence([torch.from_numpy(keys) for keys, _ in chunks], batch_first=True)
    queries = pad_sequence([torch.from_numpy(keys[-count:]) for keys, count in chunks], batch_first=True)
    if window is None and all(count == len(keys) for keys, count in chunks):  # padding comes last
        return NodeBatch(queries, keys, None)
    first = torch.tensor([[len(keys) - count] for keys, count in chunks])
    last = torch.tensor([[len(keys) - 1] for keys, _ in chunks])
    # Padding sees what the last query sees: a row of scores without a key would be NaN.
    position = (first + torch.arange(queries.shape[1])).minimum(last)
    back = position[:, :, None] - torch.arange(keys.shape[1])
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
    return NodeBatch(queries, keys, mask[None])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attend from query [heads, n, q, d] to key and value [kv_heads, n, k, d]; returns [heads, n, q, d]."""
    if len(query) != len(key):
        key, value = (x.repeat_interleave(len(query) // len(x), dim=0) for x in (key, value))
    if scoring.softcap is None:
        attend = nn.functional.scaled_dot_product_attention
        return attend(query, key, value, mask, is_causal=mask is None, scale=scoring.scale)
    if mask is None:
        mask = torch.full((query.shape[2],) * 2, -torch.inf, dtype=query.dtype).triu(1)
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
    """Called by transformers; with `ranks`, for this rank's part of the sequence. Arguments that it does not
    know are noted: ignoring them would change gradients by little enough to be missed."""
    forest.unknown.update(unknown(others))
    if dropout:
        forest.unknown.add("dropout")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap)
    given = (query[0], key[0], value[0])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # of some heads
        return forest.kernel.attend(q, k, v, scoring)

    found = attend(*given) if ranks is None else ranks.attend(*given, len(forest.forest.ids), attend)
    return found[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # tokens of a block; keys that none of its queries sees are not computed
# Computed one by one are rows of LONG tokens on average, in all at most ALONE times those of the forest.
LONG = 4096
ALONE = 1.25
ROUND = 512  # such a row is filled up to a multiple: cuDNN prepares a plan for each length


class Scoring(NamedTuple):
    """Says how a layer computes scores. `window`: how many tokens one sees, itself among them; `softcap`:
    the bound of a tanh. None: none."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class RowKernel:
    """Computes attention of long rows that share little, on a GPU: torch's causal attention of each whole
    row, by cuDNN, which is about 1.8 times as fast as flex attention on Hopper. `other` computes what is not
    plain: windows, caps, float32, and heads that cuDNN does not know.
    """

    def __init__(self, forest: Forest, device: torch.device, other: AttentionKernel) -> None:
        self._other = other
        seen = np.zeros(len(forest.ids), dtype=bool)
        rows = list[np.ndarray]()
        order = list[np.ndarray]()
        for row in forest.rows:
            new = row[~seen[row]]
            if len(new):
                seen[new] = True
                rows.append(row)
                order.append(new)
        self._lengths = [len(row) for row in rows]
        self._new = [len(new) for new in order]
        # Where each row's tokens lie in the sequence, and each token in the results; None: in that order.
        self._tokens, self._places = (
            None if (np.diff(at) == 1).all() else to_device([torch.from_numpy(at)], device)[0]
            for at in (np.concatenate(rows), np.argsort(np.concatenate(order)))
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention, see `AttentionKernel`."""
        plain = scoring.window is None and scoring.softcap is None and query.dtype.itemsize == 2
        if not plain or not query.shape[-1] == value.shape[-1] <= 128:
            return self._other.attend(query, key, value, scoring)
        attend = nn.functional.scaled_dot_product_attention
        found = []
        laid = (x if self._tokens is None else x[:, self._tokens] for x in (query, key, value))
        rows = zip(*(x.split(self._lengths, dim=1) for x in laid), strict=True)  # and one gradient of all
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            for row, length, new in zip(rows, self._lengths, self._new, strict=True):
                short = -length % ROUND  # keys behind all queries: none sees them
                q, k, v = (pad(x, (0, 0, 0, short))[None] for x in row)
                whole = attend(q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=True)
                found.append(whole[0, :, length - new : length])
        joined = torch.cat(found, dim=1)
        return (joined if self._places is None else joined[:, self._places]).transpose(0, 1)


class FlexKernel:
    """Computes attention on a GPU by torch's flex attention, with the forest's mask.

    Nodes lie in the sequence depth first, so what is below a node ends where its last descendant does, at
    its `end`: a token sees those up to itself whose `end` comes after it. Layers share the masks.

    Per token [T]: `end`, and `position` in its row. Numbers that a kernel reads are tensors: with dynamic
    shapes torch cannot compile captured Python numbers.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        end = np.empty(len(forest.ids), dtype=np.int32)
        for path, stop in zip(forest.paths, np.cumsum(forest.sizes), strict=True):
            end[path] = stop  # in order: a node on several paths keeps the last
        position = forest.positions.astype(np.int32)
        self.end, self.position = to_device([torch.from_numpy(end), torch.from_numpy(position)], device)
        self._masks: dict[int | None, BlockMask] = {}
        self._caps: dict[float, Callable[..., Tensor]] = {}

    def visible(self, window: int | None) -> MaskMod:
        """Return what is true where the token at index q sees that at index k; any shapes."""
        end = self.end
        position = self.position

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < end[k])

        if window is None:
            return seen
        reach = torch.tensor(window, device=end.device)

        def near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < end[k]) & (position[q] - position[k] < reach)

        return near

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention, see `AttentionKernel`."""
        if scoring.window not in self._masks:
            self._masks[scoring.window] = self.block_mask(scoring.window)
        if scoring.softcap is not None and scoring.softcap not in self._caps:
            self._caps[scoring.softcap] = _capped(query.new_tensor(scoring.softcap))
        found = _flex(query.is_cuda)(
            query[None],
            key[None],
            value[None],
            score_mod=None if scoring.softcap is None else self._caps[scoring.softcap],
            block_mask=self._masks[scoring.window],
            scale=scoring.scale,
            enable_gqa=query.shape[0] != key.shape[0],
            kernel_options={"BACKEND": "TRITON"},  # one kernel for short rows, too
        )
        return found[0].transpose(0, 1)

    def block_mask(self, window: int | None) -> BlockMask:
        """Find, from the extremes of both, which blocks of keys a block of queries sees in part, and which
        all its queries see whole. With a window, some blocks that none sees count as seen in part."""
        size = len(self.end)
        first = torch.arange(0, size, BLOCK, dtype=torch.int32, device=self.end.device)
        last = first + BLOCK - 1
        short = -size % BLOCK
        ends, places = (pad(x, (0, short), value=size).view(-1, BLOCK) for x in (self.end, self.position))
        some = (first <= first[:, None]) & (ends.amax(1) > first[:, None])
        whole = (first < first[:, None]) & (ends.amin(1) > last[:, None])
        if window is not None:
            low = places.amin(1)
            high = pad(self.position, (0, short)).view(-1, BLOCK).amax(1)
            some &= low[:, None] - high < window
            whole &= high[:, None] - low < window
        seen = self.visible(window)
        lengths = (size, size)
        in_part = _listed(some & ~whole)
        entire = _listed(whole)
        return BlockMask.from_kv_blocks(
            *in_part, *entire, mask_mod=seen, BLOCK_SIZE=BLOCK, seq_lengths=lengths
        )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of each row are true, and which, in BlockMask's form."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def _capped(bound: Tensor) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return capped


@cache
def _flex(compiled: bool) -> Any:
    """Return flex attention. Not compiled it holds a T x T matrix of scores."""
    return compiled_once(flex_attention, keeps_outputs=True) if compiled else flex_attention


def compiled_once(function: Callable[..., Any], *, keeps_outputs: bool = False) -> Any:
    """Compile it for all shapes: every batch has another. `keeps_outputs`: a layer that is recomputed in
    the backward keeps what the function returned, where this version of torch can (see recompute.py)."""
    from torch._dynamo import config  # a slow import, which only a GPU needs
    from torch._inductor import config as inductor

    # Attention has variants by types, windows, caps, numbers of heads, one block and no gradient, scores by
    # types and what is asked: after 8 of them torch would go on without compiling.
    config.recompile_limit = max(config.recompile_limit, 64)
    options: Any = {VISIBLE: True} if keeps_outputs and hasattr(inductor, VISIBLE) else None
    return torch.compile(function, dynamic=True, options=options)
