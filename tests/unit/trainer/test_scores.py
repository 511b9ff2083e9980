from __future__ import annotations

from math import inf, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.trainer import scores
from asyncrl.trainer.scores import Selected, score_chunks

TOKENS, HIDDEN, VOCABULARY = 7, 4, 11


def selected(labels: list[int], temperature: list[float]) -> Selected:
    """A row of tokens after one that nothing predicts."""
    position = np.arange(1, len(labels) + 1)
    ids = torch.tensor([[0, *labels]])
    return Selected.of(ids.numpy(), np.zeros_like(position), position, torch.tensor(temperature))


@pytest.mark.parametrize(
    ("logits", "temperature", "p", "entropy", "collision"),
    [
        ([0.0, 0.0, 0.0], 1.0, 1 / 3, log(3), 1 / 3),
        ([log(2), 0.0, 0.0], 1.0, 1 / 2, 1.5 * log(2), 3 / 8),
        ([log(2), 0.0, 0.0], 0.5, 4 / 6, log(6) - 4 / 6 * log(4), 18 / 36),
        ([5.0, -inf, 5.0], 1.0, 1 / 2, log(2), 1 / 2),
        ([1e4, 0.0, 0.0], 1.0, 1.0, 0.0, 1.0),
    ],
)
def test_by_hand(logits: list[float], temperature: float, p: float, entropy: float, collision: float) -> None:
    features = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    found = score_chunks(
        lambda part: part, features, selected([0], [temperature]), entropy_grad=True, collision=True
    )
    assert found.logp.item() == pytest.approx(log(p), abs=1e-7)
    assert found.entropy.item() == pytest.approx(entropy, abs=1e-7)
    assert found.collision is not None and found.collision.item() == pytest.approx(collision)
    (found.logp + found.entropy).sum().backward()
    assert features.grad is not None and features.grad.isfinite().all()


def random_case() -> tuple[Tensor, Tensor, Selected]:
    torch.manual_seed(0)
    features = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    head = (2 * torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,)).tolist()
    return features, head, selected(labels, [1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 1.3])


def reference(features: Tensor, head: Tensor, tokens: Selected) -> tuple[Tensor, Tensor, Tensor]:
    """Straight from the formulas, one word at a time."""
    z = features @ head.T / tokens.temperature[:, None]
    p = torch.exp(z) / torch.exp(z).sum(1, keepdim=True)
    labels = tokens.ids[0, 1:]
    logp = torch.stack([torch.log(p[i, label]) for i, label in enumerate(labels)])
    return logp, -(p * torch.log(p)).sum(1), (p * p).sum(1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 512])
def test_chunks_give_the_numbers_and_gradients_of_the_whole(monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr(scores, "CHUNK", size)
    features, head, tokens = random_case()
    found = score_chunks(lambda part: part @ head.T, features, tokens, entropy_grad=True, collision=True)
    wanted = reference(features, head, tokens)
    for value, exact in zip(found[:3], wanted, strict=True):
        assert value is not None and torch.allclose(value, exact, rtol=1e-12)
    weights = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    inputs = (features, head)
    gradients = torch.autograd.grad(weights @ found.logp - weights.flip(0) @ found.entropy, inputs)
    exact_ones = torch.autograd.grad(weights @ wanted[0] - weights.flip(0) @ wanted[1], inputs)
    for value, exact in zip(gradients, exact_ones, strict=True):
        assert float((value - exact).norm() / exact.norm()) < 1e-12


def test_only_what_is_asked_for() -> None:
    features, head, tokens = random_case()
    found = score_chunks(lambda part: part @ head.T, features, tokens, entropy_grad=False, collision=False)
    assert found.logp.requires_grad and not found.entropy.requires_grad
    assert found.collision is None and found.value is None
    with torch.no_grad():
        found = score_chunks(lambda part: part @ head.T, features, tokens, entropy_grad=True, collision=True)
    assert not any(part.requires_grad for part in found if part is not None)


def test_no_logits_are_kept_for_the_backward(monkeypatch: Any) -> None:
    monkeypatch.setattr(scores, "CHUNK", 2)
    features, head, tokens = random_case()
    asked: list[int] = []
    kept: list[int] = []

    def logits_of(part: Tensor) -> Tensor:
        asked.append(len(part))
        return part @ head.T

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = score_chunks(logits_of, features, tokens, entropy_grad=True, collision=True)
    assert asked == [2, 2, 2, 1]
    assert max(kept, default=0) < VOCABULARY
    found.logp.sum().backward()
    assert sorted(asked) == [1, 1, 2, 2, 2, 2, 2, 2]  # each once more, in the backward


def test_half_precision_is_widened_before_the_softmax() -> None:
    features, head, tokens = random_case()
    half = features.detach().bfloat16()
    found = score_chunks(
        lambda part: part @ head.T.bfloat16(), half, tokens, entropy_grad=False, collision=True
    )
    assert {part.dtype for part in found if part is not None} == {torch.float32}
