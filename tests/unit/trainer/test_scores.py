from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, log
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Qwen2ForCausalLM

from asyncrl.trainer import scores
from asyncrl.trainer.footprint import LOGIT_BYTES
from asyncrl.trainer.scores import Selected, SplitModel, in_parts, score_chunks, widened
from asyncrl.trainer.world import SequenceRanks
from tests.fakes.training import VOCABULARY, save_tiny_qwen

TOKENS = 7
HIDDEN = 4
WORDS = 11
LONG = 600


def selected(labels: list[int], temperature: list[float]) -> Selected:
    """A row of tokens after one that nothing predicts."""
    position = np.arange(1, len(labels) + 1)
    ids = torch.tensor([[0, *labels]])
    return Selected.lay_out(ids.numpy(), np.zeros_like(position), position, torch.tensor(temperature))


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
    chunked_scores = score_chunks(
        lambda part: part,
        features,
        selected([0], [temperature]),
        entropy_grad=True,
        with_collision=True,
        with_variance=True,
    )
    assert chunked_scores.logp.item() == pytest.approx(log(p), abs=1e-7)
    assert chunked_scores.entropy.item() == pytest.approx(entropy, abs=1e-7)
    assert chunked_scores.collision is not None and chunked_scores.collision.item() == pytest.approx(
        collision
    )
    probabilities = (features.detach()[0] / temperature).softmax(0)
    surprisals = -probabilities.clamp(min=1e-300).log()
    variance = float((probabilities * (surprisals - entropy) ** 2).sum())
    assert chunked_scores.variance is not None and chunked_scores.variance.item() == pytest.approx(
        variance, abs=1e-12
    )
    (chunked_scores.logp + chunked_scores.entropy).sum().backward()
    assert features.grad is not None and features.grad.isfinite().all()


def random_case() -> tuple[Tensor, Tensor, Selected]:
    torch.manual_seed(0)
    features = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    head = (2 * torch.randn(WORDS, HIDDEN, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, WORDS, (TOKENS,)).tolist()
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
    monkeypatch.setattr(scores, "CHUNK_TOKENS", size)
    features, head, tokens = random_case()
    chunked_scores = score_chunks(
        lambda part: part @ head.T, features, tokens, entropy_grad=True, with_collision=True
    )
    wanted = reference(features, head, tokens)
    for value, exact in zip(chunked_scores[:3], wanted, strict=True):
        assert value is not None and torch.allclose(value, exact, rtol=1e-12)
    weights = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    inputs = (features, head)
    gradients = torch.autograd.grad(
        weights @ chunked_scores.logp - weights.flip(0) @ chunked_scores.entropy, inputs
    )
    exact_ones = torch.autograd.grad(weights @ wanted[0] - weights.flip(0) @ wanted[1], inputs)
    for value, exact in zip(gradients, exact_ones, strict=True):
        assert float((value - exact).norm() / exact.norm()) < 1e-12


def test_only_what_is_asked_for() -> None:
    features, head, tokens = random_case()
    chunked_scores = score_chunks(
        lambda part: part @ head.T, features, tokens, entropy_grad=False, with_collision=False
    )
    assert chunked_scores.logp.requires_grad and not chunked_scores.entropy.requires_grad
    assert chunked_scores.collision is None and chunked_scores.variance is None
    with torch.no_grad():
        chunked_scores = score_chunks(
            lambda part: part @ head.T, features, tokens, entropy_grad=True, with_collision=True
        )
    assert not any(part.requires_grad for part in chunked_scores if part is not None)


def test_no_logits_are_kept_for_the_backward(monkeypatch: Any) -> None:
    monkeypatch.setattr(scores, "CHUNK_TOKENS", 2)
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
        chunked_scores = score_chunks(logits_of, features, tokens, entropy_grad=True, with_collision=True)
    assert asked == [2, 2, 2, 1]
    assert max(kept, default=0) < WORDS
    chunked_scores.logp.sum().backward()
    assert sorted(asked) == [1, 1, 2, 2, 2, 2, 2, 2]  # each once more, in the backward


def test_half_precision_is_widened_before_the_softmax() -> None:
    features, head, tokens = random_case()
    half = features.detach().bfloat16()
    chunked_scores = score_chunks(
        lambda part: part @ head.T.bfloat16(), half, tokens, entropy_grad=False, with_collision=True
    )
    assert {part.dtype for part in chunked_scores if part is not None} == {torch.float32}


class OnGpu(Tensor):
    """Features that say they lie on one."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By what is fast: the graphs are those of a GPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    scores._compiled_scores.cache_clear()
    yield
    scores._compiled_scores.cache_clear()


def test_compiled_scores_are_those_of_the_others(compiles: None) -> None:
    features, head, tokens = random_case()
    weights = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    found = []
    for given in (features, features.as_subclass(OnGpu)):
        of = score_chunks(lambda part: part @ head.T, given, tokens, entropy_grad=True, with_collision=True)
        total = weights @ of.logp - weights.flip(0) @ of.entropy
        found.append([*of[:3], *torch.autograd.grad(total, (features, head))])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))
    assert scores._compiled_scores.cache_info().misses == 1


@pytest.mark.parametrize(
    ("dtype", "wide", "sizes"),
    [(torch.bfloat16, False, [8, 4]), (torch.bfloat16, True, [4, 4, 4]), (torch.float32, False, [4, 4, 4])],
)
def test_compiled_chunks_take_the_memory_that_is_counted(
    dtype: torch.dtype, wide: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two numbers a logit, of its type: 2 * 2 * 8 = 2 * 4 * 4 = 16 * 2 bytes (trainer/footprint.py)."""
    seen: list[Tensor] = []

    def logits_of(part: Tensor) -> Tensor:
        seen.append(widened(part) if wide else part)
        return seen[-1]

    monkeypatch.setattr(scores, "CHUNK_TOKENS", 2)
    monkeypatch.setattr(scores, "_compiled_scores", lambda: scores._chunk_scores)
    tokens = selected([0] * 12, [1.0] * 12)
    features = torch.zeros(12, 3, dtype=dtype).as_subclass(OnGpu)
    with torch.no_grad():
        score_chunks(logits_of, features, tokens, entropy_grad=False, with_collision=False, wide_logits=wide)
    assert [len(part) for part in seen] == sizes
    assert all(2 * part.element_size() * len(part) <= LOGIT_BYTES * 2 for part in seen)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("qwen")
    return Qwen2ForCausalLM.from_pretrained(save_tiny_qwen(path, tied=False), dtype=torch.bfloat16).eval()


def long_row() -> Selected:
    ids = torch.randint(0, VOCABULARY, (1, LONG + 1), generator=torch.Generator().manual_seed(0))
    position = np.arange(1, LONG + 1)
    return Selected.lay_out(ids.numpy(), np.zeros_like(position), position, torch.ones(LONG))


def head_gradient(logits_of: Any, features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of Σ a·log p in the head, float64, with a normal; and in the features."""
    chunked_scores = score_chunks(logits_of, features, long_row(), entropy_grad=False, with_collision=False)
    a = torch.randn(LONG, generator=torch.Generator().manual_seed(1))
    dw, dx = torch.autograd.grad((chunked_scores.logp * a).sum(), (weight, features))
    return dw.double(), dx.double()


def relative(computed: Tensor, wanted: Tensor) -> float:
    return float((computed - wanted).norm() / wanted.norm())


def test_the_heads_gradient_is_summed_in_float32(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "CHUNK_TOKENS", 4)
    head = lm.lm_head.weight
    features, logits_of = SplitModel(lm, fp32_head=False).split(long_row())
    features = features.detach().requires_grad_()
    dw, dx = head_gradient(logits_of, features, head)
    wide = head.detach().double().requires_grad_()
    hidden = features.detach().double().requires_grad_()
    exact_w, exact_x = head_gradient(lambda part: part @ wide.t(), hidden, wide)
    naive_w, naive_x = head_gradient(lambda part: part @ head.t(), features, head)
    # Rounding each chunk's product, and once the sum, to bfloat16 costs about 2.5e-3 in all.
    assert relative(dw, exact_w) < 3.5e-3 < 2 * 3.5e-3 < relative(naive_w, exact_w)
    assert torch.equal(dx, naive_x) and relative(dx, exact_x) < 1e-2


def test_a_head_that_does_not_train_gets_no_gradient(lm: Any) -> None:
    head = lm.lm_head.weight
    head.requires_grad_(False)
    try:
        features, logits_of = SplitModel(lm, fp32_head=False).split(long_row())
        chunked_scores = score_chunks(
            logits_of, features, long_row(), entropy_grad=False, with_collision=False
        )
        chunked_scores.logp.sum().backward()
        assert head.grad is None
    finally:
        head.requires_grad_(True)
        lm.zero_grad()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_hold_what_they_predict_and_all_are_given_all(count: int) -> None:
    """13 tokens; of the first row only the last is selected, so the first of five parts predicts nothing."""
    rows = [np.arange(6), np.arange(10, 17)]
    row = np.array([1, 0, 1, 1, 1])
    position = np.array([6, 5, 1, 3, 2])
    routes = [np.stack([ids, ids], axis=1).astype(np.int32) for ids in (rows[0], rows[1][:-1])]
    tokens = Selected.lay_out(rows, row, position, torch.linspace(0.5, 1.5, 5), "packed", routes)
    assert tokens.routes is not None and tokens.positions is not None
    parts = list[Selected]()
    pieces = list[Tensor]()

    def run(part: Selected) -> tuple[Tensor, None]:
        parts.append(part)
        return part.labels, None

    def exchange(ranks: SequenceRanks, mine: Tensor, most: int) -> Tensor:
        """What each rank has, once all of them have run."""
        pieces.append(pad(mine, (0, most - len(mine))))
        return torch.cat((pieces * count)[:count])

    with mock.patch.object(SequenceRanks, "gather", exchange):
        for index in range(count):
            chunked_scores = in_parts(run, tokens, SequenceRanks(mock.Mock(), index, count))
    assert (
        chunked_scores[1] is None
        and chunked_scores[0] is not None
        and torch.equal(chunked_scores[0], tokens.labels)
    )
    for name in ("ids", "positions"):
        together = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(together[:, :13], getattr(tokens, name)) and not together[:, 13:].any()
    laid = torch.cat([part.routes for part in parts if part.routes is not None])
    assert torch.equal(laid[:13], tokens.routes) and (laid[13:] == -1).all()
    assert len({part.ids.shape for part in parts}) == 1
    for part in parts:
        assert torch.equal(part.ids[0, part.predictor_index] + 1, part.labels)  # ids of a row count up
    assert count < 5 or len(parts[0].labels) == 0


def test_padded_rows_are_run_whole_by_each() -> None:
    tokens = Selected.lay_out([np.arange(4)], np.array([0]), np.array([2]), torch.ones(1))
    assert in_parts(lambda part: (part.ids,), tokens, SequenceRanks(mock.Mock(), 1, 2))[0] is tokens.ids
