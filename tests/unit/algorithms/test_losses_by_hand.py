"""Every policy loss against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.fakes.losses import evaluate, loss_input

LOG2 = math.log(2.0)
DECOUPLED: dict[str, float] = {"clip_high": 0.28, "dual_clip": 0}

# loss, options, pi, old (prox or mu, as the loss compares), A → value or None, derivative by log pi, clipped
TOKENS: list[tuple[str, dict[str, float], float, float, float, float | None, float, bool]] = [
    ("reinforce", {}, 0.5, 0.5, 2.0, 2 * LOG2, -2.0, False),
    ("reinforce", {}, 0.5, 0.1, -1.0, -LOG2, 1.0, False),
    ("sft", {}, 0.5, 0.1, -3.0, LOG2, -1.0, False),  # whatever mu and A are
    ("ppo", {}, 0.5, 0.5, 1.0, -1.0, -1.0, False),
    ("ppo", {}, 0.7, 0.5, 1.0, -1.2, 0.0, True),  # u = 1.4: too far up already
    ("ppo", {"clip_high": 0.5}, 0.7, 0.5, 1.0, -1.4, -1.4, False),
    ("ppo", {}, 0.3, 0.5, 1.0, -0.6, -0.6, False),  # down, and A says up: free
    ("ppo", {}, 0.3, 0.5, -1.0, 0.8, 0.0, True),
    ("ppo", {}, 0.9, 0.5, -1.0, 1.8, 1.8, False),
    ("ppo", {}, 0.8, 0.2, -2.0, 6.0, 0.0, False),  # u = 4: the dual clip, reported apart
    ("ppo", {"dual_clip": 5}, 0.8, 0.2, -2.0, 8.0, 8.0, False),
    ("ppo", DECOUPLED, 0.6, 0.5, 1.0, -1.2, -1.2, False),
    ("ppo", DECOUPLED, 0.7, 0.5, 1.0, -1.28, 0.0, True),
    ("ppo", DECOUPLED, 0.8, 0.2, -2.0, 8.0, 8.0, False),  # no dual clip
    ("cispo", {}, 0.7, 0.5, 1.0, None, -1.28, True),  # bounded, but the gradient stays
    ("cispo", {}, 0.3, 0.5, 1.0, None, -0.6, False),  # no lower bound
    ("cispo", {"clip_low": 0.2}, 0.3, 0.5, -1.0, None, 0.8, True),
    ("cispo_scalerl", {}, 0.6, 0.3, 1.0, None, -2.0, False),
    ("cispo_scalerl", {}, 0.6, 0.1, 1.0, None, -5.0, True),
    ("cispo_scalerl", {"cap": 8}, 0.6, 0.1, -1.0, None, 6.0, False),
    ("cispo_scalerl", {"cap": 2}, 0.6, 0.1, 0.5, None, -1.0, True),
    ("cispo_scalerl", {"cap": 2}, 0.1, 0.2, -1.0, None, 0.5, False),
    ("sapo", {}, 0.5, 0.5, 1.0, -2.0, -1.0, False),  # 4·sigmoid(0), 4·sigmoid'(0)
    ("sapo", {}, 0.5, 0.25, 1.0, -2.9242343145, -1.5728954660, False),  # 4·0.73106, 4·0.19661·2
    ("sapo", {}, 0.5, 0.25, -1.0, 2.8219996159, 1.5362195834, False),  # (4/1.05)·0.74077, 4·0.19203·2
    ("dppo_tv", {}, 0.55, 0.4, 1.0, None, -1.375, False),
    ("dppo_tv", {}, 0.7, 0.4, 1.0, 0.0, 0.0, True),  # 0.3 up
    ("dppo_tv", {}, 0.7, 0.4, -1.0, None, 1.75, False),  # up, and A says down
    ("dppo_tv", {}, 0.1, 0.4, -1.0, 0.0, 0.0, True),
    ("dppo_tv", {"delta_low": 0.4}, 0.1, 0.4, -1.0, None, 0.25, False),
    ("dppo_tv", {}, 0.003, 0.0001, 1.0, None, -20.0, False),  # a rare token may grow, its weight is capped
    ("dppo_kl", {}, 0.6, 0.5, 1.0, None, -1.2, False),  # ½·log(0.25/0.24) = 0.0204
    ("dppo_kl", {}, 0.7, 0.5, 1.0, 0.0, 0.0, True),  # ½·log(0.25/0.21) = 0.0872
    ("dppo_kl", {}, 0.7, 0.5, -1.0, None, 1.4, False),
    ("dppo_kl", {}, 0.3, 0.5, -1.0, 0.0, 0.0, True),
    ("dppo_kl", {"delta_high": 0.12}, 0.9, 0.75, 1.0, None, -1.2, False),  # 0.0924; KL of pi and mu: 0.0727
    ("dppo_kl", {"delta_high": 0.08}, 0.9, 0.75, 1.0, 0.0, 0.0, True),
    ("dppo_kl", {"delta_low": 0.09}, 0.3, 0.5, -1.0, None, 0.6, False),
    ("dppo_kl", {}, 1.0, 0.5, 1.0, 0.0, 0.0, True),  # a certain token: the divergence is large, not NaN
    ("dro", {"beta": 0.1}, 0.5, 0.25, 1.0, LOG2 + 0.05 * LOG2**2, -1 + 0.1 * LOG2, False),
    ("dro", {"beta": 0.1}, 0.25, 0.5, -1.0, -2 * LOG2 + 0.05 * LOG2**2, 1 - 0.1 * LOG2, False),
]


@pytest.mark.parametrize("case", TOKENS)
def test_a_token(case: Any) -> None:
    """Without a value in the table: derivative · log pi, as the ratio carries no gradient."""
    name, options, pi, old, advantage, value, derivative, clipped = case
    given = loss_input(
        [math.log(pi)], prox=[math.log(old)], mu=[math.log(old)], advantage=[advantage], weight=[1.0]
    )
    token, gradient = evaluate(name, given, **options)
    expected = derivative * math.log(pi) if value is None else value
    assert token.value.item() == pytest.approx(expected, rel=1e-9)
    assert gradient.item() == pytest.approx(derivative, rel=1e-9)
    assert token.clipped.item() == clipped


def test_the_dual_clip_is_reported_apart() -> None:
    given = loss_input([math.log(0.8)] * 2, prox=[math.log(0.2)] * 2, advantage=[-1.0, 1.0])
    token, _ = evaluate("ppo", given)
    assert token.clipped_lower is not None
    assert token.clipped_lower.tolist() == [True, False] and token.clipped.tolist() == [False, True]


# loss, options, log pi - log old of one episode, trainable, A
# → value of each trainable token, derivatives, clipped
E = math.exp
EPISODES: list[
    tuple[str, dict[str, float], list[float], list[bool], float, float, list[float], list[bool]]
] = [
    ("gspo", {}, [0.1, 0.3], [True, True], 1.0, -1.0004, [0.0, 0.0], [True, True]),
    ("gspo", {}, [0.1, 0.3], [True, True], -1.0, E(0.2), [E(0.2)] * 2, [False, False]),
    ("gspo", {"clip_high": 0.3}, [0.1, 0.3], [True, True], 1.0, -E(0.2), [-E(0.2)] * 2, [False, False]),
    ("gspo", {}, [0.0, 0.1, 0.3], [False, True, True], -1.0, E(0.2), [0.0, E(0.2), E(0.2)], [False] * 3),
    ("gspo", {}, [-0.1, -0.3], [True, True], -1.0, 0.9997, [0.0, 0.0], [True, True]),
    ("gmpo", {}, [0.1, 0.7], [True, True], 1.0, -E(0.25), [-E(0.25), 0.0], [False, True]),  # (0.1 + 0.4)/2
    ("gmpo", {}, [0.1, -0.7], [True, True], -1.0, E(-0.15), [E(-0.15), 0.0], [False, True]),
    ("gmpo", {}, [0.1, -0.7], [True, True], 1.0, -E(-0.3), [-E(-0.3)] * 2, [False, False]),  # one-sided
    ("gmpo", {"clip_low": 0.2}, [0.1, 0.7], [True, True], 1.0, -E(0.25), [-E(0.25), 0.0], [False, True]),
    ("gmpo", {"clip_high": 0.2}, [0.1, -0.7], [True, True], -1.0, E(-0.15), [E(-0.15), 0.0], [False, True]),
    (
        "gmpo",
        {},
        [0.0, 0.1, 0.7],
        [False, True, True],
        1.0,
        -E(0.25),
        [0.0, -E(0.25), 0.0],
        [False, False, True],
    ),
]


@pytest.mark.parametrize("case", EPISODES)
def test_an_episode(case: Any) -> None:
    """Ratio and mean length are of the trainable tokens."""
    name, options, ratios, trainable, advantage, value, derivatives, clipped = case
    logp = [-1.0] * len(ratios)
    given = loss_input(
        logp, prox=[-1.0 - r for r in ratios], advantage=[advantage] * len(ratios), trainable=trainable
    )
    token, gradient = evaluate(name, given, **options)
    assert token.value.tolist() == pytest.approx([value if kept else 0.0 for kept in trainable])
    assert gradient.tolist() == pytest.approx(derivatives)
    assert (token.clipped & given.trainable).tolist() == clipped


# pi/mu of the tokens of an episode, A → weight
@pytest.mark.parametrize(
    ("ratios", "advantage", "weight"),
    [([0.5, 0.8], -1.0, 0.4), ([0.5, 0.8], 1.0, 1.0), ([3.0, 2.0], -1.0, 1.0), ([3.0, 0.1], -1.0, 0.3)],
)
def test_topr_tapers_failures_by_the_ratio_of_the_episode(
    ratios: list[float], advantage: float, weight: float
) -> None:
    logp = [-2.0] * 3
    mu = [-2.0, *(-2.0 - math.log(r) for r in ratios)]  # the first token is stale
    given = loss_input(logp, mu=mu, advantage=[advantage] * 3, trainable=[False, True, True])
    token, gradient = evaluate("topr", given)
    assert gradient.tolist() == pytest.approx([0.0, -advantage * weight, -advantage * weight])
    assert token.clipped.tolist()[1:] == [weight < 1] * 2


def test_two_episodes_do_not_mix() -> None:
    given = loss_input([-1.0] * 3, prox=[-1.2, -1.4, -2.0], row=[0, 0, 1], advantage=[-1.0] * 3)
    _, gradient = evaluate("gspo", given)
    assert gradient.tolist() == pytest.approx([E(0.3), E(0.3), E(1.0)])


# loss, options, prepared, pi/old, A → value, derivative, clipped
CHOSEN: list[tuple[str, dict[str, float], float, float, float, float, float, bool]] = [
    ("clip_cov", {}, 1.0, 1.1, 1.0, 0.0, 0.0, True),
    ("clip_cov", {}, 0.0, 1.1, 1.0, -1.1, -1.1, False),
    ("clip_cov", {}, 0.0, 1.4, 1.0, -1.2, 0.0, True),
    ("kl_cov", {}, 0.0, 1.4, 1.0, -1.4, -1.4, False),
    ("kl_cov", {}, 1.0, 2.0, 1.0, -2 + 0.1 * LOG2, -1.9, True),
    ("kl_cov", {"coef": 1}, 1.0, 0.5, 1.0, -0.5 + LOG2, -1.5, True),
    ("m2po", {}, 1.0, 1.4, 1.0, -1.4, -1.4, False),
    ("m2po", {}, 1.0, 9.0, -2.0, 18.0, 18.0, False),  # unclipped
    ("m2po", {}, 0.0, 1.4, 1.0, 0.0, 0.0, True),
]


@pytest.mark.parametrize("case", CHOSEN)
def test_a_token_in_view_of_the_batch(case: Any) -> None:
    name, options, prepared, ratio, advantage, value, derivative, clipped = case
    old = [-3.0 - math.log(ratio)]
    given = loss_input([-3.0], prox=old, mu=old, advantage=[advantage], prepared=[prepared])
    token, gradient = evaluate(name, given, **options)
    assert (token.value.item(), gradient.item()) == (pytest.approx(value), pytest.approx(derivative))
    assert token.clipped.item() == clipped


def test_trajectory_balance_by_hand() -> None:
    """δ = (−1−2) − (−2−3) + 0.5 = 2.5 over two trainable tokens; a stale third is no part of it."""
    given = loss_input(
        [-5.0, -1.0, -2.0], reference=[-7.0, -2.0, -3.0], prepared=[0.5] * 3, trainable=[False, True, True]
    )
    token, gradient = evaluate("tba", given)
    assert token.value.tolist() == pytest.approx([0.0, 3.125, 3.125])  # δ² in all
    assert gradient.tolist() == pytest.approx([0.0, 5.0, 5.0])  # 2δ each


@pytest.mark.parametrize(
    ("name", "ratio", "value"), [("ppo", 1.4, -1.28), ("kl_cov", 2.0, -2 + 0.1 * LOG2)], ids=["ppo", "kl_cov"]
)
def test_a_weight_multiplies_after_the_clip(name: str, ratio: float, value: float) -> None:
    given = loss_input([-1.0], prox=[-1.0 - math.log(ratio)], weight=[2.5], prepared=[1.0])
    options = DECOUPLED if name == "ppo" else {}
    assert evaluate(name, given, **options)[0].value.item() == pytest.approx(2.5 * value)


def test_at_the_start_of_a_batch_losses_that_clip_are_reinforce() -> None:
    """pi = prox: u = 1, whatever mu is. That is why the configuration refuses them for a single step."""
    given = loss_input(
        [-1.0, -2.0, -0.5],
        mu=[-1.5, -1.0, -0.4],
        advantage=[1.0, -2.0, 0.5],
        weight=[1.6, 0.4, 0.0],
        prepared=[1.0, 0.0, 1.0],
    )
    _, expected = evaluate("reinforce", given)
    for name in ("ppo", "cispo", "sapo", "gspo", "gmpo", "kl_cov"):
        assert torch.allclose(evaluate(name, given)[1], expected, rtol=1e-12), name
    assert not torch.allclose(evaluate("clip_cov", given)[1], expected)
