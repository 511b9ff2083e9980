from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.kl import ESTIMATORS, adapted, kl_tokens

# log pi - log ref → k1, abs, k2, k3
VALUES = [
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (math.log(2), math.log(2), math.log(2), math.log(2) ** 2 / 2, 0.5 - 1 + math.log(2)),
    (-math.log(2), -math.log(2), math.log(2), math.log(2) ** 2 / 2, 2 - 1 - math.log(2)),
    (-3.0, -3.0, 3.0, 4.5, 10.0),  # e³ - 4 = 16.1, over the cap
    (9.0, 9.0, 9.0, 40.5, 8 + math.exp(-9)),
    (1e4, 1e4, 1e4, 5e7, 10.0),
]

LOGITS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize(("distance", "k1", "absolute", "k2", "k3"), VALUES)
def test_values_by_hand(distance: float, k1: float, absolute: float, k2: float, k3: float) -> None:
    logp = torch.tensor([-1.0, -1.0])
    reference = torch.tensor([-1.0, -1.0 - distance], dtype=torch.float64)
    wanted = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3, "straight_through": k3}
    assert set(wanted) == set(ESTIMATORS)
    for name, value in wanted.items():
        kl_estimates = kl_tokens(logp.double(), reference, name)
        assert kl_estimates.tolist() == pytest.approx([0.0, value], abs=1e-12), name


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) from log-probs, over the whole vocabulary."""
    return (p.exp() * (p - q)).sum()


def expected(estimator: str) -> tuple[float, Tensor]:
    """Value and gradient in expectation over tokens sampled from pi, by going through all three of them. The
    sampling itself has no gradient, as in training."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    total = (logp.detach().exp() * kl_tokens(logp, REFERENCE, estimator)).sum()
    return total.item(), torch.autograd.grad(total, logits)[0]


def gradient(forward: bool) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    value = divergence(logp, REFERENCE) if forward else divergence(REFERENCE, logp)
    return torch.autograd.grad(value, logits)[0]


def test_expected_values() -> None:
    true = divergence(LOGITS.log_softmax(-1), REFERENCE).item()
    for name in ("k1", "k3", "straight_through"):
        assert expected(name)[0] == pytest.approx(true, rel=1e-12), name
    for name in ("k2", "abs"):
        assert abs(expected(name)[0] - true) > 0.05, name


def test_expected_gradients() -> None:
    """k2 and straight-through have that of the KL; k1 none at all; k3 that of the KL the other way round."""
    wanted = gradient(forward=True)
    other = gradient(forward=False)
    for name, vector in (("k2", wanted), ("straight_through", wanted), ("k1", 0 * wanted), ("k3", other)):
        assert expected(name)[1].tolist() == pytest.approx(vector.tolist(), rel=1e-10, abs=1e-12), name
    assert (expected("k3")[1] - wanted).norm() > 0.1 * wanted.norm()
    assert (expected("abs")[1] - wanted).norm() > 0.1 * wanted.norm()


def test_off_policy_the_ratio_restores_the_gradient() -> None:
    """Tokens of an older policy mu, weighted by pi/mu: the same expectation; unweighted: another."""
    mu = torch.tensor([-0.5, 0.9, 0.1], dtype=torch.float64).log_softmax(-1)
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    k2 = kl_tokens(logp, REFERENCE, "k2")
    rho = (logp - mu).exp().detach()
    weighted = torch.autograd.grad((mu.exp() * rho * k2).sum(), logits, retain_graph=True)[0]
    plain = torch.autograd.grad((mu.exp() * k2).sum(), logits)[0]
    assert weighted.tolist() == pytest.approx(gradient(forward=True).tolist(), rel=1e-10)
    assert (plain - weighted).norm() > 0.1 * weighted.norm()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_distances_give_finite_values_and_gradients(estimator: str) -> None:
    logp = torch.tensor([-1e4, -25.0, -10.0, 0.0, 0.0], requires_grad=True)
    value = kl_tokens(logp, torch.tensor([0.0, 0.0, 0.0, -25.0, -1e4]), estimator)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    assert torch.isfinite(value).all() and torch.isfinite(slope).all()


# coefficient, KL, target, episodes, horizon → coefficient
CONTROLLER = [
    (0.1, 0.05, 0.05, 100, 1000, 0.1),  # on target
    (0.1, 0.055, 0.05, 100, 1000, 0.1 * 1.01),  # 10% over, a tenth of the horizon
    (0.1, 0.5, 0.05, 100, 1000, 0.1 * 1.02),  # at most 20% over
    (0.1, 0.0, 0.05, 100, 1000, 0.1 * 0.98),
    (0.1, -0.3, 0.05, 100, 1000, 0.1 * 0.98),  # an estimate may be negative
    (0.1, 0.5, 0.0, 100, 1000, 0.1),  # fixed
    (0.1, math.nan, 0.05, 100, 1000, 0.1),
    (0.1, math.inf, 0.05, 100, 1000, 0.1),
    (0.1, 0.0, 0.05, 9000, 1000, 0.1 * 0.8),  # stays positive
    (0.0, 0.5, 0.05, 100, 1000, 0.0),
]


@pytest.mark.parametrize(("coef", "kl", "target", "episodes", "horizon", "wanted"), CONTROLLER)
def test_the_controller_by_hand(
    coef: float, kl: float, target: float, episodes: int, horizon: int, wanted: float
) -> None:
    assert adapted(coef, kl, target, episodes, horizon) == pytest.approx(wanted, rel=1e-12)


def test_the_controller_settles_where_the_kl_meets_its_target() -> None:
    """A KL that falls with the coefficient, 0.01/β: β ends at 0.2."""
    coef = 0.01
    for _ in range(2000):
        coef = adapted(coef, 0.01 / coef, 0.05, 64, 640)
    assert coef == pytest.approx(0.2, rel=1e-3)
