"""Compares two validations, of two runs or of a single run, question by question: the same row of the same
data. Also reads the results of `asyncrl eval`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import parse
from asyncrl.errors import UNDECODABLE
from asyncrl.observe.held_out import SCORE_ROUNDING, bootstrap_interval
from asyncrl.observe.metrics import catalogue, label
from asyncrl.store.launches import Tree, differences, launch_at, launches_of
from asyncrl.store.reader import RunReader

SHOWN_QUESTIONS = 50  # lost questions of a mode, and as many won questions
# Configuration keys and sections that decide how episodes are judged.
JUDGING_KEYS = (
    *("data.columns.", "data.system_prompt.", "data.test.", "model.template.", "validation.success."),
    *("rollout.environment.", "rollout.max_new_tokens.", "rollout.max_tokens.", "rollout.max_turns."),
    *("rollout.reward.", "rollout.tools."),
)
# The answer of the first uid. An episode that failed at every attempt has the lowest score, at most 0: see
# observe/held_out.py.
QUESTIONS_QUERY = """WITH played AS (
    SELECT uid, group_id, mode, score, components, min(0, ifnull(min(score) OVER (), 0)) AS lowest
    FROM episodes WHERE kind = 'held out' AND step = ?)
SELECT mode, sample, min(e.uid), question, truth, ifnull(answer, ''), avg(ifnull(score, lowest)),
    avg(ifnull(coalesce(components ->> '$.acc', score) >= ?, 0)) >= 0.5
    FROM played e JOIN questions USING (group_id) LEFT JOIN answers a ON a.uid = e.uid
    GROUP BY mode, sample"""
COMPONENTS_QUERY = """SELECT mode, sample, key, avg(value)
    FROM episodes JOIN questions USING (group_id), json_each(components)
    WHERE kind = 'held out' AND step = ? GROUP BY mode, sample, key"""
FAILED_QUERY = """SELECT count(*) FROM episodes
    WHERE kind = 'held out' AND step = ? AND state = 'failed'"""
STEPS_QUERY = "SELECT DISTINCT step FROM episodes WHERE kind = 'held out' ORDER BY step"
# Prefixes of keys in evaluation.json.
ALL_PREFIX = "val-core/all/"
TASK_PREFIX = "val-task/"
_decode_evaluation = msgspec.json.Decoder(dict[str, dict[str, float]]).decode


class Answered(msgspec.Struct):
    """A question of a validation: the first episode, means over all episodes, and whether at least half of
    the episodes were `right`."""

    uid: str
    question: str
    truth: str
    answer: str
    score: float
    right: int
    components: dict[str, float] = {}


Pair = tuple[Answered, Answered]


class Side(NamedTuple):
    """A validation of a run. `validation_steps`: the steps of all validations of the run."""

    step: int
    validation_steps: list[int]
    config: Tree
    answered_by_row: Mapping[tuple[str, int], Answered]
    failed_episodes: int


def compare(runs: Sequence[Path], steps: Sequence[int | None]) -> dict[str, Any]:
    """Compare two validations. `steps`: the steps of the validations; None: the last validation; of a single
    run, the first and the last."""
    default_positions = (0 if runs[0] == runs[1] else -1), -1
    sides = [
        _read_side(run, step, position)
        for run, step, position in zip(runs, steps, default_positions, strict=True)
    ]
    first_answers, second_answers = (side.answered_by_row for side in sides)
    shared_pairs = defaultdict[str, list[Pair]](list)
    for (mode, sample_row), first in first_answers.items():
        second = second_answers.get((mode, sample_row))
        if second and first.question == second.question and first.truth == second.truth:
            shared_pairs[mode].append((first, second))

    differing_keys = [
        key for key in differences([side.config for side in sides]) if f"{key}.".startswith(JUDGING_KEYS)
    ]
    warnings: list[str] = []
    if differing_keys:
        warnings.append(
            f"The scores are not comparable: the configurations differ in {', '.join(differing_keys)}"
        )

    question_count = len(first_answers.keys() | second_answers.keys())
    if unshared_count := question_count - sum(map(len, shared_pairs.values())):
        warnings.append(f"Questions that differ between the validations (left out): {unshared_count}")

    warnings += [
        f"Episodes of step {side.step} that failed or did not finish in time (counted as wrong): "
        f"{side.failed_episodes}"
        for side in sides
        if side.failed_episodes
    ]

    return {
        "steps": [side.step for side in sides],
        "validations": [side.validation_steps for side in sides],
        "modes": [{"mode": mode, **_compare_pairs(pairs)} for mode, pairs in shared_pairs.items()],
        "warnings": warnings,
    }


def _read_side(run: Path, step: int | None, default_position: int) -> Side:
    with closing(RunReader.open(run)) as reader:
        validation_steps = [validation_step for (validation_step,) in reader.rows(STEPS_QUERY)]
        if step is None:
            step = (validation_steps or [0])[default_position]

        config = launch_at(launches_of(run), step + 1).config
        rows = reader.rows(QUESTIONS_QUERY, step, parse(config).validation.success - SCORE_ROUNDING)
        answered_by_row = {(mode, sample_row): Answered(*fields) for mode, sample_row, *fields in rows}
        for mode, sample_row, name, value in reader.rows(COMPONENTS_QUERY, step):
            if answered := answered_by_row.get((mode, sample_row)):  # may have ended since the first query
                answered.components[name] = value

        failed_episodes = reader.rows(FAILED_QUERY, step)[0][0]
        return Side(step, validation_steps, config, answered_by_row, failed_episodes)


def _compare_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Compare scores of a mode and the components; list flipped questions, the largest change first."""
    component_pairs = defaultdict[str, list[tuple[float, float]]](list)
    for first, second in pairs:
        for name in first.components.keys() & second.components.keys():
            component_pairs[name].append((first.components[name], second.components[name]))

    by_change = sorted(pairs, key=lambda pair: pair[1].score - pair[0].score)
    lost_pairs, won_pairs = (
        [
            (first, second)
            for first, second in by_change[::direction]
            if direction * (first.right - second.right) > 0
        ]
        for direction in (1, -1)
    )

    return paired_statistics([(first.score, second.score) for first, second in pairs]) | {
        "components": {name: paired_statistics(component_pairs[name]) for name in sorted(component_pairs)},
        "flips": {"lost": len(lost_pairs), "won": len(won_pairs)},
        "lost": lost_pairs[:SHOWN_QUESTIONS],
        "won": won_pairs[:SHOWN_QUESTIONS],
    }


def paired_statistics(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the mean difference between second and first, with an interval over questions."""
    changes = [second - first for first, second in pairs]
    return {
        "questions": len(pairs),
        "means": [fmean(scores) for scores in zip(*pairs, strict=True)],
        "difference": fmean(changes),
        "interval": bootstrap_interval(changes),
        "wins": sum(change > SCORE_ROUNDING for change in changes),
        "losses": sum(change < -SCORE_ROUNDING for change in changes),
    }


def measure_title(key: str) -> str:
    """Return the label that a measure of an evaluation has in training, too; else mode and measure."""
    return label(key) if key in catalogue() else key.removeprefix(ALL_PREFIX)


def evaluation_measures(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of `asyncrl eval` by mode and measure, `sampled/pass@4`: the mean with an interval
    over questions, and the mean of each task. Nothing for a training run."""
    evaluation: dict[str, dict[str, float]] = {}
    with suppress(FileNotFoundError, *UNDECODABLE):
        evaluation = _decode_evaluation((run_dir / "evaluation.json").read_bytes())
    task_means = defaultdict[str, dict[str, float]](dict)
    for key, measured in evaluation.items():
        if key.startswith(TASK_PREFIX):
            task, mode, measure = key.removeprefix(TASK_PREFIX).rsplit("/", 2)
            task_means[f"{mode}/{measure}"][task] = measured["mean"]

    for key, measured in evaluation.items():
        if not key.startswith(ALL_PREFIX):
            continue

        measure_name = key.removeprefix(ALL_PREFIX)
        interval = (measured["low"], measured["high"]) if "low" in measured else None
        after_training = {
            "value": measured["mean"],
            "interval": interval,
            "step": 0,
            "questions": measured.get("samples", 0),
        }
        unit = "" if "mean@" in measure_name or measure_name == "nll" else "share"
        yield {
            "label": measure_name,
            "title": measure_title(key),
            "unit": unit,
            "curve": [],
            "after": after_training,
            "tasks": task_means[measure_name],
        }
