"""Compares two validations, of two runs or of one, question by question: the same row of the same data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.config import parse
from asyncrl.observe.held_out import ROUNDING, interval
from asyncrl.store.launches import at, differences, launches_of
from asyncrl.store.reader import RunReader

FLIPPED = 50  # questions
SAME = ("data.", "reward", "validation.", "model.template", "tools", "environment", "rollout.max")
QUERY = """SELECT e.mode, q.sample, e.uid, e.score, q.question, a.answer, q.truth
    FROM episodes e JOIN questions q ON q.group_id = e.group_id LEFT JOIN answers a ON a.uid = e.uid
    WHERE e.kind IN ('held out', 'eval') AND e.step = ? ORDER BY e.uid"""
STEPS = "SELECT DISTINCT step FROM episodes WHERE kind IN ('held out', 'eval') ORDER BY step"

Question = tuple[str, int]  # mode and row
Played = dict[Question, list[dict[str, Any]]]


def compare(runs: tuple[Path, Path], steps: Sequence[int | None]) -> dict[str, Any]:
    """`steps`: those of the validations; None: the last one; of one run alone, first and last."""
    validations, played = list[list[int]](), list[Played]()
    for side, (run, step) in enumerate(zip(runs, steps, strict=True)):
        with closing(RunReader.open(run)) as reader:
            known = [one for (one,) in reader.rows(STEPS)]
            first = runs[0] == runs[1] and not side
            chosen = step if step is not None else (known[0 if first else -1] if known else 0)
            validations.append([chosen, *known])
            played.append(_played(reader, chosen))
    configs = [at(launches_of(run), own[0] + 1).config for run, own in zip(runs, validations, strict=True)]
    shared = [key for key in played[0] if _asks(played[0], key) == _asks(played[1], key)]
    pairs = {key: (_score(played[0][key]), _score(played[1][key])) for key in shared}
    success = parse(configs[0]).validation.success - ROUNDING
    flipped = [key for key, (a, b) in pairs.items() if (a >= success) != (b >= success)]
    flipped.sort(key=lambda key: (pairs[key][1] - pairs[key][0], key))  # what was lost first
    return {
        "steps": [own[0] for own in validations],
        "validations": [own[1:] for own in validations],
        "modes": [paired(mode, [pairs[key] for key in shared if key[0] == mode]) for mode in _modes(shared)],
        "flipped": [_beside(key, played) for key in flipped[:FLIPPED]],
        "flips": len(flipped),
        "warnings": _warnings(configs, played, len(shared)),
    }


def paired(mode: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The mean difference of the second from the first, with its interval over questions."""
    changes = [b - a for a, b in pairs]
    return {
        "mode": mode,
        "questions": len(pairs),
        "means": [fmean(side) for side in zip(*pairs, strict=True)],
        "difference": fmean(changes),
        "interval": interval(changes),
        "wins": sum(change > ROUNDING for change in changes),
        "losses": sum(change < -ROUNDING for change in changes),
    }


def _played(reader: RunReader, step: int) -> Played:
    found = defaultdict[Question, list[dict[str, Any]]](list)
    for mode, sample, uid, score, question, answer, truth in reader.rows(QUERY, step):
        texts = {"question": question, "answer": answer or "", "truth": truth}
        found[mode, sample].append({"uid": uid, "score": score or 0.0, **texts})
    return dict(found)


def _asks(played: Played, key: Question) -> tuple[Any, Any] | None:
    return (played[key][0]["question"], played[key][0]["truth"]) if key in played else None


def _score(episodes: Sequence[dict[str, Any]]) -> float:
    return fmean(one["score"] for one in episodes)


def _modes(keys: Sequence[Question]) -> list[str]:
    return sorted({mode for mode, _ in keys})


def _beside(key: Question, played: Sequence[Played]) -> dict[str, Any]:
    return {"mode": key[0], "sample": key[1], "sides": [side[key][0] for side in played]}


def _warnings(configs: Sequence[Any], played: Sequence[Played], shared: int) -> list[str]:
    keys = [key for key in differences(configs) if key.startswith(SAME)]
    found = [f"Not judged alike: the configurations differ in {', '.join(keys)}"] if keys else []
    alone = len(played[0].keys() | played[1].keys()) - shared
    return found + [f"{alone} questions are not the same in both, and left out"] * (alone > 0)
