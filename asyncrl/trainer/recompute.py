"""Activation checkpointing (arXiv 1604.06174) that runs attention once, and keeps its outputs.

    forward    Recording: attention operators run, and their outputs are kept
    backward   Replaying: the layer is recomputed, and attention operators return the kept outputs

Both are dispatch modes: they see operators below autograd, which records a replayed operator as an operator
that ran. torch's own selective checkpointing would do for torch's attention. But a compiled function, such as
flex attention, also returns the inputs that its backward reads: query, key and value would be kept beside the
output, and take more memory than the output does. Here a replayed function returns the recomputed inputs
instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import wrap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from asyncrl.config import TrainerConfig

COMPILED_FUNCTION: Any = getattr(wrap, "inductor_compiled_code", None)
"""The operator that calls a function compiled with VISIBLE_OPTION; None if torch lacks this operator."""

VISIBLE_OPTION = "wrap_inductor_compiled_regions"
"""The option of torch.compile that exposes a compiled function to dispatch modes as a single operator."""

_SDPA = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTION = frozenset({*(getattr(torch.ops.aten, name).default for name in _SDPA), COMPILED_FUNCTION})
"""The operators whose outputs are kept: the output of attention, and the log-sum-exp of its scores. Attention
without an operator of its own, such as products and a softmax, is recomputed."""


@dataclass(frozen=True)
class KeptTensor:
    """Holds an output, and its version at that time: torch counts changes in place."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class InputView:
    """Stands for an output that is a view of an input: of tensor number `index` among the inputs, `offset`
    elements behind its first."""

    index: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@dataclass(frozen=True)
class KeptCall:
    """Records a call of an operator. `function`: the function that a COMPILED_FUNCTION has called. `outputs`:
    the results, with a KeptTensor or an InputView in place of each tensor."""

    operator: Any
    function: Any
    outputs: Any


class AttentionMode(TorchDispatchMode):
    """Sees all operators that run inside, also in compiled functions. `calls`: the calls of attention."""

    supports_higher_order_operators = True

    def __init__(self, calls: deque[KeptCall]) -> None:
        super().__init__()
        self._calls = calls

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as torch compiles nothing within other modes."""
        return True


class Recording(AttentionMode):
    """Runs all operators, and appends the calls of attention."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operator not in ATTENTION:
            return operator(*args, **(kwargs or {}))

        # Before the call: a compiled function empties its list of inputs.
        input_tensors = _tensor_arguments(args, kwargs)
        outputs = operator(*args, **(kwargs or {}))
        replacements = tree_map(partial(_replacement_of, input_tensors), outputs)
        self._calls.append(KeptCall(operator, _called_function(operator, args), replacements))

        return outputs


class Replaying(AttentionMode):
    """Answers the calls of attention from the recorded calls, in order, each once; runs all other
    operators."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = self._calls.popleft() if operator in ATTENTION and self._calls else None
        # A second backward through a graph finds no call, and a function that was compiled anew another one.
        if call is None or call.operator != operator or call.function is not _called_function(operator, args):
            return operator(*args, **(kwargs or {}))
        return tree_map(partial(_restored_output, _tensor_arguments(args, kwargs)), call.outputs)


def _called_function(operator: Any, args: Sequence[Any]) -> Any:
    return args[0] if operator is COMPILED_FUNCTION else None


def _tensor_arguments(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _replacement_of(inputs: Sequence[Tensor], output: Any) -> Any:
    """Return the stand-in for an output; numbers stand for themselves."""
    if not isinstance(output, Tensor):
        return output

    storage = output.untyped_storage()._cdata
    for index, tensor in enumerate(inputs):
        if tensor.untyped_storage()._cdata == storage:
            offset = int(output.storage_offset() - tensor.storage_offset())
            return InputView(index, output.shape, output.stride(), offset)

    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        detached = output.detach()  # autograd changes `output` next; both count changes in place together

    return KeptTensor(detached, detached._version)


def _restored_output(inputs: Sequence[Tensor], replacement: Any) -> Any:
    """Return the output for which `replacement` stands."""
    if isinstance(replacement, InputView):
        tensor = inputs[replacement.index]
        return tensor.as_strided(
            replacement.size, replacement.stride, tensor.storage_offset() + replacement.offset
        )

    if not isinstance(replacement, KeptTensor):
        return replacement

    if replacement.tensor._version != replacement.version:
        raise RuntimeError(
            "the model changes the output of attention in place, so this output cannot be kept for the "
            "backward pass; set trainer.activation_checkpointing=none"
        )

    return replacement.tensor


if COMPILED_FUNCTION is not None:
    from torch._higher_order_ops.utils import redirect_to_mode  # private: as old as the operator

    for mode in (Recording, Replaying):
        redirect_to_mode(COMPILED_FUNCTION, mode)


class Recomputation:
    """Decides which layers of a rank's models are recomputed in the backward: every k-th, k = `every`, or
    none, 0. May change between micro-batches."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self.every = trainer.checkpointed_every
        self.automatic = trainer.activation_checkpointing == "auto"
        self._indices = list[int]()  # indices of all wrapped layers, each within its model

    def wrap(self, index: int, layer_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of layer number `index`, recomputed where `every` says so."""
        self._indices.append(index)
        if not self.every and not self.automatic:
            return layer_forward
        recomputed_forward = recomputed(layer_forward)

        @wraps(layer_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._is_recomputed(index):
                return recomputed_forward(*args, **kwargs)
            return layer_forward(*args, **kwargs)

        return forward

    @property
    def recomputed_fraction(self) -> float:
        """Return the fraction of the layers that are recomputed."""
        recomputed_count = sum(map(self._is_recomputed, self._indices))
        return recomputed_count / max(1, len(self._indices))

    @property
    def next_every(self) -> int:
        """Return the next value to try where memory does not suffice: every second layer, then all. 0: all
        are recomputed already, or the configuration fixes the value."""
        if not self.automatic or not self._indices or self.every == 1:
            return 0
        return 1 if self.every == 2 else 2

    def recompute_at_least(self, every: int) -> None:
        """Recompute every `every`-th layer at least, unless the configuration has chosen. 0: no change."""
        if self.automatic and every:
            self.every = min(self.every or every, every)

    def _is_recomputed(self, index: int) -> bool:
        return self.every > 0 and index % self.every == 0


def recomputed(layer_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `layer_forward`, keeping only inputs, outputs and the results of attention for the backward."""

    def make_modes() -> tuple[Recording, Replaying]:
        calls = deque[KeptCall]()
        return Recording(calls), Replaying(calls)

    return partial(
        checkpoint, layer_forward, use_reentrant=False, context_fn=make_modes, preserve_rng_state=False
    )
