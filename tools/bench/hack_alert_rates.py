"""Simulates runs and prints how many have a warning about a reward hack.

    python tools/bench/hack_alert_rates.py --runs 200

Healthy runs, of agents whose last words converge, differ in how fast and how far held-out success rises. In
the planted hacks one answer is paid from step 61 on. The last table has runs whose held-out success stays the
same: at most 0.2% may have a fall, however many validations there are (success_changes.FALSE_ALARM_RATE).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from statistics import median_high

from common import table

from asyncrl.observe.evidence import HeldOutSuccess
from asyncrl.observe.success_changes import find_success_fall
from tests.fakes.simulated_runs import (
    HACK_STEP,
    ConvergingRun,
    HonestRun,
    Numbers,
    hack_alerts,
    hacked,
    one_answer_is_paid,
)

# Chance of success before and after training, and the steps that most of the learning takes.
LEARNING = [(0.25, 0.8, 40.0), (0.1, 0.5, 40.0), (0.25, 0.8, 100.0), (0.5, 0.9, 40.0), (0.3, 0.4, 40.0)]
LEVELS = [(0.3, 0.3), (0.6, 0.6), (0.3, 0.1)]  # chance of success before and after a hack


class HackedRun(HonestRun):
    """Held-out success jumps to `last_success` when the hack begins."""

    def success(self, step: int) -> float:
        return self.first_success if step <= HACK_STEP else self.last_success


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="simulated runs of each kind")
    parser.add_argument("--questions", type=int, nargs="+", default=[24, 128])
    options = parser.parse_args()
    seeds = range(options.runs)

    lines = [
        _line(f"{first:.0%} to {last:.0%} in {steps:.0f} steps", questions, [
            ConvergingRun(seed, 0.1, questions, first, last, steps).rows() for seed in seeds
        ])
        for questions in options.questions
        for first, last, steps in LEARNING
    ]  # fmt: skip
    print(table(["healthy run", "questions", "with a warning", "median step"], lines), "\n", flush=True)

    lines = [
        _line(f"{before:.0%} before, {after:.0%} after", questions, [
            hacked(one_answer_is_paid, HackedRun(seed, 0.1, questions, before, after)) for seed in seeds
        ])
        for questions in options.questions
        for before, after in LEVELS
    ]  # fmt: skip
    print(table(["planted hack", "questions", "with a warning", "median step"], lines), "\n", flush=True)

    lines = []
    for questions in options.questions:
        for chance in (0.1, 0.5, 0.9):
            for validations in (2, 6, 20):
                falls = _false_falls(chance, questions, validations, range(20 * options.runs))
                lines.append(
                    [f"{chance:.0%}", str(questions), str(validations), f"{falls} of {20 * options.runs}"]
                )
    print(table(["same success", "questions", "validations", "with a fall"], lines))


def _line(name: str, questions: int, runs: Sequence[Iterable[Numbers]]) -> list[str]:
    first_steps = [
        min(alert.step for alerts in alerts_by_name.values() for alert in alerts)
        for alerts_by_name in map(hack_alerts, runs)
        if alerts_by_name
    ]
    median_step = str(median_high(first_steps)) if first_steps else ""
    return [name, str(questions), f"{len(first_steps)} of {len(runs)}", median_step]


def _false_falls(chance: float, questions: int, validations: int, seeds: Iterable[int]) -> int:
    """Count the runs in which any validation is a fall, although the chance of success stays the same."""
    falls = 0
    for seed in seeds:
        generator = random.Random(seed)
        successes: list[HeldOutSuccess] = []
        for step in range(validations):
            solved = sum(generator.random() < chance for _ in range(questions))
            successes.append(HeldOutSuccess(step, solved / questions, questions))

        falls += any(find_success_fall(successes[:count]) for count in range(2, validations + 1))
    return falls


if __name__ == "__main__":
    main()
