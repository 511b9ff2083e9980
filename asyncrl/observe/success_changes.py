"""Tests whether held-out success has changed during a run. Pure.

Successive validations count together, up to POOLED_VALIDATIONS: a small validation says little alone, and a
slow change shows in several validations before a single one differs clearly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from asyncrl.observe.evidence import HeldOutSuccess

POOLED_VALIDATIONS = 3  # validations that count together at most
# Bound on the chance that a run whose success never falls ever has a fall, however many validations it has.
FALSE_ALARM_RATE = 0.002
RISE_ERRORS = 3.5  # standard errors of a rise


class SuccessChange(NamedTuple):
    """Compares the success of two pools of successive validations."""

    before: Sequence[HeldOutSuccess]
    now: Sequence[HeldOutSuccess]

    @property
    def difference(self) -> float:
        return pooled_success(self.now) - pooled_success(self.before)

    @property
    def error(self) -> float:
        """Return the standard error of the difference if both pools have the same chance of success. The
        chance is estimated by Laplace's rule of succession, so that the error is never 0. Validations repeat
        the same questions, so the true error is smaller if the questions differ in difficulty."""
        questions_before = sum(validation.questions for validation in self.before)
        questions_now = sum(validation.questions for validation in self.now)

        pool = [*self.before, *self.now]
        solved = sum(validation.success * validation.questions for validation in pool)
        chance = (solved + 1) / (questions_before + questions_now + 2)
        return math.sqrt(chance * (1 - chance) * (1 / questions_before + 1 / questions_now))

    @property
    def standardized(self) -> float:
        """Return the difference in standard errors."""
        return self.difference / self.error

    @property
    def text(self) -> str:
        before, now = (
            f"{pooled_success(pool):.0%} at {_steps_text(pool)}" for pool in (self.before, self.now)
        )
        return f"from {before} to {now}"


def pooled_success(validations: Sequence[HeldOutSuccess]) -> float:
    questions = sum(validation.questions for validation in validations)
    return sum(validation.success * validation.questions for validation in validations) / questions


def find_success_fall(validations: Sequence[HeldOutSuccess]) -> SuccessChange | None:
    """Find that the newest validations are below the best earlier ones by more than chance.

    This is a sequential test: the n-th validation may raise a false alarm with a chance of at most
    FALSE_ALARM_RATE / (n (n - 1)), which is divided among all pools that are compared, and these chances add
    up to FALSE_ALARM_RATE. The limit is therefore 3.1 standard errors at the second validation, 4.6 at the
    sixth and 5.4 at the twentieth.
    """
    validations = _with_questions(validations)
    count = len(validations)
    compared_pools = 0
    changes: list[SuccessChange] = []

    for before_size in range(1, POOLED_VALIDATIONS + 1):
        pools = [validations[end - before_size : end] for end in range(before_size, count)]
        successes = [pooled_success(pool) for pool in pools]

        for now_size in range(1, POOLED_VALIDATIONS + 1):
            earlier_pools = range(count - now_size - before_size + 1)
            if earlier_pools:
                compared_pools += len(earlier_pools)
                best_pool = pools[max(earlier_pools, key=successes.__getitem__)]
                changes.append(SuccessChange(best_pool, validations[-now_size:]))

    if not changes:
        return None

    chance = FALSE_ALARM_RATE / (count * (count - 1) * compared_pools)
    clearest_fall = min(changes, key=lambda change: change.standardized)
    return clearest_fall if clearest_fall.standardized < NormalDist().inv_cdf(chance) else None


def has_risen(validations: Sequence[HeldOutSuccess]) -> bool:
    """Tell whether the newest validations are above the first ones by more than chance."""
    validations = _with_questions(validations)
    return any(
        SuccessChange(validations[:first_size], validations[-now_size:]).standardized > RISE_ERRORS
        for first_size in range(1, POOLED_VALIDATIONS + 1)
        for now_size in range(1, POOLED_VALIDATIONS + 1)
        if first_size + now_size <= len(validations)
    )


def change_since_first(validations: Sequence[HeldOutSuccess]) -> SuccessChange | None:
    """Compare the newest with the first validations. None with fewer than two validations."""
    validations = _with_questions(validations)
    size = min(POOLED_VALIDATIONS, len(validations) // 2)
    return SuccessChange(validations[:size], validations[-size:]) if size else None


def _with_questions(validations: Sequence[HeldOutSuccess]) -> list[HeldOutSuccess]:
    return [validation for validation in validations if validation.questions > 0]


def _steps_text(validations: Sequence[HeldOutSuccess]) -> str:
    first_step = int(validations[0].step)
    last_step = int(validations[-1].step)
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
