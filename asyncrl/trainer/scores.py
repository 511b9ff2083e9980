"""Log-probs and entropy of selected tokens, a chunk at a time: no [tokens × vocabulary] matrix is held.

A chunk's logits are dropped after the forward and recomputed in the backward (activation
checkpointing, arXiv 1604.06174, of the output layer), so at any time there are those of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
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
from asyncrl.trainer.forced_routes import UNKNOWN_EXPERT
from asyncrl.trainer.prefix_tree import plant
from asyncrl.trainer.staging import moved, to_device
from asyncrl.trainer.teacher import Teacher, Told, distances
from asyncrl.trainer.world import SequenceRanks

CHUNK = 512  # tokens whose logits exist at once
AGENT = 32  # bits of an id, above which is the place of an adapter
LOWEST = -1e30  # in place of log 0: zero times it is zero
Logits = Callable[[Tensor], Tensor]  # features of n tokens [n, ·] → their logits [n, V]


class Scores(NamedTuple):
    """Holds per selected token [N], at its temperature, natural logs, float32 at least.

    `logp` and `value` carry gradient; `entropy`, over the whole vocabulary, if it was asked to;
    `collision`, Σ π² over the vocabulary, never. `divergence` from a teacher carries gradient, `reference`,
    the teacher's log-probs, none. None: not asked for, or no value head.
    """

    logp: Tensor
    entropy: Tensor
    collision: Tensor | None = None
    value: Tensor | None = None
    divergence: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """The tokens to score. `ids` [B, T]; token i of N is labels[i], predicted by the hidden state of
    ids[predictor[i]] (which stays on the host) of the flattened ids and logits divided by temperature[i].

    `forest` tells how tokens attend to each other, at these `positions` [B, T]. Without one each row of
    `ids` is a sequence by itself, padded on the right. `routes` [B * T, ·]: the experts of every token, those
    of the first row for what rows share; -1: not known. `ranks`: those that have a part of the sequence each.
    `agents` [B, T]: the places of the tokens' adapters (Adapters.use); rows of different ones share nothing.
    `told`: by a teacher.
    """

    ids: Tensor
    labels: Tensor
    predictor: np.ndarray
    temperature: Tensor
    positions: Tensor | None = None
    forest: ForestAttention | None = None
    routes: Tensor | None = None
    ranks: SequenceRanks | None = None
    agents: Tensor | None = None
    told: Told | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[np.ndarray],
        row: np.ndarray,
        position: np.ndarray,
        temperature: Tensor,
        packing: Packing = "padded",
        routes: Sequence[np.ndarray] = (),
        agents: Sequence[int] = (),
    ) -> Selected:
        """The tokens rows[row[i]][position[i]] of some rows of ids, laid out as `packing` says. `routes`: of
        the first tokens of each row; `agents`: of each row the place of its adapter; or nothing."""
        if agents:  # above the ids
            rows = [one + (np.int64(at) << AGENT) for one, at in zip(rows, agents, strict=True)]
        if packing == "padded":
            width = max(map(len, rows))
            at = [index * width + np.arange(len(one)) for index, one in enumerate(rows)]
            laid = _laid(routes, at, width * len(rows))
            padded = np.stack([np.pad(one, (0, width - len(one))) for one in rows]).astype(np.int64)
            ids, whose = _apart(torch.from_numpy(padded), agents)
            token = row * width + position
            labels = ids.flatten()[token]
            return cls(ids, labels, token - 1, temperature, routes=laid, agents=whose)
        forest = plant(rows, shared=packing == "tree")
        places = np.concatenate(forest.rows)
        starts = np.cumsum([0, *map(len, rows[:-1])])
        token, predictor = (places[starts[row] + at] for at in (position, position - 1))
        ids, positions = (torch.from_numpy(array)[None] for array in (forest.ids, forest.positions))
        ids, whose = _apart(ids, agents)
        laid = _laid(routes, forest.rows, len(forest.ids))
        found = cls(ids, ids[0, token], predictor, temperature, positions, ForestAttention(forest), laid)
        return replace(found, agents=whose)

    def to(self, device: torch.device) -> Selected:
        return moved(self, device)

    def with_tensors(self, convert: Callable[[Tensor], Tensor], device: torch.device) -> Selected:
        """Return a copy whose tensors went through `convert`, and whose attention runs on `device`."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {
            name: convert(column) for name, column in columns.items() if isinstance(column, Tensor)
        }
        return replace(
            self,
            told=self.told and Told(*map(convert, self.told)),
            forest=self.forest and self.forest.to(device),
            **tensors,
        )

    @property
    def host_positions(self) -> np.ndarray:
        """Returns the places in their rows of all tokens that are computed, padding included: [B * T]."""
        if self.forest is not None:
            return self.forest.forest.positions
        rows, width = self.ids.shape
        return np.tile(np.arange(width), rows)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the arguments of the model's forward."""
        if self.forest is None:
            return {"input_ids": self.ids, "use_cache": False}
        no_mask = self.ids.new_zeros(1, 1, 1, 1)  # of four dimensions: transformers builds none of T x T
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "attention_mask": no_mask,
            "use_cache": False,
            "forest": self.forest,
            "ranks": self.ranks,
        }

    def predictors(self, hidden: Tensor) -> Tensor:
        """Selects the hidden states [B, T, H] that predict the tokens: [N, H]."""
        (chosen,) = to_device([torch.from_numpy(self.predictor)], hidden.device)
        return hidden.flatten(0, 1)[chosen]


def _apart(ids: Tensor, agents: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return ids, and what is above them."""
    return (ids & ((1 << AGENT) - 1), ids >> AGENT) if agents else (ids, None)


def _laid(routes: Sequence[np.ndarray], rows: Sequence[np.ndarray], size: int) -> Tensor | None:
    """Routes by row, where the tokens of each row lie among `size`; None: none are known."""
    width = max((one.shape[1] for one in routes if len(one)), default=0)
    if not width:
        return None
    laid = np.full((size, width), UNKNOWN_EXPERT, dtype=np.int32)
    for own, places in reversed([*zip(routes, rows, strict=True)]):
        if len(own):
            laid[places[: len(own)]] = own
    return torch.from_numpy(laid)


def score_chunks(
    logits_of: Logits,
    features: Tensor,
    tokens: Selected,
    *,
    entropy_grad: bool,
    collision: bool,
    teacher: Teacher | None = None,
    wide: bool = False,
) -> Scores:
    """Compute scores from what the output layer reads of each selected token, [N, ·]. `wide`: that layer's
    logits have 4 bytes at least."""
    compiled = features.is_cuda and teacher is None
    scores_of = _compiled_scores() if compiled else _scores_of

    def chunk(part: Tensor, *columns: Tensor) -> Any:
        logits = logits_of(part)
        if compiled:
            torch._dynamo.mark_static(logits, 1)
        return scores_of(entropy_grad, collision, teacher, logits, *columns)

    columns = [features, tokens.labels, tokens.temperature]
    if teacher is not None:
        columns += tokens.told or () if teacher.features is None else (teacher.features,)
    # The same memory: compiled, two numbers a logit of its type; else four of 4 bytes.
    size = 8 * CHUNK // max(4 * wide, features.element_size()) if compiled else CHUNK
    found = [
        checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*(column.split(size) for column in columns), strict=True)
    ]
    return Scores(**{name: torch.cat([one[name] for one in found]) for name in found[0]})


def _scores_of(
    entropy_grad: bool, collision: bool, teacher: Teacher | None, logits: Tensor, *columns: Tensor
) -> dict[str, Tensor]:
    """Return scores of n tokens by name, from logits [n, V], labels, temperatures, and what is taught."""
    labels, temperature, *taught = columns
    table = log_probs(logits, temperature)
    found = {
        "logp": table.gather(1, labels[:, None])[:, 0],
        "entropy": entropy_of(table if entropy_grad else table.detach()),
    }
    if collision:
        found["collision"] = collision_of(table)
    if teacher is not None:
        of = teacher.logits_of
        other = log_probs(of(*taught), temperature) if of else Told(*taught)
        found |= distances(table, labels, other, teacher)
    return found


@cache
def _compiled_scores() -> Any:
    """Compile them for a GPU, without a teacher: what is [n, V] in float32 is never written to memory."""
    return compiled_once(_scores_of)


def log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log-probs [N, V] at each token's temperature."""
    logits = widened(logits)
    return (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1)


def entropy_of(logp: Tensor) -> Tensor:
    """-Σ p·log p over the vocabulary, of log p [N, V], which may be -inf; [N]."""
    return -(logp.exp() * logp.clamp(min=LOWEST)).sum(-1)


@torch.no_grad()
def collision_of(logp: Tensor) -> Tensor:
    """Σ p² over the vocabulary, the chance that two draws agree, of log p [N, V]; [N]."""
    return (2 * logp).exp().sum(-1)


def widened(tensor: Tensor) -> Tensor:
    """float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


Run = Callable[[Selected], Iterable[Tensor | None]]


def in_parts(run: Run, tokens: Selected, ranks: SequenceRanks | None) -> list[Tensor | None]:
    """Returns what `run` computes of the selected tokens, columns of [N]. With `ranks` a packed sequence is
    cut into as many equal parts, of which each rank runs its own; padded rows are run whole by every rank."""
    if ranks is None or tokens.forest is None:
        return list(run(tokens))
    owner = tokens.predictor // ranks.width(tokens.ids.numel())
    counts = np.bincount(owner, minlength=ranks.count)
    starts = np.cumsum(counts) - counts
    most = int(counts.max())
    order = np.argsort(owner, kind="stable")  # rank by rank
    place = np.empty_like(order)  # of each token, where all are gathered
    place[order] = owner[order] * most + np.arange(len(order)) - starts[owner[order]]
    mine = order[starts[ranks.index] :][: counts[ranks.index]]
    (there,) = to_device([torch.from_numpy(place)], tokens.ids.device)
    found = run(_part(tokens, mine, ranks))
    return [None if column is None else ranks.gather(column, most)[there] for column in found]


def _part(tokens: Selected, mine: np.ndarray, ranks: SequenceRanks) -> Selected:
    """This rank's part of a sequence, filled up with id 0, and the selected tokens that it predicts."""
    assert tokens.positions is not None, "packed rows have positions"
    size = tokens.ids.numel()
    width = ranks.width(size)
    start = ranks.index * width
    short = ranks.count * width - size
    own = slice(start, start + width)
    ids, positions = (pad(x, (0, short))[:, own] for x in (tokens.ids, tokens.positions))
    routes = tokens.routes
    agents = tokens.agents
    if agents is not None:
        agents = pad(agents, (0, short))[:, own]
    if routes is not None:
        routes = pad(routes, (0, 0, 0, short), value=UNKNOWN_EXPERT)[own]
    (chosen,) = to_device([torch.from_numpy(mine)], ids.device)
    labels = tokens.labels[chosen]
    temperature = tokens.temperature[chosen]
    predictor = tokens.predictor[mine] - start
    told = tokens.told and Told(*(column[chosen] for column in tokens.told))
    return Selected(
        ids, labels, predictor, temperature, positions, tokens.forest, routes, ranks, agents, told
    )


Product = Callable[[Tensor], Tensor]  # hidden [..., H] → logits [..., V]
HeadInput = tuple[Tensor, Tensor, Logits]  # hidden [N, H]; features and their logits, see score_chunks


class SplitModel:
    """A causal LM cut in two in front of its output layer: hidden states of all tokens, logits of a few.

        split:  ids ──backbone──► [B, T, H] ──selected──► [N, H];  n of them ──the rest──► logits [n, V]
        whole:  ids ──the model's forward, selecting in front of its output layer──► logits [N, V]

    "The rest" is the forward of `lm` with the backbone replaced by its result, so whatever the model does to
    its logits (scaling, soft caps) is kept. It is called in the forward of the FSDP root, where the output
    layer's weights are whole.

    `fp32_head`: the output layer multiplies in float32, whatever its weights and the hidden states are.
    Without it, bfloat16 weights get gradients that are products in bfloat16, summed over chunks in float32;
    an output layer with a bias, or one that is not plain, sums them in bfloat16.
    """

    def __init__(self, lm: PreTrainedModel, *, fp32_head: bool) -> None:
        self._lm = lm
        self._backbone = lm.base_model
        self._head = lm.get_output_embeddings()
        self.possible = self._backbone is not lm
        self._given: Any = None  # what the backbone is to return
        self._wanted: Selected | None = None
        self._seen: Tensor | None = None  # by `whole`: the selected hidden states
        self._product: Product | None = None  # of the output layer, in the forward under way
        self._run = self._backbone.forward
        self._backbone.forward = self._stand_in  # type: ignore[method-assign]
        self._head.register_forward_pre_hook(self._select)
        self.fp32_head = fp32_head
        if type(self._head).forward is nn.Linear.forward:
            self._head.forward = self._multiply  # type: ignore[method-assign, assignment]
        elif fp32_head:
            raise ConfigError(
                "model.fp32_head: this model's output layer is not a plain linear layer; set it false"
            )

    def split(self, tokens: Selected) -> HeadInput:
        """The backbone's forward; the function runs the rest of the model on hidden states of n tokens."""
        output = self._backbone(**tokens.inputs)
        hidden = tokens.predictors(output.last_hidden_state)
        product = self._make_product()  # once: what it widens sums up the gradients of all chunks

        def logits_of(part: Tensor) -> Tensor:
            self._given = type(output)(last_hidden_state=part.unsqueeze(0))
            self._product = product
            try:
                return self._lm(input_ids=tokens.ids, use_cache=False).logits[0]
            finally:
                self._given = self._product = None

        return hidden, hidden, logits_of

    def whole(self, tokens: Selected) -> HeadInput:
        """The model's forward as it is; logits of all tokens."""
        self._wanted, self._product = tokens, self._make_product()
        try:
            logits = self._lm(**tokens.inputs).logits[0]
            assert self._seen is not None, "the model did not call its output layer"
            return self._seen, logits, lambda part: part
        finally:
            self._wanted = self._product = self._seen = None

    def _stand_in(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs) if self._given is None else self._given

    def _select(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._wanted is None:
            return None
        self._seen = self._wanted.predictors(args[0])
        return (self._seen.unsqueeze(0),)

    def _make_product(self) -> Product:
        weight = self._head.weight
        bias = self._head.bias
        if self.fp32_head:
            wide = widened(weight), None if bias is None else widened(bias)
            return lambda hidden: linear(widened(hidden), *wide)
        if bias is not None or weight.dtype == widened(weight[:0]).dtype or not weight.requires_grad:
            return lambda hidden: linear(hidden, weight, bias)
        total = _WideGradient.apply(weight)
        return lambda hidden: _Linear.apply(hidden, weight, total)

    def _multiply(self, hidden: Tensor) -> Tensor:
        assert self._product is not None, "the output layer is called through the cut only"
        return self._product(hidden)


class _WideGradient(Function):
    """A placeholder that collects a weight's gradient: it holds no numbers, and autograd sums in float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Linear(Function):
    """hidden [..., H] · weightᵀ [H, V], with the gradient of `weight` given to `total` instead."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        hidden, weight = ctx.saved_tensors
        product = _float32_product(gradient.flatten(0, -2).t(), hidden.flatten(0, -2))
        return gradient @ weight, None, product


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left · right in float32. On GPUs of NVIDIA it is never rounded to the type of the factors."""
    if left.is_cuda and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()
