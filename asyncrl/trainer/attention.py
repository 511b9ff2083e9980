"""Computes attention over a forest of sequences that are laid out as one: a node sees its ancestors and
itself.

The function is registered with transformers as FOREST_ATTENTION; a forward must pass a `forest`. On a CPU
nodes are computed separately, short nodes in batches. On a GPU torch's flex attention gets a single mask; but
sequences that are long and share little are computed one by one, which is faster.

What a layer asks for (windows, chunks, caps, sinks) is read by attention_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from asyncrl.attention_rules import (
    Reach,
    Scoring,
    queries_at_positions,
    read_scoring,
    scales_by_index,
    unknown_arguments,
)
from asyncrl.model_class import set_text_attention
from asyncrl.state_layers import Convolve, Recurrence, StateLayout, hand_over_state_layers
from asyncrl.trainer.forest_states import ForestStates
from asyncrl.trainer.prefix_tree import Forest
from asyncrl.trainer.recompute import VISIBLE_OPTION
from asyncrl.trainer.staging import to_device
from asyncrl.trainer.world import SequenceRanks

FOREST_ATTENTION = "asyncrl_forest"
CPU = torch.device("cpu")
MAX_QUERIES = 256  # tokens of a piece: longer nodes are cut, so that fewer invisible keys are computed


class AttentionKernel(Protocol):
    """Computes the attention of one forest on one device."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [heads, T, d], key and value [kv_heads, T, d]; returns [T, heads, d]."""
        ...


@dataclass(eq=False)  # not frozen: torch 2.11 compiles again for other fields of a frozen one
class ForestAttention(StateLayout):
    """Describes a forest to all layers of a forward that look at other tokens: to attention, and to layers
    with a state. `ignored_arguments`: arguments of attention that this module does not support, and the first
    layer that passed each of them."""

    forest: Forest
    device: torch.device = CPU
    ignored_arguments: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def kernel(self) -> AttentionKernel:
        if self.device.type == "cpu":
            return NodeKernel(self.forest)
        flex_kernel = FlexKernel(self.forest, self.device)
        lengths = [*map(len, self.forest.sequences)]
        is_hopper = torch.cuda.get_device_capability(self.device)[0] == 9  # cuDNN is no faster on other GPUs
        shares_little = sum(lengths) <= MAX_REPETITION * len(self.forest.ids)

        if is_hopper and shares_little and np.mean(lengths) >= LONG_SEQUENCE:
            return SequenceKernel(self.forest, self.device, flex_kernel)
        return flex_kernel

    @cached_property
    def states(self) -> ForestStates:
        return ForestStates(self.forest, self.device)

    def convolve(self, convolve: Convolve, inputs: Tensor, reach: int) -> Tensor:
        return self.states.convolve(convolve, inputs, reach)

    def recur(self, recurrence: Recurrence) -> Tensor:
        return self.states.recur(recurrence)

    @cached_property
    def longest_sequence(self) -> int:
        """Return the length of the longest sequence, in tokens."""
        return max(map(len, self.forest.paths))

    @cached_property
    def positions(self) -> Tensor:
        """Return the tokens' positions in their sequences, [T], on the device."""
        (positions,) = to_device([torch.from_numpy(self.forest.positions)], self.device)
        return positions

    def rescaled_queries(self, layer: nn.Module, queries: Tensor, part_width: int) -> Tensor:
        """Return queries [heads, T, d] that `layer` has scaled by indices in a part of the row, scaled by
        positions instead. `part_width`: the tokens of a part."""
        indices = torch.arange(len(self.forest.ids), device=self.device) % part_width
        return queries_at_positions(layer, queries, indices, self.positions)

    def to(self, device: torch.device) -> ForestAttention:
        return replace(self, device=device) if device != self.device else self


NodePiece = tuple[np.ndarray, int]
"""Consecutive tokens of a node: the indices of the keys that these tokens may attend to, and the number of
queries, which are the last of these keys."""


class NodeBatch(NamedTuple):
    """Holds n pieces. `queries` [n, q] and `keys` [n, k] are indices of tokens, padded with 0. `mask` [1, n,
    q, k] is added to scores; None: each query sees all keys up to its own position."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


class NodeKernel:
    """Computes attention node by node, on a CPU: short nodes in batches of about the same size. Layers share
    the masks."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._batches_by_kind: dict[tuple[Reach, torch.dtype], tuple[list[NodeBatch], Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        mask_kind = scoring.reach, query.dtype
        if mask_kind not in self._batches_by_kind:
            self._batches_by_kind[mask_kind] = _node_batches(self._forest, *mask_kind)
        batches, token_slots = self._batches_by_kind[mask_kind]
        outputs = [
            _attend_batch(
                query[:, batch.queries], key[:, batch.keys], value[:, batch.keys], batch.mask, scoring
            ).flatten(1, 2)
            for batch in batches
        ]

        return torch.cat(outputs, dim=1)[:, token_slots].transpose(0, 1)


def _node_batches(forest: Forest, reach: Reach, dtype: torch.dtype) -> tuple[list[NodeBatch], Tensor]:
    """Return the batches, and the slot of each token in their concatenated results."""
    pieces_by_shape: dict[tuple[int, ...], list[NodePiece]] = {}
    for keys, query_count in _node_pieces(forest, reach):
        shape_bucket = query_count.bit_length(), len(keys).bit_length(), query_count == len(keys)
        pieces_by_shape.setdefault(
            shape_bucket if len(keys) <= MAX_QUERIES else (len(pieces_by_shape),), []
        ).append((keys, query_count))

    token_slots = np.empty(len(forest.ids), dtype=np.int64)
    offset = 0
    for pieces in pieces_by_shape.values():
        most_queries = max(count for _, count in pieces)
        for keys, query_count in pieces:
            token_slots[keys[-query_count:]] = np.arange(offset, offset + query_count)
            offset += most_queries

    batches = [_node_batch(pieces, reach.window, dtype) for pieces in pieces_by_shape.values()]
    return batches, torch.from_numpy(token_slots)


def _node_pieces(forest: Forest, reach: Reach) -> Iterator[NodePiece]:
    """Cut long nodes, so that few keys are computed that no query may see: where a chunk ends, and into
    pieces of MAX_QUERIES where queries see keys in front of their piece. The queries of a piece share a
    chunk."""
    for node_path, node_size in zip(forest.paths, forest.sizes, strict=True):
        path_length = len(node_path)
        start = path_length - node_size

        while start < path_length:
            first_key = reach.first_visible(start)
            end = path_length
            if reach.chunk is not None:
                end = min(end, start - start % reach.chunk + reach.chunk)
            if first_key < start or reach.window is not None:
                end = min(end, start + MAX_QUERIES)

            yield node_path[first_key:end], end - start
            start = end


def _node_batch(pieces: Sequence[NodePiece], window: int | None, dtype: torch.dtype) -> NodeBatch:
    keys = pad_sequence([torch.from_numpy(keys) for keys, _ in pieces], batch_first=True)
    queries = pad_sequence([torch.from_numpy(keys[-count:]) for keys, count in pieces], batch_first=True)
    is_windowed = window is not None and window < keys.shape[1]
    if not is_windowed and all(count == len(keys) for keys, count in pieces):  # padding comes last
        return NodeBatch(queries, keys, None)

    # Padding sees what the last query sees: a row of scores without a key would be NaN.
    first_index = torch.tensor([[len(keys) - count] for keys, count in pieces])
    last_index = torch.tensor([[len(keys) - 1] for keys, _ in pieces])
    query_index = (first_index + torch.arange(queries.shape[1])).minimum(last_index)
    distance = query_index[:, :, None] - torch.arange(keys.shape[1])
    is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill(is_hidden, -torch.inf)

    return NodeBatch(queries, keys, mask[None])


def _attend_batch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attend from query [heads, n, q, d] to key and value [kv_heads, n, k, d]; returns [heads, n, q, d]. The
    size of values may be another d."""
    if len(query) != len(key):
        key, value = (x.repeat_interleave(len(query) // len(x), dim=0) for x in (key, value))

    if scoring.softcap is not None:
        return _capped_attention(query, key, value, mask, scoring, scoring.softcap)

    if scoring.sinks is None:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scoring.scale
        )

    value_size = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - value_size))  # the operator computes heads of a single size
    output: Tensor = _SinkAttention.apply(query, key, value, mask, scoring.sinks, scoring.scale)
    return output[..., :value_size]


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, softcap: float
) -> Tensor:
    """Attend with capped scores, of which the whole matrix is held, see `_attend_batch`."""
    if mask is None:
        mask = torch.full((query.shape[2],) * 2, -torch.inf, dtype=query.dtype).triu(1)
    scores = softcap * (query @ key.transpose(-1, -2) * scoring.scale / softcap).tanh() + mask
    if scoring.sinks is not None:  # a key behind the others, whose value is zero
        sink_scores = scoring.sinks[:, None, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
        value = pad(value, (0, 0, 0, 1))
    return scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value


class _SinkAttention(Function):
    """Computes attention with sinks on a CPU, by torch's operator for attention without sinks.

    A sink is one more key whose value is zero: it only adds to the sum of exponentials. So the output shrinks
    by the sink's part of that sum, and the operator's backward, which reads output and log-sum-exp, is right
    for the shrunken output and the larger log-sum-exp. Autograd alone would be wrong without an error: torch
    has no derivative of the operator's log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scale: float
    ) -> Tensor:
        plain_output, plain_logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=mask is None, attn_mask=mask, scale=scale
        )
        sink_scores = sinks[:, None, None]
        output = _shrunken_output(plain_output, plain_logsumexp, sink_scores)
        logsumexp = torch.logaddexp(plain_logsumexp, sink_scores)

        ctx.save_for_backward(query, key, value, mask, sinks, output, logsumexp)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, output, logsumexp = ctx.saved_tensors
        input_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            query,
            key,
            value,
            output,
            logsumexp,
            dropout_p=0.0,
            is_causal=mask is None,
            attn_mask=mask,
            scale=ctx.scale,
        )
        sink_weights = (sinks[:, None, None] - logsumexp).exp()
        sink_gradients = -(sink_weights * (gradient * output).sum(-1)).sum((1, 2)).to(sinks.dtype)

        return *input_gradients, None, sink_gradients, None


def _shrunken_output(output: Tensor, logsumexp: Tensor, sink_scores: Tensor) -> Tensor:
    """Return the output [..., T, d] of attention after sinks have joined the softmax of its scores, whose
    `logsumexp` is [..., T]. `sink_scores` are broadcast to that shape."""
    return (output * (logsumexp - sink_scores).sigmoid()[..., None]).to(output.dtype)


def _forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: ForestAttention,
    ranks: SequenceRanks | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Called by transformers; with `ranks`, for this rank's part of the sequence. Unknown arguments are
    recorded: to ignore them silently would change gradients by too little to be noticed."""
    for name in unknown_arguments(arguments):
        forest.ignored_arguments.setdefault(name, module)
    scoring = read_scoring(module, query, arguments)
    scoring = scoring._replace(reach=scoring.reach.within(forest.longest_sequence))
    if ranks is not None and scoring.sinks is not None:  # of the heads that this rank computes
        scoring = scoring._replace(sinks=scoring.sinks.chunk(ranks.count)[ranks.index])

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # attention of some heads
        if scales_by_index(module):
            queries = forest.rescaled_queries(module, queries, part_width=query.shape[2])
        return forest.kernel.attend(queries, keys, values, scoring)

    if ranks is None:
        output = attend(query[0], key[0], value[0])
    else:
        output = ranks.attend(query[0], key[0], value[0], len(forest.forest.ids), attend)
    return output[None], None


AttentionInterface.register(FOREST_ATTENTION, _forest_attention)
AttentionMaskInterface.register(FOREST_ATTENTION, sdpa_mask)


def use_forest_attention(model: PreTrainedModel) -> None:
    """Let forwards of the model take a `forest`. For a forward without one, the model's own attention must be
    set again; layers with a state can do both."""
    hand_over_state_layers(model)
    set_text_attention(model, FOREST_ATTENTION)


def text_attention(model: PreTrainedModel) -> str:
    """Return the name of the attention of the model's text part."""
    attention_name: str = model.config.get_text_config()._attn_implementation
    return attention_name


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK_TOKENS = 128  # tokens of a block; keys that none of its queries sees are not computed
# Sequences are computed one by one from this mean length on, in tokens, if they hold at most MAX_REPETITION
# times the forest's tokens.
LONG_SEQUENCE = 4096
MAX_REPETITION = 1.25
LENGTH_MULTIPLE = 512  # sequences are padded to a multiple, as cuDNN prepares a plan for each length


class SequenceKernel:
    """Computes attention of long sequences that share little, on a GPU: torch's causal attention of each
    whole sequence, by cuDNN, which is about 1.8 times as fast as flex attention on Hopper. `fallback`
    computes the rest: windows, chunks, caps, sinks, float32, and head sizes that cuDNN does not support."""

    def __init__(self, forest: Forest, device: torch.device, fallback: AttentionKernel) -> None:
        self._fallback = fallback
        is_covered = np.zeros(len(forest.ids), dtype=bool)
        sequences = list[np.ndarray]()
        new_tokens = list[np.ndarray]()

        for sequence in forest.sequences:
            uncovered = sequence[~is_covered[sequence]]
            if len(uncovered):
                is_covered[uncovered] = True
                sequences.append(sequence)
                new_tokens.append(uncovered)

        self._lengths = [len(sequence) for sequence in sequences]
        self._new_counts = [len(uncovered) for uncovered in new_tokens]

        # Indices of all sequences' tokens in the forest, and of each token in the results; None: in order.
        self._token_order, self._result_order = (
            None if (np.diff(order) == 1).all() else to_device([torch.from_numpy(order)], device)[0]
            for order in (np.concatenate(sequences), np.argsort(np.concatenate(new_tokens)))
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention, see `AttentionKernel`."""
        is_plain = scoring.reach == Reach() and scoring.softcap is None and scoring.sinks is None
        if not is_plain or query.dtype.itemsize != 2 or not query.shape[-1] == value.shape[-1] <= 128:
            return self._fallback.attend(query, key, value, scoring)
        outputs = []
        ordered = (x if self._token_order is None else x[:, self._token_order] for x in (query, key, value))
        # A single split also gives a single gradient.
        sequences = zip(*(x.split(self._lengths, dim=1) for x in ordered), strict=True)

        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            for sequence, length, new_count in zip(sequences, self._lengths, self._new_counts, strict=True):
                padding = -length % LENGTH_MULTIPLE  # keys behind all queries: none sees them
                q, k, v = (pad(x, (0, 0, 0, padding))[None] for x in sequence)
                output = nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=True
                )
                outputs.append(output[0, :, length - new_count : length])

        results = torch.cat(outputs, dim=1)
        if self._result_order is not None:
            results = results[:, self._result_order]
        return results.transpose(0, 1)


class FlexKernel:
    """Computes attention on a GPU by torch's flex attention, with the forest's mask.

    Nodes lie in the sequence depth first, so the subtree of a node ends where its last descendant does, at
    its `subtree_end`: a token sees every token up to itself whose `subtree_end` comes after it. Layers share
    the masks.

    Per token [T]: `subtree_end`, and `position` in its sequence. Numbers that a kernel reads are tensors:
    with dynamic shapes torch cannot compile captured Python numbers.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        subtree_end = np.empty(len(forest.ids), dtype=np.int32)
        for path, node_end in zip(forest.paths, np.cumsum(forest.sizes), strict=True):
            subtree_end[path] = node_end  # a node on several paths keeps the last end
        position = forest.positions.astype(np.int32)
        self.subtree_end, self.position = to_device(
            [torch.from_numpy(subtree_end), torch.from_numpy(position)], device
        )
        self._masks_by_reach: dict[Reach, BlockMask] = {}
        self._softcaps: dict[float, Callable[..., Tensor]] = {}

    def visible(self, reach: Reach) -> MaskMod:
        """Return a predicate that is true where the token at index q sees the token at index k; any
        shapes."""
        subtree_end = self.subtree_end
        position = self.position

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < subtree_end[k])

        if reach == Reach():
            return sees
        first_visible = reach.first_visible(position)

        def sees_nearby(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < subtree_end[k]) & (position[k] >= first_visible[q])

        return sees_nearby

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention, see `AttentionKernel`."""
        if scoring.reach not in self._masks_by_reach:
            self._masks_by_reach[scoring.reach] = self.block_mask(scoring.reach)
        if scoring.softcap is not None and scoring.softcap not in self._softcaps:
            self._softcaps[scoring.softcap] = _softcap_function(query.new_tensor(scoring.softcap))

        result = _flex_attention(query.is_cuda)(
            query[None],
            key[None],
            value[None],
            score_mod=None if scoring.softcap is None else self._softcaps[scoring.softcap],
            block_mask=self._masks_by_reach[scoring.reach],
            scale=scoring.scale,
            enable_gqa=query.shape[0] != key.shape[0],
            kernel_options={"BACKEND": "TRITON"},  # the same kernel for short sequences
            return_aux=None if scoring.sinks is None else AuxRequest(lse=True),
        )
        if scoring.sinks is None:
            output = result
        else:
            plain_output, auxiliary = result
            output = _shrunken_output(plain_output, auxiliary.lse, scoring.sinks[:, None])
        return output[0].transpose(0, 1)

    def block_mask(self, reach: Reach) -> BlockMask:
        """Find the blocks of keys that a block of queries sees partly, and the blocks that all its queries
        see fully, from the extremes of both blocks. With a limited reach, some invisible blocks count as
        partly seen."""
        token_count = len(self.subtree_end)
        first_token = torch.arange(
            0, token_count, BLOCK_TOKENS, dtype=torch.int32, device=self.subtree_end.device
        )
        last_token = first_token + BLOCK_TOKENS - 1
        padding = -token_count % BLOCK_TOKENS

        def in_blocks(values: Tensor, padding_value: int) -> Tensor:
            return pad(values, (0, padding), value=padding_value).view(-1, BLOCK_TOKENS)

        subtree_ends = in_blocks(self.subtree_end, token_count)
        partly_visible = (first_token <= first_token[:, None]) & (subtree_ends.amax(1) > first_token[:, None])
        fully_visible = (first_token < first_token[:, None]) & (subtree_ends.amin(1) > last_token[:, None])
        if reach != Reach():
            first_visible = reach.first_visible(self.position)
            lowest_position = in_blocks(self.position, token_count).amin(1)
            highest_position = in_blocks(self.position, 0).amax(1)
            lowest_visible = in_blocks(first_visible, token_count).amin(1)
            highest_visible = in_blocks(first_visible, 0).amax(1)
            partly_visible &= highest_position >= lowest_visible[:, None]
            fully_visible &= lowest_position >= highest_visible[:, None]

        return BlockMask.from_kv_blocks(
            *_block_lists(partly_visible & ~fully_visible),
            *_block_lists(fully_visible),
            mask_mod=self.visible(reach),
            BLOCK_SIZE=BLOCK_TOKENS,
            seq_lengths=(token_count, token_count),
        )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the number of true blocks and their indices, in BlockMask's form."""
    block_order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], block_order.int()[None, None]


def _softcap_function(limit: Tensor) -> Callable[..., Tensor]:
    def capped_score(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped_score


@cache
def _flex_attention(compiled: bool) -> Any:
    """Return flex attention. Uncompiled flex attention holds a T x T matrix of scores."""
    return compiled_once(flex_attention, keeps_outputs=True) if compiled else flex_attention


def compiled_once(function: Callable[..., Any], *, keeps_outputs: bool = False) -> Any:
    """Compile a function once for all shapes, as every batch has another shape. `keeps_outputs`: a layer that
    is recomputed in the backward keeps the function's outputs, where this version of torch can (see
    recompute.py)."""
    from torch._dynamo import config  # a slow import, which only a GPU needs
    from torch._inductor import config as inductor

    # Attention has variants by types, reaches, caps, sinks, numbers of heads, one block and no gradient,
    # scores by types and what is asked: after 8 of them torch would go on without compiling.
    config.recompile_limit = max(config.recompile_limit, 64)
    options: Any = {VISIBLE_OPTION: True} if keeps_outputs and hasattr(inductor, VISIBLE_OPTION) else None
    return torch.compile(function, dynamic=True, options=options)
