"""Advantages: how much better an episode did than its siblings. Each is a function of one group's rewards,
known when the group is assembled, and gives one number for all model tokens of the episode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.registry import Registry

EPSILON = 1e-6


@dataclass(frozen=True)
class GroupRewards:
    """One episode's reward and the rewards its baseline is made of.

    `siblings` contains the episode's own reward iff `self_inside`; a late member of a partial group
    is compared with siblings that landed without it.
    """

    reward: float
    siblings: Sequence[float]
    self_inside: bool = True


advantages: Registry[Callable[[GroupRewards], float]] = Registry("advantage")


@advantages.register("dr_grpo")
def dr_grpo(group: GroupRewards) -> float:
    """R - mean (Dr. GRPO, arXiv 2503.20783). No sibling to compare with: 0."""
    return 0.0 if _alone(group) else group.reward - _mean(group.siblings)


@advantages.register("grpo")
def grpo(group: GroupRewards) -> float:
    """(R - mean) / (std + 1e-6) (GRPO, arXiv 2402.03300), std with ddof 1. Fewer than two siblings: 0."""
    if len(group.siblings) < 2:
        return 0.0
    mean = _mean(group.siblings)
    variance = math.fsum((r - mean) ** 2 for r in group.siblings) / (len(group.siblings) - 1)
    return (group.reward - mean) / (math.sqrt(variance) + EPSILON)


@advantages.register("rloo")
def rloo(group: GroupRewards) -> float:
    """R - mean of the other members (RLOO, arXiv 2402.14740).

    With the own reward inside, that is (R - mean)·n/(n-1); outside, the plain mean is already leave-one-out.
    """
    if _alone(group):
        return 0.0
    n = len(group.siblings)
    return (group.reward - _mean(group.siblings)) * (n / (n - 1) if group.self_inside else 1.0)


def _alone(group: GroupRewards) -> bool:
    """Nobody else in the baseline: the raw reward is never an advantage."""
    return len(group.siblings) <= int(group.self_inside)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
