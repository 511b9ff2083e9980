"""Partial groups, by exact enumeration: a three-armed bandit whose good arm is slow.

Every outcome of three members and every time of landing goes through the real buffer and batches. The
expected gradient of what is trained must be the true gradient, however few land before the deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest

from asyncrl.algorithms.advantages import AdvantageInput, advantages
from asyncrl.types import EpisodeResult
from tests.unit.buffer.machine import admit, land, make, run

MEMBERS = 3
DEADLINE = 5.0
POLICY = np.array([0.2, 0.5, 0.3])  # softmax of the logits that are differentiated
REWARD = np.array([0.0, 0.4, 1.0])
TOKENS = (10, 20, 70)
TIMES = (1.0, 6.0, 7.0)  # before the deadline, and twice after it
LANDS = np.array([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.05, 0.25, 0.7]])  # row a: chance of each time
SCORE = np.eye(3) - POLICY  # row a: gradient of log policy(a) by the logits
TRUE = POLICY @ (REWARD[:, None] * SCORE)

Arms = tuple[int, ...]
Trained = list[tuple[int, AdvantageInput]]  # member, what its advantage is a function of


def given(result: EpisodeResult, siblings: tuple[EpisodeResult, ...], position: int) -> AdvantageInput:
    turn = np.zeros(1, dtype=np.int64)
    return AdvantageInput(result, siblings, np.array([result.reward]), turn, MEMBERS, position)


def result(arm: int) -> EpisodeResult:
    return EpisodeResult(float(REWARD[arm]), TOKENS[arm], (float(REWARD[arm]),))


def ours(arms: Arms, times: tuple[float, ...], filtering: bool) -> Trained:
    """What the buffer trains. Members that land at the same time do so in the order of their numbers."""
    buffer, batches = make(
        group_policy="partial",
        group_deadline=DEADLINE,
        groups_per_batch=1,
        episodes_per_group=MEMBERS,
        filter_zero_variance=filtering,
        max_staleness=2 * MEMBERS,
    )
    batches.micro_batch_tokens = 1  # what is ready is enough
    admit(buffer, 1)
    for member in range(MEMBERS):
        run(buffer, f"0.{member}")
    trained: Trained = []

    def take() -> None:
        while buffer.account().ready:
            for uid in batches.next_part(1, len(batches.by_step[1].parts) if batches.by_step else 0, 1) or ():
                episode = batches.planned_episodes[uid]
                group = batches.baselines[0]
                trained.append((episode.member, given(episode.result, *group.siblings(episode))))

    for time in TIMES:
        if time > DEADLINE:
            buffer.settle_overdue(DEADLINE)
            take()
        for member in (m for m in range(MEMBERS) if times[m] == time):
            member_result = result(arms[member])
            land(buffer, f"0.{member}", member_result.reward, now=time, tokens=member_result.tokens)
            take()
    return trained


@cache
def cases(filtering: bool) -> list[tuple[float, Arms, Trained]]:
    """(probability, arm of each member, what the buffer trains)."""
    case_list = []
    for arms, slots in product(product(range(3), repeat=MEMBERS), repeat=2):
        chance = prod(POLICY[arm] * LANDS[arm, slot] for arm, slot in zip(arms, slots, strict=True))
        case_list.append((chance, arms, ours(arms, tuple(TIMES[slot] for slot in slots), filtering)))
    return case_list


Rule = Callable[[AdvantageInput], float]


def expected(rule: Rule, filtering: bool = False, keep: int = MEMBERS) -> np.ndarray:
    """Gradient of one member's term, over all cases; of the first `keep` that are trained."""
    total = np.zeros(3)
    for chance, arms, trained in cases(filtering):
        for member, credit in trained[:keep]:
            total += chance * rule(credit) * SCORE[arms[member]] / MEMBERS
    return total


def of(name: str) -> Rule:
    return lambda credit: float(np.mean(advantages.get(name).of(credit)))


def cosine(gradient: np.ndarray) -> float:
    return float(gradient @ TRUE / np.linalg.norm(gradient) / np.linalg.norm(TRUE))


def test_the_cases_are_all_there_are() -> None:
    assert sum(chance for chance, *_ in cases(False)) == pytest.approx(1.0, abs=1e-14)


def test_every_member_is_trained_once() -> None:
    assert all(sorted(member for member, _ in trained) == [0, 1, 2] for _, _, trained in cases(False))


LATE = {"rloo": 1.0, "opo_loo": 1.0, "dr_grpo": (MEMBERS - 1) / MEMBERS}  # of the true gradient


def test_these_are_all_that_may_be_late() -> None:
    assert LATE.keys() == {name for name in advantages.names() if advantages.get(name).late}


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("name", LATE)
def test_our_rule_is_unbiased(name: str, filtering: bool) -> None:
    """Who is in the baseline of a member depends on the others alone, not on its arm or time of landing.
    Groups of zero variance leave, but not their late members that make a difference."""
    np.testing.assert_allclose(expected(of(name), filtering), LATE[name] * TRUE, rtol=0, atol=1e-12)


def test_a_filtered_group_trains_only_who_differs() -> None:
    assert all(any(rule(credit) for rule in map(of, LATE)) for _, _, t in cases(True) for _, credit in t)


def test_a_mean_with_oneself_is_biased() -> None:
    """Who is in time is in its own baseline, who is late is not."""
    gradient = expected(lambda credit: credit.own.reward - np.mean([m.reward for m in credit.siblings]))
    assert cosine(gradient) < 0.9999


def test_the_number_that_landed_in_place_of_the_number_issued_is_biased() -> None:
    def wrong(credit: AdvantageInput) -> float:
        n = len(credit.siblings)
        return (n - 1) / n * of("rloo")(credit)

    assert cosine(expected(wrong)) < 0.9999


def test_dropping_who_comes_late_is_biased() -> None:
    gradient = expected(of("rloo"), keep=2)
    assert cosine(gradient) < 0.99
    assert np.linalg.norm(gradient) < 0.6 * np.linalg.norm(TRUE)  # two thirds of the terms are trained
