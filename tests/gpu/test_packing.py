"""On a GPU: attention over a forest, forward and backward, compiled."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from asyncrl.attention_rules import Reach, Scoring
from asyncrl.trainer import recompute
from asyncrl.trainer.attention import AttentionKernel, FlexKernel, NodeKernel, SequenceKernel
from asyncrl.trainer.prefix_tree import Forest, plant_forest
from asyncrl.trainer.recompute import recomputed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def forest(seed: int) -> Forest:
    """Two groups of four, of other lengths for another seed."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(2):
        prompt = rng.integers(0, 99, rng.integers(100, 300))
        rows += [np.concatenate([prompt, rng.integers(0, 99, rng.integers(20, 400))]) for _ in range(4)]
    return plant_forest(rows, share_prefixes=True)


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.125),
        Scoring(0.125, Reach(window=64)),
        Scoring(0.125, Reach(chunk=100)),
        Scoring(0.125, softcap=20.0),
        Scoring(0.125, Reach(window=64), sinks=torch.linspace(-2, 4, 8)),
    ],
)
def test_flex_attention_is_that_of_the_buckets_with_its_gradients(scoring: Scoring) -> None:
    planted = forest(0)
    device = torch.device("cuda")
    size = len(planted.ids)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(heads, size, 64, generator=generator) for heads in (8, 2, 2)]
    given += [] if scoring.sinks is None else [scoring.sinks]
    weight = torch.randn(size, 8, 64, generator=generator)

    def run(kernel: object, place: torch.device) -> list[torch.Tensor]:
        tensors = [tensor.to(place).detach().requires_grad_() for tensor in given]
        query, key, value, *sinks = tensors
        own_scoring = scoring._replace(sinks=sinks[0]) if sinks else scoring
        output = kernel.attend(query, key, value, own_scoring)  # type: ignore[attr-defined]
        (output * weight.to(place)).sum().backward()
        return [output.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors if tensor.grad is not None)]

    wanted = run(NodeKernel(planted), torch.device("cpu"))
    for a, b in zip(run(FlexKernel(planted, device), device), wanted, strict=True):
        assert torch.allclose(a, b, atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8, reason="no bfloat16"
)
def test_rows_one_by_one_are_those_of_the_buckets_with_their_gradients() -> None:
    """In bfloat16, by norm."""
    planted = forest(0)
    device = torch.device("cuda")
    size = len(planted.ids)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(heads, size, 64, generator=generator) for heads in (8, 2, 2)]
    weight = torch.randn(size, 8, 64, generator=generator)

    def run(kernel: object, place: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [tensor.to(place, dtype).detach().requires_grad_() for tensor in given]
        output = kernel.attend(*tensors, Scoring(0.125))  # type: ignore[attr-defined]
        (output * weight.to(place)).sum().backward()
        return [output.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors if tensor.grad is not None)]

    node = NodeKernel(planted)
    rows = SequenceKernel(planted, device, node)
    pairs = zip(run(rows, device, torch.bfloat16), run(node, torch.device("cpu"), torch.float32), strict=True)
    for a, b in pairs:
        assert (a.float() - b).norm() < 0.02 * b.norm()


def test_other_lengths_do_not_compile_again() -> None:
    device = torch.device("cuda")
    scoring = Scoring(0.125)
    for seed in range(3):
        planted = forest(seed)
        tensors = [torch.randn(heads, len(planted.ids), 64, device=device) for heads in (8, 2, 2)]
        FlexKernel(planted, device).attend(*tensors, scoring)
        if seed == 1:
            compiled = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("kernel", [FlexKernel, SequenceKernel])
def test_attention_of_a_layer_that_is_computed_again_is_kept_and_no_more(kernel: type) -> None:
    """Bytes between forward and backward: more than without by output and log-sum-exp, not by query, key and
    value. Gradients have the same bits."""
    planted = forest(0)
    device = torch.device("cuda")
    attention: AttentionKernel = FlexKernel(planted, device)
    if kernel is SequenceKernel:
        attention = SequenceKernel(planted, device, attention)
    size = len(planted.ids)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size, 512, generator=generator).to(device, torch.bfloat16)
    matrix = torch.randn(512, 3 * 8 * 64, generator=generator).to(device, torch.bfloat16).requires_grad_()

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (hidden @ matrix).view(size, 3, 8, 64).permute(1, 2, 0, 3)
        return hidden + attention.attend(query, key, value, Scoring(0.125)).flatten(1)

    def run() -> tuple[int, torch.Tensor]:
        matrix.grad = None
        before = torch.cuda.memory_allocated()
        loss = recomputed(layer)(hidden).float().square().sum()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        return kept, matrix.grad

    run()  # compiles, and makes the masks
    with mock.patch.object(recompute, "_restored_output", wraps=recompute._restored_output) as restored:
        kept, gradient = run()
    assert restored.called, "attention ran once more"
    with mock.patch.object(recompute, "ATTENTION", frozenset()):
        without, expected = run()
    output = size * 8 * (64 * 2 + 4)
    padding = 2 * len(planted.sequences) * 512 * 8 * (64 * 2 + 4) if kernel is SequenceKernel else 0
    assert torch.equal(gradient, expected)
    assert output <= kept - without < 1.5 * output + padding
