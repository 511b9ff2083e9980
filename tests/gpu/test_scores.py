"""On a GPU: log-probs, entropy and gradients of compiled scores are those of the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from asyncrl.trainer import scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_compiled_scores_are_the_plain_ones(entropy_grad: bool) -> None:
    def run(count: int, which: object) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(count)
        given = 3 * torch.randn(count, 32_000, generator=generator)
        logits = given.bfloat16().cuda().requires_grad_()
        labels = torch.arange(count, device="cuda")
        temperature = torch.linspace(0.5, 1.5, count, device="cuda")
        torch._dynamo.mark_static(logits, 1)
        found = which(logits, labels, temperature, entropy_grad, True)  # type: ignore[operator]
        found["logp"].sum().backward(retain_graph=entropy_grad)
        if entropy_grad:
            found["entropy"].sum().backward()
        assert logits.grad is not None
        return [*found.values(), logits.grad]

    def plain(*given: object) -> dict[str, torch.Tensor]:
        return scores.scores_of(*given)[0]  # type: ignore[arg-type]

    before = counters["stats"]["unique_graphs"]
    for count in (2048, 700, 3):
        for a, b in zip(run(count, scores._compiled_scores()), run(count, plain), strict=True):
            limit = 1e-5 if a.dtype == torch.float32 else 1e-2
            assert (a - b).float().norm() <= limit * b.float().norm()
    assert counters["stats"]["unique_graphs"] == before + 1
