"""Changes of held-out success: small validations count together, and chance alone is no fall."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from asyncrl.observe.evidence import HeldOutSuccess
from asyncrl.observe.success_changes import (
    FALSE_ALARM_RATE,
    change_since_first,
    find_success_fall,
    has_risen,
)


def validations(successes: Sequence[float], questions: float = 128.0) -> list[HeldOutSuccess]:
    return [
        HeldOutSuccess(10.0 * index, success, questions=questions) for index, success in enumerate(successes)
    ]


@pytest.mark.parametrize(
    ("successes", "questions", "text"),
    [
        ([0.26, 0.09], 128, "from 26% at step 0 to 9% at step 10"),
        ([0.26, 0.09], 24, None),
        ([0.35, 0.09, 0.09, 0.09], 64, "from 35% at step 0 to 9% at steps 10 to 30"),
        ([0.6, 0.6, 0.6, 0.35, 0.35, 0.35], 64, "from 60% at steps 0 to 20 to 35% at steps 30 to 50"),
        ([0.6, 0.6, 0.6, 0.35, 0.6, 0.6], 64, None),
        ([0.3, 0.7, 0.9], 128, None),
        ([0.9, 0.1], 0, None),
        ([0.9], 128, None),
        ([], 128, None),
    ],
)
def test_a_fall_is_found_in_pools_of_validations(
    successes: list[float], questions: float, text: str | None
) -> None:
    fall = find_success_fall(validations(successes, questions))
    assert (fall.text if fall else None) == text


def test_a_fall_must_be_clearer_after_more_validations() -> None:
    assert find_success_fall(validations([0.6, 0.4]))
    assert find_success_fall(validations([0.6] * 3 + [0.35]))
    assert not find_success_fall(validations([0.4] * 3 + [0.6, 0.4]))
    assert not find_success_fall(validations([0.4] * 20 + [0.6, 0.4]))


@pytest.mark.full
@pytest.mark.parametrize("questions", [24, 128])
def test_a_success_that_stays_the_same_rarely_has_a_fall(questions: int) -> None:
    """The seed is fixed. With any seed, more than 10 falls at the allowed rate have a chance of 1e-5."""
    generator = random.Random(0)
    runs = 1000
    chance = 0.5
    falls = 0
    for _ in range(runs):
        successes = [
            sum(generator.random() < chance for _ in range(questions)) / questions for _ in range(12)
        ]
        run_validations = validations(successes, questions)
        falls += any(find_success_fall(run_validations[:count]) for count in range(2, 13))
    assert falls <= 5 * FALSE_ALARM_RATE * runs


def test_a_rise_is_found_in_pools_of_validations() -> None:
    assert not has_risen(validations([0.3, 0.6], 24))
    assert has_risen(validations([0.3, 0.3, 0.6, 0.6], 48))
    assert has_risen(validations([0.3, 0.6], 128))
    assert not has_risen(validations([0.6, 0.3], 128))
    assert not has_risen(validations([0.3]))


def test_the_newest_validations_are_compared_with_the_first_ones() -> None:
    errors = []
    for count, questions in ((2, 24), (6, 24), (6, 128)):
        change = change_since_first(validations([0.3] * count, questions))
        assert change is not None and change.difference == 0.0
        errors.append(change.error)
    assert errors == pytest.approx([0.133, 0.077, 0.033], abs=0.001)
    assert change_since_first(validations([0.3])) is None
