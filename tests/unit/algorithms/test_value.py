from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.losses import value_loss
from asyncrl.algorithms.normalise import Moments, explained_variance

NUMBER = st.floats(-5, 5)
TRIPLES = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=10)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "returns", "clip", "loss", "clipped", "gradient"),
    [
        (1.0, 0.0, 3.0, 0.0, 2.0, False, -2.0),  # plain
        (0.1, 0.0, 1.0, 0.2, 0.405, False, -0.9),  # inside the range
        (0.5, 0.0, 1.0, 0.2, 0.32, True, 0.0),  # moved towards G, further than allowed: no gradient
        (-0.5, 0.0, 1.0, 0.2, 1.125, False, -1.5),  # moved away: the plain term is larger
        (0.5, 0.0, 0.0, 0.2, 0.125, False, 0.5),
        (-0.5, 0.0, -1.0, 0.2, 0.32, True, 0.0),
    ],
)
def test_by_hand(
    value: float, old: float, returns: float, clip: float, loss: float, clipped: bool, gradient: float
) -> None:
    v = tensor([value]).requires_grad_()
    computed_loss, cut = value_loss(v, tensor([old]), tensor([returns]), clip)
    computed_loss.sum().backward()
    assert computed_loss.item() == pytest.approx(loss, rel=1e-12)
    assert cut.tolist() == [clipped]
    assert v.grad is not None and v.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-12)


def reference(v: torch.Tensor, old: float, returns: float, clip: float) -> torch.Tensor:
    low = old - clip
    high = old + clip
    held = v if low <= v.item() <= high else tensor(low if v.item() < low else high)
    free_loss = (v - returns) ** 2 / 2
    held_loss = (held - returns) ** 2 / 2
    return held_loss if held_loss.item() > free_loss.item() else free_loss


@pytest.mark.parametrize("clip", [0.05, 0.5, 2.0])
def test_values_and_gradients_of_a_plain_reference(clip: float) -> None:
    value, old, returns = torch.randn(3, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v = value.clone().requires_grad_()
    w = value.clone().requires_grad_()
    loss, clipped = value_loss(v, old, returns, clip)
    wanted = torch.stack([reference(w[i], old[i].item(), returns[i].item(), clip) for i in range(100)])
    gradients = torch.autograd.grad(loss.sum(), v)[0], torch.autograd.grad(wanted.sum(), w)[0]
    assert loss.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    assert gradients[0].tolist() == pytest.approx(gradients[1].tolist(), rel=1e-12)
    assert clipped.tolist() == (wanted > (value - returns) ** 2 / 2 + 1e-12).tolist()
    assert 0 < clipped.sum() < 100


def fit(values: np.ndarray, returns: np.ndarray, cut: int = 0) -> float | None:
    """Explained variance of two parts of a batch."""
    first, second = np.split(returns, [cut])
    gaps = np.split(returns - values, [cut])
    return explained_variance(
        Moments.of(first) + Moments.of(second), Moments.of(gaps[0]) + Moments.of(gaps[1])
    )


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, 2.0, 6.0], 1.0),
        ([2.0, 3.0, 7.0], 1.0),  # a constant error is no unexplained variance
        ([3.0, 3.0, 3.0], 0.0),
        ([0.0, 0.0, 0.0], 0.0),
        ([-1.0, -2.0, -6.0], -3.0),  # errors are twice the returns
        ([1.0, 2.0, 0.0], 1 - 24 / 14),  # errors 0, 0, 6 around 2; returns around 3
    ],
)
def test_explained_variance_by_hand(values: list[float], wanted: float) -> None:
    fitted = fit(np.array(values), np.array([1.0, 2.0, 6.0]))
    assert fitted == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("returns", [[], [0.0, 0.0], [0.1] * 7, [4.0]])
def test_where_nothing_varies_nothing_is_explained(returns: list[float]) -> None:
    assert fit(np.ones(len(returns)), np.array(returns)) is None


@settings(max_examples=40, deadline=None)
@given(TRIPLES, st.integers(0, 10))
def test_it_is_that_of_the_whole_batch(triples: list[tuple[float, float, float]], cut: int) -> None:
    values, returns, _ = np.array(triples).T
    found = fit(values, returns, cut)
    if found is not None and returns.var() > 1e-3:
        assert found == pytest.approx(1 - (returns - values).var() / returns.var(), rel=1e-6, abs=1e-6)
    else:
        assert returns.var() < 1e-2
