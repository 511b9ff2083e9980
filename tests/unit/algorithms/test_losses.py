from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.correction import CorrectionInput, corrections
from asyncrl.algorithms.losses import LossInput, TokenLoss, losses, select_loss, token_loss
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import ConfigError


def evaluate(name: str, pi: float, prox: float, mu: float, advantage: float) -> tuple[float, float, bool]:
    """Value, derivative by log pi, clipped; arguments are probabilities."""
    config = AlgorithmConfig()
    logp = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    old, behaviour = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (prox, mu))
    a = torch.tensor([advantage], dtype=torch.float64)
    correction = corrections.get("mask_truncate")(CorrectionInput(old - behaviour, a, config))
    row = torch.zeros(1, dtype=torch.int64)
    result = losses.get(name).of(LossInput(logp, old, behaviour, a, row, correction, config))
    result.value.sum().backward()
    assert logp.grad is not None
    return result.value.item(), logp.grad.item(), bool(result.clipped.item())


# pi = prox, mu, A → derivative -min(rho, C)·A inside the band
@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "derivative"),
    [
        (0.4, 0.4, 1.0, -1.0),
        (0.6, 0.3, 0.5, -1.0),
        (0.6, 0.2, -0.5, 1.0),  # rho 3 is cut to 2 for a negative advantage
        (0.1, 0.3, 1.0, 0.0),  # rho 1/3: masked
        (0.9, 0.1, 1.0, 0.0),  # rho 9: masked
        (0.4, 0.4, 0.0, 0.0),
    ],
)
def test_reinforce_by_hand(pi: float, mu: float, advantage: float, derivative: float) -> None:
    value, gradient, clipped = evaluate("reinforce", pi, pi, mu, advantage)
    assert gradient == pytest.approx(derivative) and not clipped
    assert value == pytest.approx(derivative * math.log(pi))


# pi, prox, mu, A → value, derivative, clipped; clip [0.8, 1.28]
@pytest.mark.parametrize(
    ("pi", "prox", "mu", "advantage", "value", "derivative", "clipped"),
    [
        (0.5, 0.5, 0.5, 1.0, -1.0, -1.0, False),
        (0.6, 0.5, 0.5, 1.0, -1.2, -1.2, False),
        (0.7, 0.5, 0.5, 1.0, -1.28, 0.0, True),  # too far up already
        (0.3, 0.5, 0.5, 1.0, -0.6, -0.6, False),  # down, and A says up: not clipped
        (0.3, 0.5, 0.5, -1.0, 0.8, 0.0, True),
        (0.7, 0.5, 0.5, -1.0, 1.4, 1.4, False),
        (0.6, 0.5, 0.25, 1.0, -2.4, -2.4, False),  # behaviour weight prox/mu = 2
        (0.6, 0.5, 0.05, 1.0, 0.0, 0.0, False),  # prox/mu = 10: masked
    ],
)
def test_decoupled_ppo_by_hand(
    pi: float, prox: float, mu: float, advantage: float, value: float, derivative: float, clipped: bool
) -> None:
    found = evaluate("decoupled_ppo", pi, prox, mu, advantage)
    assert found[:2] == (pytest.approx(value), pytest.approx(derivative))
    if mu >= 0.25:
        assert found[2] == clipped


def test_at_the_start_of_a_batch_both_losses_have_the_same_gradient() -> None:
    """pi = prox: u = 1, nothing to clip."""
    for mu, advantage in [(0.2, 1.0), (0.3, -1.0), (0.9, 0.5)]:
        one, two = (evaluate(name, 0.5, 0.5, mu, advantage)[1] for name in ("reinforce", "decoupled_ppo"))
        assert one == pytest.approx(two)


@pytest.mark.parametrize("name", ["reinforce", "decoupled_ppo"])
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    for pi, prox, mu in [(1e-30, 1.0, 1e-38), (1.0, 1e-38, 1.0), (1.0, 1.0, 1e-38)]:
        assert all(math.isfinite(x) for x in evaluate(name, pi, prox, mu, -1.0)[:2])


def test_a_loss_that_contains_the_behaviour_ratio_refuses_a_weight() -> None:
    @token_loss("two_policy_test_loss", ratio="mu")
    def two_policy(given: LossInput) -> TokenLoss:
        raise NotImplementedError

    with pytest.raises(ConfigError, match="twice"):
        select_loss(AlgorithmConfig(loss="two_policy_test_loss"))
    assert select_loss(AlgorithmConfig(loss="two_policy_test_loss", correction="none")).ratio == "mu"
