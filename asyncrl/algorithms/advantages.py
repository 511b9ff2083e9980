"""Advantages: how much better an episode, a turn or a token did than expected.

Each is a function of one `CreditInput` and gives one number for all model tokens of the episode, or one
per model token. What it needs beside that is declared where it is registered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from asyncrl.registry import Registry, bind
from asyncrl.types import Member

EPSILON = 1e-6
Scale = Literal["none", "batch_std", "nonzero", "whiten", "whiten_running"]


@dataclass(frozen=True)
class Trace:
    """One episode of a whole batch, arrays per model token [T]. `logp`: log pi at the start of the batch;
    `collision`: Σ π² over the vocabulary there."""

    group: str
    own: Member
    rewards: np.ndarray
    logp: np.ndarray
    collision: np.ndarray


@dataclass(frozen=True)
class CreditInput:
    """One episode and the siblings that its baseline is made of.

    `siblings` contains `own` (by number) unless it landed after the deadline of a partial group. Arrays are
    per model token, [T]: `rewards` what fell on the token (a turn's reward on its last token), `turn` its
    turn, `values` the critic's V, where there is one. `greedy`: reward of the sample's greedy episode.
    `traces`: the group's episodes, own included, for advantages registered with `whole_group`.
    """

    own: Member
    siblings: Sequence[Member]
    rewards: np.ndarray
    turn: np.ndarray
    values: np.ndarray | None = None
    greedy: float | None = None
    traces: Sequence[Trace] = ()

    @property
    def self_inside(self) -> bool:
        return any(member.number == self.own.number for member in self.siblings)


Credit = float | np.ndarray


@dataclass(frozen=True)
class Advantage:
    """A registered advantage.

    `scale`: the batch normalisation it is defined with. `baseline`: whether siblings, the own group mean or
    nothing of the group enters it; `late`: unbiased for late members of partial groups. `critic`, `greedy`,
    `whole_group`: what must be computed for it.
    """

    of: Callable[..., Credit]
    scale: Scale = "none"
    siblings: bool = True
    late: bool = False
    critic: bool = False
    greedy: bool = False
    whole_group: bool = False

    def bound(self, options: dict[str, Any], where: str) -> Advantage:
        return replace(self, of=bind(self.of, options, where))


advantages: Registry[Advantage] = Registry("advantage")


def advantage(name: str, **needs: Any) -> Callable[[Callable[..., Credit]], Advantage]:
    """Register a function `(given: CreditInput, *, options…) -> Credit` under `name`; `needs` are the fields
    of `Advantage`."""
    return lambda function: advantages.register(name)(Advantage(function, **needs))


@advantage("dr_grpo")
def dr_grpo(given: CreditInput) -> Credit:
    """R - mean (Dr. GRPO, arXiv 2503.20783). No sibling to compare with: 0."""
    return 0.0 if _alone(given) else given.own.reward - _mean(given.siblings)


@advantage("grpo")
def grpo(given: CreditInput) -> Credit:
    """(R - mean) / (std + 1e-6) (GRPO, arXiv 2402.03300), std with ddof 1. Fewer than two siblings: 0."""
    if len(given.siblings) < 2:
        return 0.0
    mean = _mean(given.siblings)
    variance = math.fsum((m.reward - mean) ** 2 for m in given.siblings) / (len(given.siblings) - 1)
    return (given.own.reward - mean) / (math.sqrt(variance) + EPSILON)


@advantage("rloo", late=True)
def rloo(given: CreditInput) -> Credit:
    """R - mean of the other members (RLOO, arXiv 2402.14740).

    With the own reward inside, that is (R - mean)·n/(n-1); outside, the plain mean is already leave-one-out.
    """
    if _alone(given):
        return 0.0
    n = len(given.siblings)
    return (given.own.reward - _mean(given.siblings)) * (n / (n - 1) if given.self_inside else 1.0)


def _alone(given: CreditInput) -> bool:
    """Nobody else in the baseline: the raw reward is never an advantage."""
    return len(given.siblings) <= int(given.self_inside)


def _mean(members: Sequence[Member]) -> float:
    return math.fsum(member.reward for member in members) / len(members)
