"""Layers that carry a state from token to token: short convolutions, gated delta rules, state space models.

transformers computes these layers by functions of a model's own file, which have the same names and
arguments in every family:

    causal_conv1d_fn                                    each channel, over the last k tokens
    torch_chunk_gated_delta_rule (Qwen3-Next, Qwen3.5)  a matrix for each head
    chunk_kimi_delta_attention (Kimi Linear)
    mamba2_chunk_scan (Granite 4, Nemotron-H, Falcon-H1)

These functions read a row from its beginning to its end. Of rows that are packed into one, or of requests in
a batch, they would mix the states. `hand_over_state_layers` replaces them in a model's files. A replaced
function looks for a StateLayout among its keyword arguments, which come from the model's forward, and leaves
the computation to the layout. Without one nothing changes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn

from asyncrl.layer_kernels import kernel_binding

CONVOLUTION = "causal_conv1d_fn"
FUSED_MIXERS = ("mamba2_split_conv1d_scan_combined",)
"""Kernels that compute a whole layer in one call. If such a kernel returns None, the layer calls
the convolution and the recurrence separately."""

Argument = int | str  # a position or a name


@dataclass(frozen=True)
class Convolve:
    """A call of a convolution: each channel, over its last k inputs. `arguments`: the other arguments of the
    function by name."""

    function: Callable[..., Tensor]
    weight: Tensor  # [channels, k]
    bias: Tensor | None
    activation: str | None
    arguments: Mapping[str, Any]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs for inputs [B, channels, T], in the same shape; before a row there are zeros."""
        return self.function(rows, self.weight, self.bias, activation=self.activation, **self.arguments)


class RecurrenceKind(NamedTuple):
    """Describes a recurrent function.

    `token_arguments`: those with a row for each token, [B, T, ...]. `returns_pair`: the function also returns
    a state, None, where none is asked for. `sequence_argument`: how a kernel learns which sequences lie in
    one row: by their boundaries [n + 1] (`cu_seqlens`), or by the sequence's number for each token [1, T]
    (`seq_idx`), which goes without states.
    """

    token_arguments: tuple[Argument, ...]
    initial_state: str
    returns_state: str
    returns_pair: bool
    sequence_argument: str


DELTA_RULE = RecurrenceKind(
    token_arguments=(0, 1, 2, "g", "beta"),
    initial_state="initial_state",
    returns_state="output_final_state",
    returns_pair=True,
    sequence_argument="cu_seqlens",
)
STATE_SPACE = RecurrenceKind(
    token_arguments=(0, 1, 3, 4),  # argument 2 is a decay, the same for all tokens
    initial_state="initial_states",
    returns_state="return_final_states",
    returns_pair=False,
    sequence_argument="seq_idx",
)
RECURRENCES = {
    "torch_chunk_gated_delta_rule": DELTA_RULE,
    "chunk_kimi_delta_attention": DELTA_RULE,
    "mamba2_chunk_scan": STATE_SPACE,
}


@dataclass(frozen=True)
class Recurrence:
    """A call of a recurrent function. `sequence_argument`: the kind's, if the function takes it, else ''.
    `arguments`: all arguments, by position or name."""

    kind: RecurrenceKind
    function: Callable[..., Any]
    sequence_argument: str
    arguments: Mapping[Argument, Any]

    @property
    def tokens(self) -> dict[Argument, Tensor]:
        """Return the arguments with a row for each token, [B, T, ...]."""
        return {name: self.arguments[name] for name in self.kind.token_arguments}

    def run(
        self,
        tokens: Mapping[Argument, Tensor],
        initial_state: Tensor | None = None,
        *,
        returns_state: bool = False,
        sequences: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute these tokens. Returns the output [B, T, ...], and the state [B, ...] behind the last token
        if asked for. `sequences`: the value of `sequence_argument`."""
        arguments = {**self.arguments, **tokens}
        arguments[self.kind.initial_state] = initial_state
        arguments[self.kind.returns_state] = returns_state
        if sequences is not None:
            arguments[self.sequence_argument] = sequences
        positional = [arguments[index] for index in range(len(arguments)) if index in arguments]
        named = {name: value for name, value in arguments.items() if isinstance(name, str)}

        result = self.function(*positional, **named)
        if isinstance(result, tuple):
            output, state = result
            return output, state
        return result, None


class StateLayout(ABC):
    """Says how the tokens of a forward follow each other, and computes the layers that carry a state."""

    @abstractmethod
    def convolve(self, convolve: Convolve, inputs: Tensor, reach: int) -> Tensor:
        """Compute a convolution of the inputs [1, channels, T]; returns the same shape. An output depends on
        its own token and the `reach` tokens before it, with zeros before the first token of a sequence."""

    @abstractmethod
    def recur(self, recurrence: Recurrence) -> Tensor:
        """Compute a recurrence; returns the outputs [1, T, ...]."""


def hand_over_state_layers(
    model: nn.Module, prepare: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> None:
    """Let a StateLayout compute the layers with a state, in forwards that are passed one. `prepare` is
    applied to the functions that do so. Calling it again changes nothing."""
    for file_name in {type(module).__module__ for module in model.modules()}:
        model_file = sys.modules[file_name]
        for name in (CONVOLUTION, *FUSED_MIXERS, *RECURRENCES):
            function = getattr(model_file, name, None)
            if function is None or (hasattr(function, "handed_over") and prepare is None):
                continue

            replaced = _replaced_function(name, getattr(function, "handed_over", function))
            setattr(model_file, name, replaced if prepare is None else prepare(replaced))


def has_state(layer: nn.Module) -> bool:
    """Return True for a layer that carries a state: it has a convolution over tokens, and its file has the
    function that computes one."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in layer.children())
    return has_convolution and hasattr(sys.modules[type(layer).__module__], CONVOLUTION)


def taken_sequence_argument(kind: RecurrenceKind, function: Callable[..., Any]) -> str:
    """Return the argument by which a recurrent function learns the sequences of a row; '' if it takes none:
    transformers' own functions accept every argument, and ignore this one."""
    cells = kernel_binding(function)
    if not cells or not cells["is_new_implementation"].cell_contents:
        return ""
    is_taken = kind.sequence_argument in cells["applicable_params"].cell_contents
    return kind.sequence_argument if is_taken else ""


def _replaced_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    kind = RECURRENCES.get(name)
    sequence_argument = taken_sequence_argument(kind, original) if kind else ""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        layout = next((value for value in kwargs.values() if isinstance(value, StateLayout)), None)
        if layout is None:
            return original(*args, **kwargs)
        options = {key: value for key, value in kwargs.items() if value is not layout and value is not None}

        if name in FUSED_MIXERS:
            return None

        if kind is None:
            named = dict(zip(("inputs", "weight", "bias", "activation"), args, strict=False)) | options
            inputs = named.pop("inputs")
            weight = named.pop("weight")
            bias = named.pop("bias", None)
            activation = named.pop("activation", None)
            convolve = Convolve(original, weight, bias, activation, arguments=named)
            return layout.convolve(convolve, inputs, weight.shape[-1] - 1)

        arguments = dict[Argument, Any](enumerate(args)) | options
        recurrence = Recurrence(kind, original, sequence_argument, arguments)
        output = layout.recur(recurrence)
        return (output, None) if kind.returns_pair else output

    vars(function)["handed_over"] = original
    return function
