"""Partial groups, by exact enumeration: a three-armed bandit whose good arm is slow (Exactness 8).

Every outcome of three members, every split into early and late, and every order of landing goes through the
real buffer and batches. The expected gradient of what is trained must be the true gradient, times the share
of episodes that have anybody to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from math import factorial, prod

import numpy as np
import pytest

from asyncrl.algorithms.advantages import CreditInput, advantages
from asyncrl.types import EpisodeResult
from tests.unit.buffer.machine import admit, land, make

MEMBERS = 3
DEADLINE = 5.0
POLICY = np.array([0.2, 0.5, 0.3])  # softmax of the logits that are differentiated
REWARD = np.array([0.0, 0.4, 1.0])
EARLY = np.array([0.9, 0.9, 0.05])  # chance to land before the deadline: the best arm is slow
SCORE = np.eye(3) - POLICY  # row a: gradient of log policy(a) by the logits
TRUE = POLICY @ (REWARD[:, None] * SCORE)

Trained = list[tuple[int, float]]  # (member, advantage)


def cases() -> Iterator[tuple[float, tuple[int, ...], tuple[bool, ...], tuple[int, ...]]]:
    """(probability, arm of each member, whether it is early, order of landing)."""
    for arms, early in product(product(range(3), repeat=MEMBERS), product((True, False), repeat=MEMBERS)):
        chance = prod(POLICY[a] * (EARLY[a] if e else 1 - EARLY[a]) for a, e in zip(arms, early, strict=True))
        first = [member for member in range(MEMBERS) if early[member]]
        last = [member for member in range(MEMBERS) if not early[member]]
        orders = factorial(len(first)) * factorial(len(last))
        for before, after in product(permutations(first), permutations(last)):
            yield chance / orders, arms, early, before + after


def credit(own: EpisodeResult, siblings: tuple[EpisodeResult, ...], place: int) -> float:
    turn = np.zeros(1, dtype=np.int64)
    found = advantages.get("rloo").of(CreditInput(own, siblings, np.array([own.reward]), turn, place))
    return float(np.mean(found))


def ours(arms: tuple[int, ...], early: tuple[bool, ...], order: tuple[int, ...]) -> Trained:
    """What the buffer trains: siblings fixed at the deadline, late members against the same ones."""
    buffer, batches = make(
        group_policy="partial", group_deadline=DEADLINE, groups_per_batch=1, episodes_per_group=MEMBERS
    )
    batches.micro_tokens = 20 * MEMBERS  # whatever is ready is one micro-batch
    admit(buffer, 1)
    trained: Trained = []

    def take() -> None:
        for uid in batches.plan(0, len(batches.batches[0].micros) if batches.batches else 0, 1) or ():
            own, group = batches.taken[uid], batches.baselines[0]
            trained.append((own.member, credit(own.result, group.results, group.place(own))))

    for member in order:
        if early[member]:
            land(buffer, f"0.{member}", REWARD[arms[member]], now=DEADLINE - 1)
        else:
            buffer.assign(buffer.episodes[f"0.{member}"], "w", 1, 0)
    buffer.tick(DEADLINE)
    take()
    for member in order:
        if not early[member]:
            land(buffer, f"0.{member}", REWARD[arms[member]], now=DEADLINE + 1)
            take()
    return trained


def first_two(arms: tuple[int, ...], early: tuple[bool, ...], order: tuple[int, ...]) -> Trained:
    """The tempting rule: train as soon as two have landed, drop the rest."""
    landed = tuple(EpisodeResult(float(REWARD[arms[member]])) for member in order[:2])
    return [(order[place], credit(landed[place], landed, place)) for place in range(2)]


def expected(rule: Callable[..., Trained]) -> np.ndarray:
    """Gradient of one member's term, over all cases: a member that is not trained contributes nothing."""
    total = np.zeros(3)
    for chance, arms, early, order in cases():
        for member, advantage in rule(arms, early, order):
            total += chance * advantage * SCORE[arms[member]] / MEMBERS
    return total


def cosine(gradient: np.ndarray) -> float:
    return float(gradient @ TRUE / np.linalg.norm(gradient) / np.linalg.norm(TRUE))


def test_the_cases_are_all_there_are() -> None:
    assert sum(chance for chance, *_ in cases()) == pytest.approx(1.0, abs=1e-14)


def test_our_rule_is_unbiased_in_every_order_of_landing() -> None:
    """A baseline of the others that landed in time does not depend on the own arm, nor on whether the own
    episode was in time: only the share of episodes without any such sibling is lost."""
    alone = (1 - POLICY @ EARLY) ** (MEMBERS - 1)
    np.testing.assert_allclose(expected(ours), (1 - alone) * TRUE, rtol=0, atol=1e-12)


def test_every_member_is_trained_once() -> None:
    for _, arms, early, order in cases():
        assert sorted(member for member, _ in ours(arms, early, order)) == [0, 1, 2]


def test_dropping_who_comes_late_is_biased() -> None:
    gradient = expected(first_two)
    assert cosine(gradient) < 0.93  # 0.916
    assert np.linalg.norm(gradient) < 0.5 * np.linalg.norm(TRUE)  # 0.45; two thirds of the terms are trained
