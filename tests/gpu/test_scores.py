"""On a GPU: log-probs, entropy and gradients of compiled scores are those of the plain ones; the gradient of
the output layer's weight is not rounded before it is summed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from asyncrl.trainer import scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_compiled_scores_are_the_plain_ones(entropy_grad: bool) -> None:
    def run(count: int, scores_of: Callable[..., dict[str, Tensor]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(count)
        table = 3 * torch.randn(count, 32_000, generator=generator)
        logits = table.bfloat16().cuda().requires_grad_()
        labels = torch.arange(count, device="cuda")
        temperature = torch.linspace(0.5, 1.5, count, device="cuda")
        torch._dynamo.mark_static(logits, 1)
        by_name = scores_of(entropy_grad, True, False, None, logits, labels, temperature)
        (by_name["logp"].sum() + (by_name["entropy"].sum() if entropy_grad else 0.0)).backward()
        assert logits.grad is not None
        return [*by_name.values(), logits.grad]

    before = counters["stats"]["unique_graphs"]
    for count in (2048, 700, 3):
        compiled = run(count, scores._compiled_scores())
        plain = run(count, scores._chunk_scores)
        for a, b in zip(compiled, plain, strict=True):
            limit = 1e-5 if a.dtype == torch.float32 else 1e-2
            assert (a - b).float().norm() <= limit * b.float().norm()
    assert counters["stats"]["unique_graphs"] == before + 1


def test_the_gradient_of_the_output_layer_leaves_its_product_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(4096, 300, generator=generator).bfloat16()
    hidden = torch.randn(4096, 64, generator=generator).bfloat16()
    exact = gradient.double().t() @ hidden.double()
    product = scores._float32_product(gradient.cuda().t(), hidden.cuda()).cpu()
    assert product.dtype == torch.float32
    error = (product - exact).norm() / exact.norm()
    assert error < 1e-5, "bfloat16 rounds by 2e-3"
