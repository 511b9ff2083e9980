"""Layers that are recomputed in the backward keep what attention returned: it runs once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.wrap import InductorCompiledCallable
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.config import Packing, TrainerConfig
from asyncrl.trainer import recompute
from asyncrl.trainer.attention import FOREST_ATTENTION, compiled_once
from asyncrl.trainer.layers import prepare_layers
from asyncrl.trainer.recompute import ATTENTION, COMPILED_FUNCTION, recomputed
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import SequenceRanks, World
from tests.fakes.models import small_model
from tests.fakes.traced import LiveBytes

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


class Executions(TorchDispatchMode):
    """Counts attention that runs. It lies below the modes of checkpointing: what they replay does not run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # inside, functions are compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in ATTENTION
        return func(*args, **(kwargs or {}))


def rows() -> list[np.ndarray]:
    """Two rows of a group, and one of its own."""
    draw = np.random.default_rng(0).integers
    prompt = draw(0, 40, 30)
    return [np.concatenate([prompt, draw(0, 40, count)]) for count in (5, 17)] + [draw(0, 40, 21)]


def forward_and_backward(model: nn.Module, inputs: dict[str, Any]) -> tuple[int, int, list[Tensor]]:
    """Return how often attention ran in the forward, and in all, and the gradients."""
    model.zero_grad()
    with Executions() as executions:
        logits = model(**inputs).logits
        in_forward = executions.count
        logits.sin().sum().backward()
    return in_forward, executions.count, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 9}),
        ("Gemma2", {"sliding_window": 9}),
        ("GptOss", {"sliding_window": 9, "num_local_experts": 4}),
    ],
)
@pytest.mark.parametrize(
    ("packing", "shared"), [("padded", False), ("packed", False), ("tree", False), ("tree", True)]
)
def test_attention_runs_once_a_step_and_gradients_have_the_same_bits(
    family: str, keys: dict[str, Any], packing: Packing, shared: bool, world: World
) -> None:
    """`shared`: heads are exchanged for tokens, as between the ranks of a sequence."""
    model = small_model(family, **SIZES, **keys)
    prepare_layers(model, TrainerConfig(activation_checkpointing="full"))
    if packing != "padded":
        model.set_attn_implementation(FOREST_ATTENTION)
    zero = np.zeros(1, dtype=np.int64)
    tokens = Selected.lay_out(rows(), zero, zero + 1, torch.ones(1), packing)
    ranks = SequenceRanks(cast(ProcessGroup, world.group), 0, 1) if shared else None
    inputs = replace(tokens, ranks=ranks).inputs

    in_forward, in_all, gradients = forward_and_backward(model, inputs)
    # Without an operator of attention on a CPU: caps, and sinks in the model's own attention.
    has_no_operator = family == ("GptOss" if packing == "padded" else "Gemma2")
    assert in_all == in_forward and (in_forward == 0) == has_no_operator

    with mock.patch.object(recompute, "ATTENTION", frozenset()):
        in_forward, in_all, expected = forward_and_backward(model, inputs)
    assert in_all == 2 * in_forward
    assert len(gradients) > 10 and all(map(torch.equal, gradients, expected))


class CompiledAttention(Function):
    """Stands for flex attention of a GPU: a compiled function that also returns the inputs that its backward
    reads, the key transposed."""

    runs = 0

    @classmethod
    def run(cls, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        cls.runs += 1
        query, key, value = inputs
        inputs.clear()
        weights = (query @ key.t()).softmax(-1)
        return weights @ value, weights, query, key.t(), value

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, *saved = COMPILED_FUNCTION(COMPILED, [query, key, value])
        ctx.save_for_backward(*saved)
        return cast(Tensor, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, query, transposed, value = ctx.saved_tensors
        slope = gradient @ value.t()
        scores = weights * (slope - (slope * weights).sum(-1, keepdim=True))
        return scores @ transposed.t(), scores.t() @ query, weights.t() @ gradient


COMPILED = InductorCompiledCallable(CompiledAttention.run)


def attend(matrix: Tensor, hidden: Tensor) -> Tensor:
    query, key, value = (hidden @ matrix).unflatten(-1, (3, -1)).unbind(1)
    return hidden + CompiledAttention.apply(query, key, value).sin()


def gradient_of(layer: Callable[..., Tensor]) -> tuple[Tensor, int]:
    """Return the gradient of a matrix in two layers, and the bytes that they keep for the backward."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator)
    matrix = torch.randn(16, 48, generator=generator, requires_grad=True)
    with LiveBytes() as live:
        loss = layer(matrix, layer(matrix, hidden)).square().sum()
        kept = live.now
        loss.backward()
    assert matrix.grad is not None
    return matrix.grad, kept


def test_a_compiled_function_runs_once_and_its_inputs_are_not_kept() -> None:
    expected, _ = gradient_of(attend)
    CompiledAttention.runs = 0
    gradient, kept = gradient_of(recomputed(attend))
    assert CompiledAttention.runs == 2 and torch.equal(gradient, expected)

    with mock.patch.object(recompute, "ATTENTION", frozenset()):
        CompiledAttention.runs = 0
        gradient, without = gradient_of(recomputed(attend))
    assert CompiledAttention.runs == 4 and torch.equal(gradient, expected)
    assert kept - without == 2 * 4 * (50 * 16 + 50 * 50), "output and weights of two layers, in float32"


def double(hidden: Tensor) -> Tensor:
    """A layer that changes the output of attention in place."""
    return scaled_dot_product_attention(hidden, hidden, hidden).mul_(2)


def test_an_output_that_the_model_changes_in_place_is_refused() -> None:
    hidden = torch.randn(1, 2, 5, 8, requires_grad=True)
    loss = recomputed(double)(hidden).sum()
    with pytest.raises(RuntimeError, match=r"in place.*trainer\.activation_checkpointing=none"):
        loss.backward()


def test_a_second_backward_computes_attention_again() -> None:
    hidden = torch.randn(1, 2, 5, 8, requires_grad=True)
    with Executions() as executions:
        loss = recomputed(scaled_dot_product_attention)(hidden, hidden, hidden).square().sum()
        (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        assert executions.count == 1
        (second,) = torch.autograd.grad(loss, hidden)
    assert executions.count == 2 and torch.equal(first, second)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.t()).softmax(-1) @ value


@pytest.mark.long
def test_a_function_that_torch_compiles_runs_once() -> None:
    """torch compiles no flex attention with a backward on a CPU: a plain one stands for it."""
    compiled = compiled_once(softmax_attention, keeps_outputs=True)

    def layer(matrix: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = (hidden @ matrix).unflatten(-1, (3, -1)).unbind(1)
        return hidden + compiled(query, key, value).sin()

    expected, _ = gradient_of(layer)
    gradient, kept = gradient_of(recomputed(layer))
    with Executions() as executions:
        again, _ = gradient_of(recomputed(layer))
    assert torch.equal(gradient, expected) and torch.equal(again, expected)
    assert executions.count == 4, "two layers, forward and backward"
    _, without = gradient_of(recomputed(lambda matrix, hidden: hidden + (hidden @ matrix)[:, :16].sin()))
    assert kept - without < 2.5 * 4 * (50 * 16 + 50 * 50)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("packing", ["padded", "tree"])
def test_attention_of_compiled_layers_runs_once(packing: Packing) -> None:
    model = small_model("Qwen3", **SIZES)
    prepare_layers(model, TrainerConfig(activation_checkpointing="full", compile=True))
    if packing != "padded":
        model.set_attn_implementation(FOREST_ATTENTION)
    zero = np.zeros(1, dtype=np.int64)
    inputs = Selected.lay_out(rows(), zero, zero + 1, torch.ones(1), packing).inputs

    in_forward, in_all, gradients = forward_and_backward(model, inputs)
    assert in_all == in_forward > 0

    with mock.patch.object(recompute, "ATTENTION", frozenset()):
        in_forward, in_all, expected = forward_and_backward(model, inputs)
    assert in_all == 2 * in_forward
    assert all(map(torch.equal, gradients, expected))
