"""Policy losses over episodes against the papers' objectives, in float64; gradients are autograd's.

Losses of a token by itself are compared with the formulas that the docs print: test_documented_formulas.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.losses import LossInput
from tests.fakes.losses import evaluate, random_input

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Token:
    """`pi` is log pi, with gradient; the rest are floats."""

    pi: Tensor
    prox: float
    mu: float
    reference: float
    advantage: float
    weight: float
    prepared: float


def tokens(given: LossInput, pi: Tensor) -> list[list[Token]]:
    """The trainable tokens, by episode."""
    episodes: dict[int, list[Token]] = {}
    for i in range(len(pi)):
        if given.trainable[i]:
            known = (given.prox, given.mu, given.reference, given.advantage, given.correction.weight)
            values = [float(x[i]) for x in known if x is not None]
            prepared = 0.0 if given.prepared is None else float(given.prepared[i])
            episodes.setdefault(int(given.row[i]), []).append(Token(pi[i], *values, prepared))
    return list(episodes.values())


def difference(
    name: str, given: LossInput, objective: Callable[[list[list[Token]]], Tensor], **options: float
) -> float:
    """Relative distance of value and gradient from the reference."""
    pi = given.logp.detach().clone().requires_grad_()
    wanted = objective(tokens(given, pi))
    (slope,) = torch.autograd.grad(wanted, pi)
    token, loss = evaluate(name, given, **options)
    assert float(slope.norm()) > 0.1 and token.clipped.any() == (name in CUTTING)
    value = fixed(wanted)
    apart = abs(fixed(token.value.sum()) - value) / abs(value)
    return max(apart, float((loss - slope).norm() / slope.norm()))


CUTTING = {"gspo", "gmpo", "topr"}


def ratio(t: Token, old: float) -> Tensor:
    return (t.pi - old).exp()


def fixed(x: Tensor) -> float:
    return float(x.detach())


# Objectives of whole episodes, as the papers write them; times the length they are sums over tokens.


def gspo(episode: list[Token]) -> Tensor:
    s = (torch.stack([t.pi - t.prox for t in episode]).sum() / len(episode)).exp()
    a = episode[0].advantage
    return -torch.minimum(s * a, s.clamp(0.9, 1.1) * a)


def gmpo(episode: list[Token]) -> Tensor:
    """sign(A)·(Π |min(u·A, clip(u)·A)|)^(1/T), A being the same for all tokens."""
    a = episode[0].advantage
    smaller = [
        torch.minimum(u * a, u.clamp(math.exp(-0.3), math.exp(0.3)) * a)
        for u in (ratio(t, t.prox) for t in episode)
    ]
    product = torch.stack([x.abs() for x in smaller]).prod()
    return -math.copysign(1.0, a) * product ** (1 / len(episode))


def topr(episode: list[Token]) -> Tensor:
    """Per token; the episode's ratio is a product."""
    a = episode[0].advantage
    product = math.prod(fixed(ratio(t, t.mu)) for t in episode)
    taper = 1.0 if a > 0 else min(max(product, 0.0), 1.0)
    return -taper * a * torch.stack([t.pi for t in episode]).sum() / len(episode)


def tba(episode: list[Token]) -> Tensor:
    gap = torch.stack([t.pi - t.reference for t in episode]).sum() + episode[0].prepared
    return gap**2 / len(episode)


BY_EPISODE: dict[str, tuple[Callable[[list[Token]], Tensor], dict[str, float]]] = {
    "gspo": (gspo, {"clip_low": 0.1, "clip_high": 0.1}),
    "gmpo": (gmpo, {"clip_low": 0.3, "clip_high": 0.3}),
    "topr": (topr, {}),
    "tba": (tba, {}),
}


@pytest.mark.parametrize("name", BY_EPISODE)
@pytest.mark.parametrize("seed", [2, 3])
def test_episode_losses(name: str, seed: int) -> None:
    """Sums over tokens are length times the papers' objective, value and gradient."""
    formula, options = BY_EPISODE[name]
    given = random_input(seed, behaviour=True, by_episode=True, prepared=[0.7])
    apart = difference(
        name, given, lambda all_: sum(some[0].weight * len(some) * formula(some) for some in all_), **options
    )
    assert apart < TOLERANCE


def geo_mean(episode: list[Token]) -> Tensor:
    """verl's: the geometric mean of ratios, times the mean of the advantages and the geometric mean of the
    weights, over the tokens of an episode."""
    a = sum(t.advantage for t in episode) / len(episode)
    size = len(episode)
    bounded = [(t.pi - t.prox).clamp(max=0.3) if a > 0 else (t.pi - t.prox).clamp(min=-0.3) for t in episode]
    weight = math.exp(sum(math.log(t.weight) for t in episode) / size)
    return -a * weight * (torch.stack(bounded).sum() / size).exp()


@pytest.mark.parametrize("own", ["nothing", "advantage", "weight"])
def test_gmpo_is_verls_where_the_tokens_of_an_episode_share_advantage_and_weight(own: str) -> None:
    """Where not, each token keeps its own, as the page says; the signs of the advantages are the same."""
    given = random_input(2, behaviour=True, by_episode=True)
    same = replace(given.correction, weight=torch.ones_like(given.correction.weight))
    given = replace(given, correction=same)
    steps = torch.linspace(0.2, 3.0, len(given.row), dtype=given.advantage.dtype)
    if own == "advantage":
        given = replace(given, advantage=given.advantage * steps)
    if own == "weight":
        given = replace(given, correction=replace(same, weight=steps))
    apart = difference(
        "gmpo",
        given,
        lambda all_: sum(len(some) * geo_mean(some) for some in all_),
        clip_low=0.3,
        clip_high=0.3,
    )
    assert (apart > 0.01, apart < TOLERANCE) == (own != "nothing", own == "nothing"), apart
