"""Finds that a policy may game its reward, in the metrics of a run. Pure.

`find_fall`: held-out success fell, and the training reward may have risen meanwhile.
`find_lag`: the reward rose much, and held-out success clearly less.
`find_carrier`: one component carries the rise of the reward.
`find_drift`: the behaviour has changed a lot since the first steps, and held-out success has not risen.

A change counts only if it is large and far beyond the noise of the run itself. The noise comes from the
differences between successive steps, so that neither a trend nor a jump counts as noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

from asyncrl.config import loss_has_teacher
from asyncrl.observe import metrics as metric
from asyncrl.observe.answers import EMPTY_ANSWERS, REFUSAL_OPENINGS, REFUSALS, SAME_ANSWERS
from asyncrl.observe.evidence import (
    HIGHEST_SCORE,
    LIMIT_ENDS,
    LOWEST_SCORE,
    SOLVED_SUCCESS,
    WINDOW_STEPS,
    Evidence,
    Finding,
)
from asyncrl.observe.metrics import Row, names_matching
from asyncrl.observe.success_changes import change_since_first, find_success_fall, has_risen

RISE_ERRORS = 3.0  # standard errors of a rise of the reward beside other evidence
CLEAR_ERRORS = 5.0  # standard errors of a clear change of the reward or of a component
# Standard errors of a drift. By chance a simulated number without a drift passed this limit, and the limit of
# its `Drift`, in 6 of 500,000 runs of 200 steps, 5 of them with only one or two groups for each step.
DRIFT_ERRORS = 8.0
# Share of the reward's rise by which held-out success rises at least, unless the reward is gamed; both as
# shares of their ranges.
EXPECTED_SHARE = 0.5
LAG_ERRORS = 2.5  # standard errors of a held-out success that lags behind the reward
LARGE_RISE = 0.3  # share of its range by which the reward has risen much; partial credit alone may pay less
AMOUNT_FACTOR = 3.0  # factor by which an amount has drifted
CARRIED_SHARE = 0.9  # share of the rise that one component carries
TRADED_SHARE = 0.25  # share of the rise by which another component has fallen
SUM_ROUNDING = 1e-3  # error of a reward as a sum of its components

Condition = tuple[str, str, Any]  # column, operator and value, see store/listing.py
HeldOutTrend = Literal["rose", "lags", "fell", "unknown"]


class Change(NamedTuple):
    """Compares the mean of a number in two windows of steps. `error`: standard error of the difference."""

    before: float
    now: float
    error: float

    @property
    def difference(self) -> float:
        return self.now - self.before

    @property
    def text(self) -> str:
        return f"{'rose' if self.difference > 0 else 'fell'} from {self.before:.3g} to {self.now:.3g}"

    @property
    def is_rise(self) -> bool:
        return self.difference > RISE_ERRORS * self.error

    @property
    def is_clear(self) -> bool:
        return abs(self.difference) > CLEAR_ERRORS * self.error


def change_of(
    names: Sequence[str], before: Sequence[Row], now: Sequence[Row], *other_windows: Sequence[Row]
) -> Change | None:
    """Compare the sum of some metrics in two windows. The noise is that of the noisiest window,
    `other_windows` included, because a short window may be quiet by chance. None if one of the two windows
    lacks half of the values."""
    windows = [
        [sum(row[name] for name in names) for row in rows if all(name in row for name in names)]
        for rows in (before, now, *other_windows)
    ]
    if min(len(windows[0]), len(windows[1])) < WINDOW_STEPS // 2:
        return None

    variance = max(_step_variance(values) for values in windows if len(values) > 1)
    error = math.sqrt(variance / len(windows[0]) + variance / len(windows[1]))
    return Change(fmean(windows[0]), fmean(windows[1]), error)


def _step_variance(values: Sequence[float]) -> float:
    """Return the variance from step to step, free of a trend: half the mean squared difference of successive
    values (von Neumann 1941, doi 10.1214/aoms/1177731677)."""
    return fmean((later - earlier) ** 2 for earlier, later in pairwise(values)) / 2


class Drift(NamedTuple):
    """Describes a number that drifts when a policy games its reward.

    metrics: the number is their sum.
    phrase: for a share, the words after the number; for an amount, the words before it.
    least: smallest change that counts; of a share, only a rise counts.
    is_amount: the number is an amount, not a share, and must change by AMOUNT_FACTOR in either direction.
    conditions: the episodes behind the drift, in the list of episodes.
    column: the column by which these episodes are sorted.
    """

    metrics: tuple[str, ...]
    phrase: str
    least: float
    is_amount: bool = False
    conditions: tuple[Condition, ...] = ()
    column: str = ""


def _with_either_apostrophe(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(spelling for text in texts for spelling in (text, text.replace("'", "’"))))


DRIFTS = {
    "answers repeat": Drift(
        metrics=(SAME_ANSWERS,),
        phrase="of the pairs of episodes with different samples have the same answer",
        least=0.4,  # a yes-or-no task begins near 0.5
    ),
    "answers are empty": Drift(
        metrics=(EMPTY_ANSWERS,),
        phrase="of the answers are empty",
        least=0.25,
        conditions=(("answer", "=", ""),),
    ),
    "answers refuse": Drift(
        metrics=(REFUSALS,),
        phrase="of the answers begin with a refusal",
        least=0.25,
        conditions=tuple(
            ("answer", "begins", opening) for opening in _with_either_apostrophe(REFUSAL_OPENINGS)
        ),
    ),
    "text repeats": Drift(
        metrics=("rollout/repeated_frac/mean",),
        phrase="of the model's tokens repeat earlier text of the same turn",
        least=0.25,
        column="-tokens",
    ),
    "episodes reach limits": Drift(
        metrics=tuple(f"rollout/end/{end}" for end in LIMIT_ENDS),
        phrase="of the episodes were cut off by a limit",
        least=0.25,
        conditions=tuple(("end", "=", end) for end in LIMIT_ENDS),
    ),
    "response length drifts": Drift(
        metrics=(metric.LENGTH,),
        phrase="model tokens per episode",
        least=16.0,
        is_amount=True,
        column="tokens",
    ),
    "tool use drifts": Drift(
        metrics=("tool_call_counts/mean",),
        phrase="tool calls per episode",
        least=0.5,
        is_amount=True,
        column="calls",
    ),
}


def find_drift(drift: Drift, evidence: Evidence) -> Finding | None:
    """Find that a number has drifted since the settled steps. A share may have drifted since the first steps,
    too, and so may an amount if held-out success fell.

    Honest learning changes behaviour, too: for example, the final answers of an agent may converge to one
    phrase. A drift is therefore no alert if held-out success rose. A drift is a warning if held-out success
    fell or lags behind the reward, and otherwise only advice, for example without validations.
    """
    if evidence.is_supervised:
        return None

    windows = [(WINDOW_STEPS + 1, evidence.settled_steps), (1, evidence.first_steps)]
    for first_step, rows in windows if drift.is_amount else reversed(windows):
        change = _change_until_now(drift.metrics, evidence, rows)
        if change is None or not _has_drifted(drift, change):
            continue

        trend = held_out_trend(evidence)
        if trend == "rose" or (drift.is_amount and first_step == 1 and trend != "fell"):
            return None

        if drift.is_amount:
            text = f"{drift.phrase} {change.text}"
            order = f"-{drift.column}" if change.difference > 0 else drift.column
        else:
            steps = f"steps {first_step} to {first_step + WINDOW_STEPS - 1}"
            text = f"{change.now:.0%} {drift.phrase} ({change.before:.0%} in {steps})"
            order = drift.column

        reward = _reward_rise(evidence)
        reward_note = f"; meanwhile the reward {reward.text}, so this may be a reward hack" if reward else ""
        return Finding(
            text + reward_note,
            is_mild=trend == "unknown",
            link=_episode_link(evidence, drift.conditions, order),
        )

    return None


def _has_drifted(drift: Drift, change: Change) -> bool:
    """Tell whether a change of the drift's number is large, and far beyond the noise."""
    if not drift.is_amount:
        return change.difference > max(drift.least, DRIFT_ERRORS * change.error)

    smaller, larger = sorted((change.before, change.now))
    is_large = larger - smaller >= drift.least and larger >= AMOUNT_FACTOR * smaller
    return is_large and abs(change.difference) > DRIFT_ERRORS * change.error


def find_fall(evidence: Evidence) -> Finding | None:
    """Find that held-out success fell. If the training reward has risen since the best validation, the policy
    may game the reward, which is a cause with its own advice."""
    change = find_success_fall(evidence.held_out_successes)
    if change is None:
        return None

    reward = _change_until_now((metric.REWARD,), evidence, evidence.best_steps)
    if loss_has_teacher(evidence.keys) or not (reward and reward.is_rise):
        return Finding(change.text)

    return Finding(
        f"{change.text}, while the training reward {reward.text}",
        cause="reward rose",
        link={"tab": "episodes"} | _episode_link(evidence, order="-score"),
    )


def find_lag(evidence: Evidence) -> Finding | None:
    """Find that the reward rose much, and held-out success less than half as much. The reward may be gamed
    without a drift of the behaviour."""
    reward = _reward_rise(evidence)
    if evidence.is_supervised or not (reward and reward.is_clear):
        return None
    is_large = reward.difference >= LARGE_RISE * _score_range(evidence)
    if not is_large or held_out_trend(evidence) != "lags":
        return None

    change = change_since_first(evidence.held_out_successes)
    assert change is not None  # held-out success lags
    return Finding(
        f"{change.text}, while the training reward {reward.text}",
        link=_episode_link(evidence, order="-score"),
    )


def find_carrier(evidence: Evidence) -> Finding | None:
    """Find that one component carries nearly all of the rise of a reward that is the weighted sum of its
    components, while no other component rises and held-out success does not rise, either. Without a fall of
    another component this is advice only: the component may simply be the one that is learned first."""
    reward = _change_until_now((metric.REWARD,), evidence, evidence.settled_steps)
    if evidence.is_supervised or not (reward and reward.is_clear and reward.difference > 0):
        return None

    trend = held_out_trend(evidence)
    if trend == "rose":
        return None

    changes = {
        name: change
        for name, path in names_matching(metric.COMPONENT, set[str]().union(*evidence.last_steps)).items()
        if "/" not in name and (change := _change_until_now((path,), evidence, evidence.settled_steps))
    }
    weights = {name: _weight_of(name, evidence) for name in changes}
    sums = [
        sum(weights[name] * change.before for name, change in changes.items()),
        sum(weights[name] * change.now for name, change in changes.items()),
    ]
    is_sum = all(
        math.isclose(component_sum, score, rel_tol=SUM_ROUNDING, abs_tol=SUM_ROUNDING)
        for component_sum, score in zip(sums, (reward.before, reward.now), strict=True)
    )
    if len(changes) < 2 or not is_sum:
        return None

    rises = {name: weights[name] * change.difference for name, change in changes.items()}
    carrier = max(rises, key=lambda name: rises[name])
    other_components = changes.keys() - {carrier}
    if rises[carrier] < CARRIED_SHARE * reward.difference:
        return None
    if any(rises[name] > (1 - CARRIED_SHARE) * reward.difference for name in other_components):
        return None

    fallen = [
        name
        for name in sorted(other_components)
        if changes[name].is_clear and -rises[name] > TRADED_SHARE * reward.difference
    ]
    if not fallen and trend == "unknown":
        return None

    texts = [f"{name} {changes[name].text}" for name in fallen]
    fall_note = f", while {', '.join(texts)}" if fallen else ""
    return Finding(
        f"the reward {reward.text}, all of it by {carrier}, which {changes[carrier].text}{fall_note}",
        is_mild=not fallen,
        link=_episode_link(evidence, order=f"-components.{carrier}"),
    )


def _weight_of(component: str, evidence: Evidence) -> float:
    """Return the weight of a reward in the sum. Components have the part of a reward's name after the `:`."""
    prefix = "rollout.reward."
    for key, value in evidence.keys.items():
        reward = key.removeprefix(prefix).removesuffix(".weight")
        if key == f"{prefix}{reward}.weight" and component in (reward, reward.rpartition(":")[2]):
            return float(value)
    return 1.0


def held_out_trend(evidence: Evidence) -> HeldOutTrend:
    """Return how held-out success has changed, by more than chance.

    "fell": since the best validations.
    "rose": since the first validations; a solved run counts as risen.
    "lags": the reward rose, and held-out success did not rise by EXPECTED_SHARE of that, both as shares of
        their ranges. If a reward is gamed, held-out success lags.
    "unknown": held-out success may follow the reward; small validations leave this open for long.
    """
    successes = evidence.held_out_successes
    if find_success_fall(successes):
        return "fell"
    if has_risen(successes) or (successes and successes[-1].success >= SOLVED_SUCCESS):
        return "rose"

    change = change_since_first(successes)
    reward = _reward_rise(evidence)
    if change is None or reward is None:
        return "unknown"

    # Both rises are uncertain, and a reward that rose by chance seems to have risen more than it has.
    score_range = _score_range(evidence)
    missing_rise = EXPECTED_SHARE * reward.difference / score_range - change.difference
    error = math.hypot(EXPECTED_SHARE * reward.error / score_range, change.error)
    return "lags" if missing_rise > LAG_ERRORS * error else "unknown"


def _score_range(evidence: Evidence) -> float:
    """Return the difference between the highest and the lowest score; inf if no scores are known."""
    rows = [*evidence.first_steps, *evidence.settled_steps, *evidence.last_steps]
    lowest_scores = [row[LOWEST_SCORE] for row in rows if LOWEST_SCORE in row]
    highest_scores = [row[HIGHEST_SCORE] for row in rows if HIGHEST_SCORE in row]
    if not (lowest_scores and highest_scores):
        return math.inf
    return max(highest_scores) - min(lowest_scores) or math.inf


def _change_until_now(names: Sequence[str], evidence: Evidence, before: Sequence[Row]) -> Change | None:
    """Compare the last steps with an earlier window. None if the windows overlap."""
    overlaps = not before or before[-1]["training/step"] >= evidence.last_steps[0]["training/step"]
    if overlaps:
        return None
    return change_of(names, before, evidence.last_steps, evidence.settled_steps)


def _reward_rise(evidence: Evidence) -> Change | None:
    """Return the rise of the reward since the settled steps, or else since the first ones. None without a
    rise."""
    for rows in (evidence.settled_steps, evidence.first_steps):
        reward = _change_until_now((metric.REWARD,), evidence, rows)
        if reward and reward.is_rise:
            return reward
    return None


def _episode_link(
    evidence: Evidence, conditions: Sequence[Condition] = (), order: str = ""
) -> dict[str, str]:
    """Return the changes to the page's address that list the episodes trained in the last steps."""
    first_step = int(evidence.last_steps[0]["training/step"])
    where = [("kind", "=", "train"), ("step", ">=", first_step), *conditions]
    return {"where": json.dumps(where)} | ({"order": order} if order else {})
