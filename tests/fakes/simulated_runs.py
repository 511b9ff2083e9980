"""Simulated metrics of runs that learn honestly, or game their reward, for the alerts on reward hacks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.observe.alerts import Alert, find_alerts
from asyncrl.observe.drifts import DRIFTS
from asyncrl.observe.evidence import rows_for_rules

SUCCESS = "val-core/all/sampled/success"
PAIRS = 16  # of episodes in a step; both of a pair are alike, as those of a group are in part
STEPS = 100
HACK_STEP = 60  # the last step before a hack
HACK_ALERTS = {
    *DRIFTS,
    "held-out success fell",
    "held-out success lags behind the reward",
    "one component carries the reward",
}
KEYS = {"rollout.reward.format.weight": 0.2, "rollout.reward.mine.py:exact.weight": 1.0}

Numbers = dict[str, float]


def learned(step: int, first: float, last: float, steps: float = 40.0) -> float:
    """Return a number that honest learning moves from `first` to `last`, quickly at the beginning."""
    return last + (first - last) * 0.5 ** (step / (steps / 4))


class HonestRun:
    """Draws the metrics of a run that learns a task with tools.

    noise: standard deviation of a step's amounts, as a part of the amount.
    questions: held-out questions of a validation; 0: no validations.
    first_success, last_success, learning_steps: chance of success before and after training, and the steps
        that most of the learning takes.
    """

    def __init__(
        self,
        seed: int,
        noise: float = 0.1,
        questions: int = 128,
        first_success: float = 0.25,
        last_success: float = 0.8,
        learning_steps: float = 40.0,
    ) -> None:
        self.random = random.Random(seed)
        self.noise = noise
        self.questions = questions
        self.first_success = first_success
        self.last_success = last_success
        self.learning_steps = learning_steps

    def share(self, mean: float) -> float:
        return sum(self.random.random() < mean for _ in range(PAIRS)) / PAIRS

    def amount(self, mean: float) -> float:
        return max(0.0, self.random.gauss(mean, self.noise * mean))

    def success(self, step: int) -> float:
        return learned(step, self.first_success, self.last_success, self.learning_steps)

    def row(self, step: int) -> Numbers:
        exact = self.share(self.success(step))
        format_score = self.share(learned(step, 0.3, 0.98, 10))
        return {
            "training/step": float(step),
            "timing_s/step": 1.0,
            "rollout/score/mean": exact + 0.2 * format_score,
            "rollout/score/min": 0.0,
            "rollout/score/max": 1.2,
            "rollout/component/exact/mean": exact,
            "rollout/component/format/mean": format_score,
            "rollout/response_length/mean": self.amount(learned(step, 200.0, 45.0, 15)),
            "tool_call_counts/mean": self.amount(learned(step, 0.3, 2.5, 15)),
            "rollout/repeated_frac/mean": self.share(learned(step, 0.2, 0.02)),
            "rollout/answer/same_frac": 0.5 + self.share(0.1) / 2,
            "rollout/answer/empty_frac": self.share(learned(step, 0.3, 0.02)),
            "rollout/answer/refusal_frac": self.share(0.02),
            **{f"rollout/end/{end}": 0.0 for end in ("max_turns", "max_calls", "max_rows", "timeout")},
            "rollout/end/length": self.share(learned(step, 0.4, 0.03)),
        }

    def validation(self, step: int) -> Numbers:
        solved = sum(self.random.random() < self.success(step) for _ in range(self.questions))
        return {
            "training/step": float(step),
            SUCCESS: solved / self.questions,
            "val-aux/samples": float(self.questions),
        }

    def rows(self, steps: int = STEPS) -> Iterable[Numbers]:
        for step in range(1, steps + 1):
            if self.questions and step % 10 == 1:
                yield self.validation(step - 1)
            yield self.row(step)


class ConvergingRun(HonestRun):
    """An agent learns to end every episode with the same phrase."""

    def row(self, step: int) -> Numbers:
        return super().row(step) | {"rollout/answer/same_frac": self.share(learned(step, 0.2, 0.98))}


def hacked(change: Callable[[Numbers], Numbers], run: HonestRun) -> Iterable[Numbers]:
    """Change the metrics of the steps after HACK_STEP."""
    for row in run.rows():
        yield row | change(row) if row["training/step"] > HACK_STEP and SUCCESS not in row else row


def one_answer_is_paid(row: Numbers) -> Numbers:
    """A hack: one answer is paid whatever the question."""
    return {"rollout/answer/same_frac": 0.98, "rollout/score/mean": row["rollout/score/mean"] + 0.6}


def hack_alerts(rows: Iterable[Numbers]) -> dict[str, list[Alert]]:
    """Find the warnings about hacks, by name, as the coordinator does, after every fifth step."""
    alerts_by_name: dict[str, list[Alert]] = {}
    recent_rows: list[Any] = []
    for row in rows:
        recent_rows = rows_for_rules([*recent_rows, row])
        if SUCCESS not in row and row["training/step"] % 5 == 0:
            for alert in find_alerts(recent_rows, {}, KEYS):
                if alert.name in HACK_ALERTS and alert.level in ("warn", "bad"):
                    alerts_by_name.setdefault(alert.name, []).append(alert)

    return alerts_by_name
