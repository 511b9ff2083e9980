from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from asyncrl.trainer import scores
from asyncrl.trainer.scores import Selected, SplitModel, score_chunks
from tests.fakes.training import VOCABULARY, save_tiny_qwen

TOKENS = 600


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("qwen")
    return Qwen2ForCausalLM.from_pretrained(save_tiny_qwen(path, tied=False), dtype=torch.bfloat16).eval()


def tokens() -> Selected:
    ids = torch.randint(0, VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    position = np.arange(1, TOKENS + 1)
    return Selected.of(ids.numpy(), np.zeros_like(position), position, torch.ones(TOKENS))


def head_gradient(logits_of: Any, features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of Σ a·log p in the head, float64, with a normal; and in the features."""
    found = score_chunks(logits_of, features, tokens(), entropy_grad=False, collision=False)
    a = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    dw, dx = torch.autograd.grad((found.logp * a).sum(), (weight, features))
    return dw.double(), dx.double()


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_the_heads_gradient_is_summed_in_float32(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "CHUNK", 4)
    head = lm.lm_head.weight
    _, features, logits_of = SplitModel(lm, fp32_head=False).split(tokens())
    features = features.detach().requires_grad_()
    dw, dx = head_gradient(logits_of, features, head)
    wide, hidden = head.detach().double().requires_grad_(), features.detach().double().requires_grad_()
    exact_w, exact_x = head_gradient(lambda part: part @ wide.t(), hidden, wide)
    naive_w, naive_x = head_gradient(lambda part: part @ head.t(), features, head)
    # Rounding each chunk's product, and once the sum, to bfloat16 costs about 2.5e-3 in all.
    assert relative(dw, exact_w) < 3.5e-3 < 2 * 3.5e-3 < relative(naive_w, exact_w)
    assert torch.equal(dx, naive_x) and relative(dx, exact_x) < 1e-2


def test_a_head_that_does_not_train_gets_no_gradient(lm: Any) -> None:
    head = lm.lm_head.weight
    head.requires_grad_(False)
    try:
        _, features, logits_of = SplitModel(lm, fp32_head=False).split(tokens())
        found = score_chunks(logits_of, features, tokens(), entropy_grad=False, collision=False)
        found.logp.sum().backward()
        assert head.grad is None
    finally:
        head.requires_grad_(True)
        lm.zero_grad()
