"""A causal LM cut in two in front of its output layer: hidden states of all tokens, logits of a few.

    split:  ids ──backbone──► [B, T, H] ──selected──► [N, H];  n of them ──the rest──► logits [n, V]
    whole:  ids ──the model's forward, selecting in front of its output layer──► logits [N, V]

"The rest" is the model's own forward with the backbone replaced by its result, so whatever the model does to
its logits (scaling, soft caps) is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.trainer.scores import Logits, Selected, widened

Product = Callable[[Tensor], Tensor]  # hidden [..., H] → logits [..., V]
HeadInput = tuple[Tensor, Tensor, Logits]  # hidden [N, H]; features and their logits, see score_chunks


class SplitModel:
    """Stands in for the backbone of `lm` when its result is given. To be called in the forward of the FSDP
    root, where the output layer's weights are whole.

    `fp32_head`: the output layer multiplies in float32, whatever its weights and the hidden states are.
    Without it, bfloat16 weights get gradients that are products in bfloat16, summed over chunks in float32;
    an output layer with a bias, or one that is not plain, sums them in bfloat16.
    """

    def __init__(self, lm: PreTrainedModel, *, fp32_head: bool) -> None:
        self._lm, self._backbone, self._head = lm, lm.base_model, lm.get_output_embeddings()
        self.possible = self._backbone is not lm
        self._given: Any = None  # what the backbone is to return
        self._wanted: Selected | None = None
        self._seen: Tensor | None = None  # by `whole`: the selected hidden states
        self._product: Product | None = None  # of the output layer, in the forward under way
        self._run = self._backbone.forward
        self._backbone.forward = self._stand_in  # type: ignore[method-assign]
        self._head.register_forward_pre_hook(self._select)
        self._fp32_head = fp32_head
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
            self._given, self._product = type(output)(last_hidden_state=part.unsqueeze(0)), product
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
        weight, bias = self._head.weight, self._head.bias
        if self._fp32_head:
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
        product = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
        return gradient @ weight, None, product.float()
