"""Compares two validations, of two runs or of one, question by question: the same row of the same data. Also
reads the results of `asyncrl eval`."""

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
from asyncrl.observe.held_out import ROUNDING, interval
from asyncrl.store.launches import Tree, at, differences, launches_of
from asyncrl.store.reader import RunReader

SHOWN = 50  # questions of a mode that were lost, and that were won
SAME = (  # keys, and what is in them, by which episodes are judged
    *("data.columns.", "data.system_prompt.", "data.test.", "model.template.", "validation.success."),
    *("rollout.environment.", "rollout.max_new_tokens.", "rollout.max_tokens.", "rollout.max_turns."),
    *("rollout.reward.", "rollout.tools."),
)
# The answer is the first uid's. An episode that failed at every attempt has the lowest score, at most 0: see
# observe/held_out.py.
QUESTIONS = """WITH played AS (
    SELECT uid, group_id, mode, score, components, min(0, ifnull(min(score) OVER (), 0)) AS lowest
    FROM episodes WHERE kind = 'held out' AND step = ?)
SELECT mode, sample, min(e.uid), question, truth, ifnull(answer, ''), avg(ifnull(score, lowest)),
    avg(ifnull(coalesce(components ->> '$.acc', score) >= ?, 0)) >= 0.5
    FROM played e JOIN questions USING (group_id) LEFT JOIN answers a ON a.uid = e.uid
    GROUP BY mode, sample"""
COMPONENTS = """SELECT mode, sample, key, avg(value)
    FROM episodes JOIN questions USING (group_id), json_each(components)
    WHERE kind = 'held out' AND step = ? GROUP BY mode, sample, key"""
FAILED = """SELECT count(*) FROM episodes
    WHERE kind = 'held out' AND step = ? AND state = 'failed'"""
STEPS = "SELECT DISTINCT step FROM episodes WHERE kind = 'held out' ORDER BY step"
# in evaluation.json
ALL = "val-core/all/"
TASK = "val-task/"
_evaluation = msgspec.json.Decoder(dict[str, dict[str, float]]).decode


class Answered(msgspec.Struct):
    """Holds a question of a validation: its first episode, means over all, and if half were `right`."""

    uid: str
    question: str
    truth: str
    answer: str
    score: float
    right: int
    components: dict[str, float] = {}


Pair = tuple[Answered, Answered]


class Side(NamedTuple):
    """Holds a validation of a run. `played`: by mode and row."""

    step: int
    known: list[int]  # the steps of all its validations
    config: Tree
    played: Mapping[tuple[str, int], Answered]
    failed: int


def compare(runs: Sequence[Path], steps: Sequence[int | None]) -> dict[str, Any]:
    """`steps`: those of the validations; None: the last one; of one run alone, first and last."""
    places = (0 if runs[0] == runs[1] else -1), -1
    sides = [_side(*one) for one in zip(runs, steps, places, strict=True)]
    first, second = (side.played for side in sides)
    shared = defaultdict[str, list[Pair]](list)
    for (mode, row), one in first.items():
        other = second.get((mode, row))
        if other and (one.question, one.truth) == (other.question, other.truth):
            shared[mode].append((one, other))
    keys = [key for key in differences([side.config for side in sides]) if f"{key}.".startswith(SAME)]
    warnings = [f"Not judged alike: the configurations differ in {', '.join(keys)}"] if keys else []
    if alone := len(first.keys() | second.keys()) - sum(map(len, shared.values())):
        warnings.append(f"{alone} questions are not the same in both, and left out")
    warnings += [
        f"{side.failed} episodes of step {side.step} failed, or were not over in time: they count as wrong"
        for side in sides
        if side.failed
    ]
    return {
        "steps": [side.step for side in sides],
        "validations": [side.known for side in sides],
        "modes": [{"mode": mode, **_compared(pairs)} for mode, pairs in shared.items()],
        "warnings": warnings,
    }


def _side(run: Path, step: int | None, place: int) -> Side:
    with closing(RunReader.open(run)) as reader:
        known = [one for (one,) in reader.rows(STEPS)]
        step = step if step is not None else (known or [0])[place]
        config = at(launches_of(run), step + 1).config
        rows = reader.rows(QUESTIONS, step, parse(config).validation.success - ROUNDING)
        played = {(mode, row): Answered(*one) for mode, row, *one in rows}
        for mode, row, name, value in reader.rows(COMPONENTS, step):
            if one := played.get((mode, row)):  # none of one that was over since
                one.components[name] = value
        return Side(step, known, config, played, reader.rows(FAILED, step)[0][0])


def _compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Compare scores of a mode and their components; list flipped questions, the largest change first."""
    parts = defaultdict[str, list[tuple[float, float]]](list)
    for a, b in pairs:
        for name in a.components.keys() & b.components.keys():
            parts[name].append((a.components[name], b.components[name]))
    rising = sorted(pairs, key=lambda pair: pair[1].score - pair[0].score)
    lost, won = ([(a, b) for a, b in rising[::sign] if sign * (a.right - b.right) > 0] for sign in (1, -1))
    return paired([(a.score, b.score) for a, b in pairs]) | {
        "components": {name: paired(parts[name]) for name in sorted(parts)},
        "flips": {"lost": len(lost), "won": len(won)},
        "lost": lost[:SHOWN],
        "won": won[:SHOWN],
    }


def paired(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the mean difference of the second from the first, with its interval over questions."""
    changes = [b - a for a, b in pairs]
    return {
        "questions": len(pairs),
        "means": [fmean(side) for side in zip(*pairs, strict=True)],
        "difference": fmean(changes),
        "interval": interval(changes),
        "wins": sum(change > ROUNDING for change in changes),
        "losses": sum(change < -ROUNDING for change in changes),
    }


def measures(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of `asyncrl eval` by mode and measure, `sampled/pass@4`: the mean with its interval
    over questions, and the mean of each task. Nothing for another run."""
    numbers: dict[str, dict[str, float]] = {}
    with suppress(FileNotFoundError, *UNDECODABLE):
        numbers = _evaluation((run_dir / "evaluation.json").read_bytes())
    tasks = defaultdict[str, dict[str, float]](dict)
    for name in (name for name in numbers if name.startswith(TASK)):
        task, mode, measure = name.removeprefix(TASK).rsplit("/", 2)
        tasks[f"{mode}/{measure}"][task] = numbers[name]["mean"]
    for name, one in ((name.removeprefix(ALL), one) for name, one in numbers.items() if name.startswith(ALL)):
        interval = (one["low"], one["high"]) if "low" in one else None
        after = {"value": one["mean"], "interval": interval, "step": 0, "questions": one.get("samples", 0)}
        unit = "" if "mean@" in name or name == "nll" else "share"
        yield {"label": name, "unit": unit, "curve": [], "after": after, "tasks": tasks[name]}
