"""Log-probs and entropy of selected tokens, a chunk at a time: no [tokens × vocabulary] matrix is held.

A chunk's logits are dropped after the forward and recomputed in the backward (activation checkpointing, arXiv
1604.06174, of the output layer), so only one chunk's logits exist at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import ForestAttention, compiled_once
from asyncrl.trainer.forced_routes import NO_ROUTES, UNKNOWN_EXPERT
from asyncrl.trainer.images import (
    ImageInputs,
    ImagePixels,
    contains_images,
    dummy_sequence,
    ids_for_model,
    lay_out_images,
    with_numbered_images,
)
from asyncrl.trainer.prefix_tree import plant_forest
from asyncrl.trainer.staging import moved_to_device, to_device
from asyncrl.trainer.teacher import Teacher, TeacherScores, distances
from asyncrl.trainer.world import SequenceRanks

CHUNK_TOKENS = 512  # tokens whose logits exist at once
ADAPTER_BITS = 32  # bits of an id; the bits above hold the adapter's index
LOWEST_LOG = -1e15  # instead of log 0: zero times this, or its square, is zero
Logits = Callable[[Tensor], Tensor]  # features of n tokens [n, ·] → their logits [n, V]


class Scores(NamedTuple):
    """Holds numbers per selected token [N], at its temperature, in natural logs, float32 at least.

    `logp` carries gradient; `entropy`, over the whole vocabulary, only on request; `collision`, Σ π² over the
    vocabulary, and `variance`, of -log π over the vocabulary, never. `divergence` from a teacher carries
    gradient, `reference`, the teacher's log-probs, none. None: not requested.
    """

    logp: Tensor
    entropy: Tensor
    collision: Tensor | None = None
    divergence: Tensor | None = None
    reference: Tensor | None = None
    variance: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """Selects the tokens to score. `ids` [B, T]; token i of N is labels[i], predicted by the hidden state at
    index predictor_index[i] (which stays on the host) of the flattened ids; its logits are divided by
    temperature[i].

    `forest` tells how tokens attend to each other, at these `positions` [B, T]. Without a forest each row of
    `ids` is a separate sequence, padded on the right. `routes` [B * T, ·]: the experts of every token, by the
    first sequence for a shared prefix; -1: unknown. `ranks`: the ranks that compute a part of the sequence
    each. `adapter_indices` [B, T]: the tokens' adapters (Adapters.select_adapters); sequences of different
    adapters share nothing. `teacher_scores`: by a teacher on servers. `images`: what the model reads beside
    the ids; None for text alone.
    """

    ids: Tensor
    labels: Tensor
    predictor_index: np.ndarray
    temperature: Tensor
    positions: Tensor | None = None
    forest: ForestAttention | None = None
    routes: Tensor | None = None
    ranks: SequenceRanks | None = None
    adapter_indices: Tensor | None = None
    teacher_scores: TeacherScores | None = None
    images: ImageInputs | None = None

    @classmethod
    def lay_out(
        cls,
        sequences: Sequence[np.ndarray],
        sequence_of: np.ndarray,
        position: np.ndarray,
        temperature: Tensor,
        packing: Packing = "padded",
        routes: Sequence[np.ndarray] = (),
        adapters: Sequence[int] = (),
        image_pixels: ImagePixels | None = None,
    ) -> Selected:
        """Select the tokens sequences[sequence_of[i]][position[i]], and lay out the sequences by `packing`.
        `routes`: of the first tokens of each sequence; `adapters`: the adapter of each sequence; or empty.
        `image_pixels`: of a step with images; a layout without images then gets a dummy image."""
        if image_pixels is not None and not contains_images(sequences):
            sequences = [*sequences, dummy_sequence()]
            routes = [*routes, NO_ROUTES] if routes else routes
            adapters = [*adapters, adapters[0]] if adapters else adapters

        plain_sequences = sequences
        if image_pixels is not None:
            sequences = with_numbered_images(sequences)
        if adapters:  # above the ids
            sequences = [
                sequence + (np.int64(adapter) << ADAPTER_BITS)
                for sequence, adapter in zip(sequences, adapters, strict=True)
            ]

        positions = None
        attention = None
        if packing == "padded":
            width = max(map(len, sequences))
            padded = [np.pad(sequence, (0, width - len(sequence))) for sequence in sequences]
            ids = torch.from_numpy(np.stack(padded).astype(np.int64))
            offsets = [index * width + np.arange(len(sequence)) for index, sequence in enumerate(sequences)]
        else:
            forest = plant_forest(sequences, share_prefixes=packing == "tree")
            ids, positions = (torch.from_numpy(array)[None] for array in (forest.ids, forest.positions))
            attention = ForestAttention(forest)
            offsets = forest.sequences

        adapter_indices = None
        if adapters:
            adapter_indices = ids >> ADAPTER_BITS
            ids = ids & ((1 << ADAPTER_BITS) - 1)

        # Where the tokens, and the tokens in front of them, lie among the flattened ids.
        token_order = np.concatenate(offsets)
        order_index = np.cumsum([0, *map(len, sequences[:-1])])[sequence_of] + position
        labels = ids.flatten()[token_order[order_index]]

        images = None
        if image_pixels is not None:
            images = lay_out_images(plain_sequences, offsets, ids.shape, image_pixels)
            ids = ids_for_model(ids, image_pixels.layout)

        return cls(
            ids,
            labels,
            token_order[order_index - 1],
            temperature,
            positions,
            attention,
            _laid_out_routes(routes, offsets, ids.numel()),
            adapter_indices=adapter_indices,
            images=images,
        )

    def to(self, device: torch.device) -> Selected:
        return moved_to_device(self, device)

    def with_tensors(self, convert: Callable[[Tensor], Tensor], device: torch.device) -> Selected:
        """Return a copy whose tensors went through `convert`, with attention on `device`."""
        tensors: dict[str, Any] = {
            name: convert(column) for name, column in vars(self).items() if isinstance(column, Tensor)
        }
        return replace(
            self,
            teacher_scores=self.teacher_scores and TeacherScores(*map(convert, self.teacher_scores)),
            images=self.images and self.images.with_tensors(convert),
            forest=self.forest and self.forest.to(device),
            **tensors,
        )

    @property
    def host_positions(self) -> np.ndarray:
        """Return the positions in their sequences of all computed tokens, including padding: [B * T]."""
        if self.forest is not None:
            return self.forest.forest.positions
        sequence_count, width = self.ids.shape
        return np.tile(np.arange(width), sequence_count)

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the model's forward."""
        image_arguments = {} if self.images is None else self.images.arguments
        if self.forest is None:
            return {"input_ids": self.ids, "use_cache": False, **image_arguments}
        no_mask = self.ids.new_zeros(1, 1, 1, 1)  # four dimensions: transformers then builds no T x T mask
        text_arguments = {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "attention_mask": no_mask,
            "use_cache": False,
            "forest": self.forest,
            "ranks": self.ranks,
            "seq_idx": self.forest,  # LFM2 hands its convolutions no other argument
        }
        return text_arguments | image_arguments

    def predictors(self, hidden: Tensor) -> Tensor:
        """Select the hidden states [B, T, H] that predict the tokens: [N, H]."""
        (predictor_index,) = to_device([torch.from_numpy(self.predictor_index)], hidden.device)
        return hidden.flatten(0, 1)[predictor_index]


def _laid_out_routes(
    routes: Sequence[np.ndarray], token_positions: Sequence[np.ndarray], size: int
) -> Tensor | None:
    """Lay out the routes of each sequence where its tokens lie among `size`; None: no routes are known."""
    width = max((sequence_routes.shape[1] for sequence_routes in routes if len(sequence_routes)), default=0)
    if not width:
        return None

    laid_out = np.full((size, width), UNKNOWN_EXPERT, dtype=np.int32)
    for own_routes, positions in reversed([*zip(routes, token_positions, strict=True)]):
        if len(own_routes):
            laid_out[positions[: len(own_routes)]] = own_routes

    return torch.from_numpy(laid_out)


def score_chunks(
    logits_of: Logits,
    features: Tensor,
    tokens: Selected,
    *,
    entropy_grad: bool,
    with_collision: bool,
    with_variance: bool = False,
    teacher: Teacher | None = None,
    wide_logits: bool = False,
) -> Scores:
    """Compute scores from the output layer's input for each selected token, [N, ·]. `wide_logits`: logits
    have at least 4 bytes."""
    # The variance is requested rarely and of few tokens: compiling would take longer.
    is_compiled = features.is_cuda and teacher is None and not with_variance
    score_chunk = _compiled_scores() if is_compiled else _chunk_scores

    def run_chunk(part: Tensor, *columns: Tensor) -> Any:
        logits = logits_of(part)
        if is_compiled:
            torch._dynamo.mark_static(logits, 1)
        return score_chunk(entropy_grad, with_collision, with_variance, teacher, logits, *columns)

    token_columns = [features, tokens.labels, tokens.temperature]
    if teacher is not None:
        token_columns += tokens.teacher_scores or () if teacher.features is None else (teacher.features,)

    # The same memory: compiled, two numbers a logit of its type; else four of 4 bytes.
    chunk_tokens = (
        8 * CHUNK_TOKENS // max(4 * wide_logits, features.element_size()) if is_compiled else CHUNK_TOKENS
    )
    chunk_results = [
        checkpoint(run_chunk, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*(column.split(chunk_tokens) for column in token_columns), strict=True)
    ]

    return Scores(
        **{name: torch.cat([result[name] for result in chunk_results]) for name in chunk_results[0]}
    )


def _chunk_scores(
    entropy_grad: bool,
    collision: bool,
    variance: bool,
    teacher: Teacher | None,
    logits: Tensor,
    *columns: Tensor,
) -> dict[str, Tensor]:
    """Return scores of n tokens by name, from logits [n, V], labels, temperatures, and the teacher's
    columns."""
    labels, temperature, *teacher_columns = columns
    table = log_probs(logits, temperature)
    scores = {
        "logp": table.gather(1, labels[:, None])[:, 0],
        "entropy": entropy_of(table if entropy_grad else table.detach()),
    }
    if collision:
        scores["collision"] = collision_of(table)
    if variance:
        scores["variance"] = surprisal_variance(table, scores["entropy"])

    if teacher is not None:
        logits_of = teacher.logits_of
        teacher_logprobs = (
            log_probs(logits_of(*teacher_columns), temperature)
            if logits_of
            else TeacherScores(*teacher_columns)
        )
        scores |= distances(table, labels, teacher_logprobs, teacher)

    return scores


@cache
def _compiled_scores() -> Any:
    """Compile the scores for a GPU, without a teacher: no float32 matrix [n, V] is ever written to memory."""
    return compiled_once(_chunk_scores)


def log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log-probs [N, V] at each token's temperature."""
    logits = widened(logits)
    return (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1)


def entropy_of(logp: Tensor) -> Tensor:
    """Return -Σ p·log p over the vocabulary, [N], of log p [N, V], with -inf allowed."""
    return -(logp.exp() * logp.clamp(min=LOWEST_LOG)).sum(-1)


@torch.no_grad()
def collision_of(logp: Tensor) -> Tensor:
    """Return Σ p² over the vocabulary, [N], the chance that two draws agree, of log p [N, V]."""
    return (2 * logp).exp().sum(-1)


@torch.no_grad()
def surprisal_variance(logp: Tensor, entropy: Tensor) -> Tensor:
    """Return Σ p·(log p + H)² over the vocabulary, [N], the variance of -log p of a drawn token, of log p
    [N, V], with -inf allowed, and the entropy H [N]."""
    return (logp.exp() * (logp.clamp(min=LOWEST_LOG) + entropy[:, None]).square()).sum(-1)


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


RunPart = Callable[[Selected], Iterable[Tensor | None]]


def in_parts(
    run_part: RunPart, tokens: Selected, sequence_ranks: SequenceRanks | None
) -> list[Tensor | None]:
    """Return the columns [N] that `run_part` computes of the selected tokens. With `sequence_ranks` a packed
    sequence is cut into equal parts, and each rank runs its part; every rank runs padded sequences whole."""
    if sequence_ranks is None or tokens.forest is None:
        return list(run_part(tokens))
    owner_rank = tokens.predictor_index // sequence_ranks.width(tokens.ids.numel())
    token_counts = np.bincount(owner_rank, minlength=sequence_ranks.count)
    starts = np.cumsum(token_counts) - token_counts
    most_tokens = int(token_counts.max())
    rank_order = np.argsort(owner_rank, kind="stable")  # rank by rank
    gathered_index = np.empty_like(rank_order)  # index of each token in the gathered columns
    gathered_index[rank_order] = (
        owner_rank[rank_order] * most_tokens + np.arange(len(rank_order)) - starts[owner_rank[rank_order]]
    )
    own_tokens = rank_order[starts[sequence_ranks.index] :][: token_counts[sequence_ranks.index]]
    (gathered_order,) = to_device([torch.from_numpy(gathered_index)], tokens.ids.device)

    return [
        None if column is None else sequence_ranks.gather(column, most_tokens)[gathered_order]
        for column in run_part(_rank_part(tokens, own_tokens, sequence_ranks))
    ]


def _rank_part(tokens: Selected, own_tokens: np.ndarray, sequence_ranks: SequenceRanks) -> Selected:
    """Return this rank's part of a sequence, padded with id 0, and the selected tokens that it predicts."""
    assert tokens.positions is not None, "packed rows have positions"
    assert tokens.images is None, "refused by image_checks.py"
    token_count = tokens.ids.numel()
    width = sequence_ranks.width(token_count)
    start = sequence_ranks.index * width
    padding = sequence_ranks.count * width - token_count
    own_slice = slice(start, start + width)
    ids, positions = (pad(x, (0, padding))[:, own_slice] for x in (tokens.ids, tokens.positions))
    routes = tokens.routes
    adapter_indices = tokens.adapter_indices
    if adapter_indices is not None:
        adapter_indices = pad(adapter_indices, (0, padding))[:, own_slice]
    if routes is not None:
        routes = pad(routes, (0, 0, 0, padding), value=UNKNOWN_EXPERT)[own_slice]
    (selected_index,) = to_device([torch.from_numpy(own_tokens)], ids.device)
    teacher_scores = tokens.teacher_scores and TeacherScores(
        *(column[selected_index] for column in tokens.teacher_scores)
    )

    return Selected(
        ids,
        tokens.labels[selected_index],
        tokens.predictor_index[own_tokens] - start,
        tokens.temperature[selected_index],
        positions,
        tokens.forest,
        routes,
        sequence_ranks,
        adapter_indices,
        teacher_scores,
    )


HeadProduct = Callable[[Tensor], Tensor]  # hidden [..., H] → logits [..., V]
HeadInput = tuple[Tensor, Logits]  # features and their logits, see score_chunks


class SplitModel:
    """Splits a language model in front of its output layer: hidden states of all tokens, logits of a few.

        split:  ids ──backbone──► [B, T, H] ──selected──► [N, H];  n of them ──the rest──► logits [n, V]
        whole:  ids ──the model's forward, selecting in front of its output layer──► logits [N, V]

    "The rest" is the forward of `lm` with the backbone replaced by its result, so that the model's own
    changes of its logits (scaling, soft caps) are kept. The rest is called in the forward of the FSDP root,
    where the output layer's weights are whole.

    `fp32_head`: the output layer multiplies in float32, whatever the dtype of weights and hidden states.
    Without it, bfloat16 weights get gradients that are products in bfloat16, summed over chunks in float32;
    an output layer with a bias, or not plainly linear, sums in bfloat16.
    """

    def __init__(self, lm: PreTrainedModel, *, fp32_head: bool) -> None:
        self._lm = lm
        self._backbone = lm.base_model
        self._head = lm.get_output_embeddings()
        self.is_possible = self._backbone is not lm
        self._backbone_output: Any = None  # if set, the backbone's forward returns this
        self._selected: Selected | None = None
        self._has_selected = False  # in `run_whole`: the output layer got the selected hidden states
        self._head_product: HeadProduct | None = None  # the output layer's product in the forward under way
        self._backbone_forward = self._backbone.forward
        self._backbone.forward = self._run_backbone  # type: ignore[method-assign]
        self._head.register_forward_pre_hook(self._select_hidden)
        self.fp32_head = fp32_head

        if type(self._head).forward is nn.Linear.forward:
            self._head.forward = self._run_head  # type: ignore[method-assign, assignment]
        elif fp32_head:
            raise ConfigError(
                "model.fp32_head: this model's output layer is not a plain linear layer; set "
                "model.fp32_head=false"
            )

    def split(self, tokens: Selected) -> HeadInput:
        """Run the backbone; the returned function runs the rest of the model on hidden states of n tokens."""
        output = self._backbone(**tokens.inputs)
        hidden = tokens.predictors(output.last_hidden_state)
        product = self._make_head_product()  # once: what it widens sums up the gradients of all chunks

        def logits_of(part: Tensor) -> Tensor:
            self._backbone_output = type(output)(last_hidden_state=part.unsqueeze(0))
            self._head_product = product
            try:
                return self._lm(input_ids=tokens.ids, use_cache=False).logits[0]
            finally:
                self._backbone_output = None
                self._head_product = None

        return hidden, logits_of

    def run_whole(self, tokens: Selected) -> HeadInput:
        """Run the model's forward unchanged; logits of all tokens."""
        self._head_product = self._make_head_product()
        self._selected = tokens
        try:
            logits = self._lm(**tokens.inputs).logits[0]
            assert self._has_selected, "the model did not call its output layer"
            return logits, lambda part: part
        finally:
            self._selected = None
            self._head_product = None
            self._has_selected = False

    def _run_backbone(self, *args: Any, **kwargs: Any) -> Any:
        if self._backbone_output is not None:
            return self._backbone_output
        return self._backbone_forward(*args, **kwargs)

    def _select_hidden(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._selected is None:
            return None
        self._has_selected = True
        return (self._selected.predictors(args[0]).unsqueeze(0),)

    def _make_head_product(self) -> HeadProduct:
        weight = self._head.weight
        bias = self._head.bias
        if self.fp32_head:
            wide_weight = widened(weight)
            wide_bias = None if bias is None else widened(bias)
            return lambda hidden: linear(widened(hidden), wide_weight, wide_bias)

        if bias is not None or weight.dtype == widened(weight[:0]).dtype or not weight.requires_grad:
            return lambda hidden: linear(hidden, weight, bias)
        gradient_sum = _WideGradient.apply(weight)
        return lambda hidden: _Linear.apply(hidden, weight, gradient_sum)

    def _run_head(self, hidden: Tensor) -> Tensor:
        assert self._head_product is not None, "the output layer is called by `split` and `run_whole` only"
        return self._head_product(hidden)


class _WideGradient(Function):
    """A placeholder that collects a weight's gradient: without numbers of its own, it lets autograd sum in
    float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Linear(Function):
    """Computes hidden [..., H] · weightᵀ [H, V], and gives the gradient of `weight` to `gradient_sum`
    instead."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, gradient_sum: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, None, _float32_product(gradient.flatten(0, -2).t(), hidden.flatten(0, -2))


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left · right in float32. On NVIDIA GPUs the product is never rounded to the type of the
    factors."""
    if left.is_cuda and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()
