"""Reads what `asyncrl eval` found, for the tabs of one run and of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNDECODABLE

Evaluation = Mapping[str, Mapping[str, float]]  # by metric: `mean`, and most have `low`, `high`, `samples`

ALL, TASK = "val-core/all/", "val-task/"
_decode = msgspec.json.Decoder(dict[str, dict[str, float]]).decode


def evaluation_of(run_dir: Path) -> Evaluation:
    """{} of a run that is none."""
    with suppress(FileNotFoundError, *UNDECODABLE):
        return _decode((run_dir / "evaluation.json").read_bytes())
    return {}


def measures(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """By mode and measure, `sampled/pass@4`: its numbers, and `tasks`: the mean of each."""
    tasks = defaultdict[str, dict[str, float]](dict)
    for name, numbers in evaluation.items():
        if name.startswith(TASK):
            task, mode, measure = name.removeprefix(TASK).rsplit("/", 2)
            tasks[f"{mode}/{measure}"][task] = numbers["mean"]
    whole = {name.removeprefix(ALL): found for name, found in evaluation.items() if name.startswith(ALL)}
    return {name: {**found, "tasks": tasks[name]} for name, found in whole.items()}
