"""A causal LM cut in two in front of its output layer: hidden states of all tokens, logits of a few.

    split:  ids ──backbone──► [B, T, H] ──selected──► [N, H];  n of them ──the rest──► logits [n, V]
    whole:  ids ──the model's forward, selecting in front of its output layer──► logits [N, V]

"The rest" is the model's own forward with the backbone stood in for: whatever it does to its logits
(scaling, soft caps) is done.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.trainer.scores import Logits, Selected, widened

Cuts = tuple[Tensor, Tensor, Logits]  # hidden [N, H]; features and their logits, see score_chunks


class Cut:
    """Stands in for the backbone of `lm` when its result is given. To be called in the forward of the FSDP
    root, where the output layer's weights are whole.

    `fp32_head`: the output layer multiplies in float32, whatever its weights and the hidden states are.
    """

    def __init__(self, lm: PreTrainedModel, *, fp32_head: bool) -> None:
        self._lm, self._backbone, self._head = lm, lm.base_model, lm.get_output_embeddings()
        self.possible = self._backbone is not lm
        self._given: Any = None  # what the backbone is to return
        self._wanted: Selected | None = None
        self._seen: Tensor | None = None  # by `whole`: the selected hidden states
        self._wide: tuple[Tensor, Tensor | None] | None = None  # fp32_head: weight and bias
        self._run = self._backbone.forward
        self._backbone.forward = self._stand_in  # type: ignore[method-assign]
        self._head.register_forward_pre_hook(self._select)
        self._fp32_head = fp32_head
        if fp32_head:
            if not isinstance(self._head, nn.Linear):
                raise ConfigError(
                    "$.model.fp32_head: this model's output layer is not a plain linear layer; set it false"
                )
            self._head.forward = self._multiply  # type: ignore[method-assign, assignment]

    def split(self, tokens: Selected) -> Cuts:
        """The backbone's forward; the function runs the rest of the model on hidden states of n tokens."""
        output = self._backbone(input_ids=tokens.ids, use_cache=False)
        hidden = tokens.predictors(output.last_hidden_state)
        # Made once: chunks add up their gradients in float32.
        wide = self._widen()

        def logits_of(part: Tensor) -> Tensor:
            self._given, self._wide = type(output)(last_hidden_state=part.unsqueeze(0)), wide
            try:
                return self._lm(input_ids=tokens.ids, use_cache=False).logits[0]
            finally:
                self._given = self._wide = None

        return hidden, hidden, logits_of

    def whole(self, tokens: Selected) -> Cuts:
        """The model's forward as it is; logits of all tokens."""
        self._wanted, self._wide = tokens, self._widen()
        try:
            logits = self._lm(input_ids=tokens.ids, use_cache=False).logits[0]
            assert self._seen is not None, "the model did not call its output layer"
            return self._seen, logits, lambda part: part
        finally:
            self._wanted = self._wide = self._seen = None

    def _stand_in(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs) if self._given is None else self._given

    def _select(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._wanted is None:
            return None
        self._seen = self._wanted.predictors(args[0])
        return (self._seen.unsqueeze(0),)

    def _widen(self) -> tuple[Tensor, Tensor | None] | None:
        if not self._fp32_head:
            return None
        bias = self._head.bias
        return widened(self._head.weight), None if bias is None else widened(bias)

    def _multiply(self, hidden: Tensor) -> Tensor:
        assert self._wide is not None, "the output layer is called through the cut only"
        return linear(widened(hidden), *self._wide)
