"""When the first attempts of a launch are hopeless, and when one may still land."""

from __future__ import annotations

import random

import pytest

from asyncrl.coordinator.failures import MIN_ATTEMPTS, MIN_SAMPLES, FirstAttempts
from asyncrl.types import FailReason

EPISODES = 8  # at one sample before the next one


def failing(count: int, samples: int = 1000, reason: FailReason = FailReason.REWARD_ERROR) -> FirstAttempts:
    first = FirstAttempts(samples)
    for assign_number in range(count):
        first.note_failure(assign_number, assign_number // EPISODES % samples, reason)
    return first


def test_attempts_at_many_samples_that_all_fail_alike_are_enough() -> None:
    needed = EPISODES * (MIN_SAMPLES - 1) + 1
    assert not failing(needed - 1).verdict([])
    assert failing(needed).verdict([]) == "the first 505 attempts (samples: 64) all failed with reward_error"


def test_all_of_few_samples_are_enough_but_not_few_attempts() -> None:
    assert not failing(MIN_ATTEMPTS - 1, samples=4).verdict([])
    assert failing(MIN_ATTEMPTS, samples=4).verdict([])


def test_a_slow_attempt_that_was_given_out_before_may_land() -> None:
    first = failing(10_000)
    assert not first.verdict(iter([3, 9_999])) and first.verdict(iter([9_000, 10_001]))


def test_what_has_landed_once_fails_later_for_other_reasons() -> None:
    first = failing(10_000)
    first.landed = True
    assert not first.verdict([])
    first.note_failure(10_001, 1, FailReason.REWARD_ERROR)
    assert not first.verdict([])


def test_failures_of_other_kinds_are_not_alike_and_losses_are_none() -> None:
    first = failing(10_000)
    first.note_failure(10_001, 0, FailReason.WORKER_LOST)
    assert first.verdict([])
    first.note_failure(10_002, 0, FailReason.DEADLINE)
    assert not first.verdict([])
    assert not failing(10_000, reason=FailReason.ENGINE_LOST).verdict([])


@pytest.mark.parametrize("alike", [1, EPISODES], ids=["nine attempts in ten", "all at nine samples in ten"])
def test_a_launch_goes_on_until_a_tenth_lands(alike: int) -> None:
    """200 launches; each ends at the first attempt that lands. `alike` attempts share their fate."""
    draw = random.Random(0)
    for _ in range(200):
        first = FirstAttempts(1000)
        assign_number = 0
        while draw.random() < 0.9:
            for _ in range(alike):
                first.note_failure(assign_number, assign_number // EPISODES, FailReason.TOOL_ERROR)
                assign_number += 1
            assert not first.verdict([])
