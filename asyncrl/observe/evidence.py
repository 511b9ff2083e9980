"""Holds the input of the rules of alerts, and what a rule finds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from asyncrl.observe import metrics as metric
from asyncrl.observe.held_out import SuccessShare, clearly_below, mean_clearly_below
from asyncrl.observe.metrics import Row
from asyncrl.observe.summary import mean

WINDOW_STEPS = 10  # steps that a rule looks back on; before so many steps no advice is given
SETTLED_STEPS = 2 * WINDOW_STEPS  # steps before which no advice is about learning
# Steps up to which the reward in training shows that a run learns, without a validation.
YOUNG_STEPS = 4 * WINDOW_STEPS
LOWEST_SCORE = "rollout/score/min"
HIGHEST_SCORE = "rollout/score/max"
SOLVED_SUCCESS = 0.95  # success from which a run is solved
LIMIT_ENDS = ("length", "max_turns", "max_calls", "max_rows", "timeout")  # ends of episodes by a limit


class HeldOutSuccess(NamedTuple):
    """Holds the success of a validation, by sampled answers if there are some."""

    step: float
    success: float
    questions: float

    @property
    def share(self) -> SuccessShare:
        return SuccessShare(self.success, self.questions)


class Evidence(NamedTuple):
    """Holds the input of rules: rows of steps, the validations, the status, and all keys of the
    configuration. Each sequence of steps has at most WINDOW_STEPS rows.

    settled_steps: the steps after `first_steps`, once the changes of the first steps are over.
    best_steps: the steps before the best validation; without a validation, or before step WINDOW_STEPS, the
        first steps.
    last_steps: before the first step, a single row of the episodes landed so far.
    """

    first_steps: Sequence[Row]
    settled_steps: Sequence[Row]
    best_steps: Sequence[Row]
    last_steps: Sequence[Row]
    validations: Sequence[Row]
    status: Mapping[str, Any]
    keys: Mapping[str, Any]

    @property
    def newest_gauges(self) -> Row:
        """Return the newest gauges."""
        return self.status.get("gauges") or (self.last_steps[-1] if self.last_steps else {})

    @property
    def highest_score(self) -> float:
        return max((row[HIGHEST_SCORE] for row in self.last_steps if HIGHEST_SCORE in row), default=0.0)

    @property
    def landed_episodes(self) -> float:
        return sum(row.get("rollout/landed", 0.0) for row in self.last_steps)

    @property
    def held_out_successes(self) -> list[HeldOutSuccess]:
        """Return the success of each validation. Empty while only the untrained model was validated."""
        successes = [
            HeldOutSuccess(
                step=row["training/step"],
                success=row.get(metric.SAMPLED, row.get(metric.GREEDY, 0.0)),
                questions=row.get(metric.ASKED, 0.0),
            )
            for row in self.validations
        ]

        return successes if successes and (successes[-1].step or not self.last_steps) else []

    @property
    def newest_success(self) -> float:
        """Return the newest held-out success. Without validations: the mean score divided by the highest, if
        the highest counts as a success; a lower score may be earned by the right format alone."""
        if self.held_out_successes:
            return self.held_out_successes[-1].success

        threshold = self.keys.get("validation.success", 1.0)
        score_counts = len(self.last_steps) == WINDOW_STEPS and self.highest_score >= threshold
        return self.mean_of(metric.REWARD) / self.highest_score if score_counts else 0.0

    @property
    def is_supervised(self) -> bool:
        return any(metric.NLL in row for row in self.last_steps)

    @property
    def is_rising(self) -> bool:
        """Tell whether the run learns: the newest held-out success exceeds, by more than chance, a success
        from before half of the steps. In a young run without such validations the mean score in training
        must have risen. A run whose score in training has fallen since the first steps does not learn."""
        before = [row[metric.REWARD] for row in self.first_steps if metric.REWARD in row]
        now = [row[metric.REWARD] for row in self.last_steps if metric.REWARD in row]
        if before and now and fmean(now) < fmean(before):
            return False
        if self.held_out_successes:
            newest = self.held_out_successes[-1]
            earlier = [success for success in self.held_out_successes if success.step < newest.step / 2]
            return bool(earlier) and clearly_below(earlier[-1].share, newest.share)

        step = self.last_steps[-1].get("training/step", 0.0) if self.last_steps else 0.0
        return SETTLED_STEPS <= step <= YOUNG_STEPS and mean_clearly_below(before, now)

    def mean_of(self, name: str) -> float:
        return mean(self.last_steps, name) or 0.0

    def growth_of(self, name: str) -> float:
        """Return the growth of a counter in the last steps; in a young run, since the start."""
        is_young = len(self.last_steps) < WINDOW_STEPS
        count_before = 0.0 if is_young else self.last_steps[0].get(name, 0.0)
        return self.newest_gauges.get(name, 0.0) - count_before

    @property
    def settled_episodes(self) -> float:
        """Count the training episodes that got a reward in the last steps."""
        names = ("trained", "filtered", "dropped", "taken", "ready")
        return sum(self.growth_of(metric.FLOW + name) for name in names)


class Finding(NamedTuple):
    """Describes a problem that a rule has found. `cause`: a cause with its own advice in alerts.yaml. `link`:
    changes to the page's address, in addition to those in alerts.yaml."""

    description: str
    cause: str = ""
    is_mild: bool = False  # the problem is over, or not certain: shown as advice only
    link: Mapping[str, str] = {}


def rows_for_rules(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that rules read: the first, settled, best and last steps, and all validations."""
    steps = [index for index, row in enumerate(rows) if metric.STEP_SECONDS in row]
    indexes = {*steps[:SETTLED_STEPS], *_best_steps(rows, steps), *steps[-WINDOW_STEPS:]}
    return [row for index, row in enumerate(rows) if index in indexes or metric.SAMPLED in row]


def gather_evidence(rows: Sequence[Row], status: Mapping[str, Any], keys: Mapping[str, Any]) -> Evidence:
    steps = [index for index, row in enumerate(rows) if metric.STEP_SECONDS in row]
    gauges = status.get("gauges", {})
    landed_rows = [gauges] if HIGHEST_SCORE in gauges else []

    return Evidence(
        first_steps=[rows[index] for index in steps[:WINDOW_STEPS]],
        settled_steps=[rows[index] for index in steps[WINDOW_STEPS:SETTLED_STEPS]],
        best_steps=[rows[index] for index in _best_steps(rows, steps)],
        last_steps=[rows[index] for index in steps[-WINDOW_STEPS:]] or landed_rows,
        validations=[row for row in rows if metric.SAMPLED in row],
        status=status,
        keys=keys,
    )


def _best_steps(rows: Sequence[Row], steps: Sequence[int]) -> Sequence[int]:
    """Return the indexes of the last WINDOW_STEPS steps before the best validation. The result is the same
    for the rows of `rows_for_rules`, because a validation is the newest row when it becomes the best."""
    validated = [index for index, row in enumerate(rows) if metric.SAMPLED in row]
    best = max(validated, key=lambda index: rows[index][metric.SAMPLED], default=0)
    end = max(WINDOW_STEPS, sum(index <= best for index in steps))
    return steps[end - WINDOW_STEPS : end]
