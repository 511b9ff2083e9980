"""Makes columns for charts of a run's metrics, and marks of what happened."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import leaves
from asyncrl.errors import AsyncrlError
from asyncrl.observe.alerts import WINDOW, alerts
from asyncrl.observe.metrics import (
    GREEDY,
    HELD_OUT,
    LAG_TOKENS,
    QUANTILES,
    SAMPLED,
    STEP_SECONDS,
    Row,
    figures,
)
from asyncrl.store.launches import described, launches_of
from asyncrl.store.reader import RunReader

POINTS = 1000  # places of a curve that a page is sent; a longer stretch is thinned
LOOKS = 100  # places at which a run is searched for alerts
LOST = ("rollout/attempts_failed/worker_lost", "rollout/attempts_failed/engine_lost")
STEP, PLAYED = "training/step", "val-aux/episodes"
Z = 1.96  # of a 95% interval


class Measured:
    """The metrics of a run, read from their file as it grows: of each name a number for each step, NaN where
    there is none. A step that was repeated after a crash counts as it was last, with the validation that
    judged it. In single precision: 50,000 steps of 200 metrics are 40 MB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._read, self._lost = 0, 0.0
        self._places, self.lost = dict[float, int](), dict[float, int]()  # attempts, by the step before
        self.named = {STEP: array("d")}

    def update(self) -> None:
        """Read what was written since. A shorter file is read from its start."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read:
                self._begin()
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._read += len(line)
                with suppress(ValueError, KeyError):  # cut by a crash
                    self._add(_decoded(line))

    def _add(self, row: Row) -> None:
        place = self._places.setdefault(row[STEP], len(self._places))
        for name in row.keys() - self.named.keys():
            self.named[name] = array("f", [math.nan]) * len(self.named[STEP])
        if place == len(self.named[STEP]):
            for name, column in self.named.items():
                column.append(row.get(name, math.nan))
        else:
            for name, value in row.items():
                if STEP_SECONDS in row or math.isnan(self.named[name][place]):
                    self.named[name][place] = value
        if LOST[0] in row:
            before, self._lost = self._lost, sum(row.get(name, 0.0) for name in LOST)
            if self._lost > before:
                self.lost[row[STEP]] = int(self._lost - before)

    def order(self) -> np.ndarray:
        """The places by step."""
        return np.argsort(np.array(self.named[STEP]), kind="stable")

    def rows(self, places: Sequence[int]) -> list[Row]:
        some = ({name: column[at] for name, column in self.named.items()} for at in places)
        return [{name: value for name, value in row.items() if not math.isnan(value)} for row in some]

    def steps(self) -> list[int]:
        """The places of steps that were trained, in their order."""
        seconds = self.named.get(STEP_SECONDS)
        return [at for at in self.order().tolist() if seconds and not math.isnan(seconds[at])]

    def known(self) -> tuple[set[str], set[str]]:
        """All names, and those that are not always 0."""
        return {*self.named}, {name for name, one in self.named.items() if np.any(np.nan_to_num(one))}

    @property
    def bytes(self) -> int:
        return sum(column.itemsize * len(column) for column in self.named.values())


def _decoded(line: bytes) -> Row:
    try:
        return msgspec.json.decode(line, type=dict[str, float])
    except msgspec.DecodeError:  # NaN, which JSON has not
        return json.loads(line)


def series(columns: Measured, since: float | None = None, until: float | None = None) -> dict[str, Any]:
    """`columns`: of each metric a value or None for each place, from a step to another. `step`, `seconds` and
    `tokens` (trained so far) are what charts have as x. Of a stretch of more than POINTS steps there are the
    least and the highest value of each bucket, and validations. `lags`: tokens taken by lag, of all steps."""
    order = columns.order()
    named = {name: np.array(column)[order] for name, column in columns.named.items()}
    steps = named[STEP]
    nothing = np.full(len(steps), math.nan)
    start = 0 if since is None else max(0, int(np.searchsorted(steps, since)) - 1)  # lines go on to the edges
    end = len(steps) if until is None else int(np.searchsorted(steps, until, "right")) + 1
    end = min(end, len(steps))
    edges = np.linspace(start, end, POINTS // 2 + 1).astype(int)
    thin = end - start > POINTS
    slots = np.stack([edges[:-1], edges[1:] - 1], 1).ravel() if thin else np.arange(start, end)
    held_out = {name: np.flatnonzero(~np.isnan(named[name])) for name in named if name.startswith("val-")}
    exact = {name: at for name, at in held_out.items() if len(at) <= POINTS // 2}
    places = np.unique(np.concatenate([slots, *exact.values()]).astype(int))
    places = places[(places >= start) & (places < end)]

    def shown(name: str) -> list[float | None]:
        column, found = named[name], np.full(len(steps), math.nan)
        if name in exact or not thin:
            return _listed(column[places])
        low, high = (pick.reduceat(column[:end], edges[:-1]) for pick in (np.fmin, np.fmax))
        rising = column[edges[1:] - 1] >= column[edges[:-1]]
        found[slots] = np.where(rising, [low, high], [high, low]).T.ravel()
        return _listed(found[places])

    lags = {int(name.removeprefix(LAG_TOKENS)): name for name in named if name.startswith(LAG_TOKENS)}
    known = {name: shown(name) for name in sorted(named.keys() - {STEP, *lags.values()})}
    modes = [name for name in (SAMPLED, GREEDY) if name in known]
    played = [(count or 0.0) / len(modes) for count in known.get(PLAYED, [])] if modes else []
    for name in modes:
        pairs = [wilson(*one) for one in zip(known[name], played, strict=False)]
        known[f"{name}/low"], known[f"{name}/high"] = ([pair[at] for pair in pairs] for at in (0, 1))
    tokens = np.nancumsum(named.get("trainer/model_tokens", nothing))
    return {
        "step": _listed(steps[places]),
        "seconds": _listed(named.get("time_s", nothing)[places]),
        "tokens": _listed(tokens[places]),
        "steps": len(steps),
        "columns": known,
        "bands": dict(_bands(known)),
        "lags": {lag: float(np.nansum(named[name])) for lag, name in sorted(lags.items())},
    }


def _listed(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _bands(known: Mapping[str, Sequence[float | None]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Names of both ends of the bands around a mean, the widest first, but for those that never change."""
    for name in known:
        base = name.removesuffix("mean") if name.endswith("/mean") else f"{name}/"
        pairs = [(base + low, base + high) for low, high in (*QUANTILES, ("low", "high"))]
        ends = [pair for pair in pairs if known.keys() >= {*pair}]
        if found := [pair for pair in ends if any(len({*known[end]} - {None}) > 1 for end in pair)]:
            yield name, found


def marks(run_dir: Path, columns: Measured) -> list[dict[str, Any]]:
    """What happened at a step: kind and text."""
    held_out = [columns.named[name] for name in HELD_OUT if name in columns.named]
    validated = [at for at in columns.order().tolist() if any(not math.isnan(one[at]) for one in held_out)]
    found = [(row[STEP], "validation", ", ".join(figures(HELD_OUT, row))) for row in columns.rows(validated)]
    again, lost, keys = dict[float, tuple[str, str]](), dict(columns.lost), dict[str, Any]()
    with suppress(AsyncrlError), closing(RunReader.open(run_dir)) as reader:
        again |= dict.fromkeys(reader.restarts(), ("restart", "started again"))
        launches = launches_of(run_dir)
        keys |= leaves(launches[-1].config)
        for old, new in pairwise(launches):
            again[new.step + 1] = "resume", f"resumed with {described(old.config, new.config)}"
    for step, (kind, text) in again.items():  # what was under way then is counted with the step before
        count = lost.pop(step - 1, 0)
        found.append((step, kind, text + f"; {count} attempts lost" * (count > 0)))
    found += [(step, "lost", f"{count} attempts lost with a worker") for step, count in lost.items()]
    steps, before = columns.steps(), set[str]()
    looks = np.linspace(WINDOW, len(steps), LOOKS).round().astype(int).tolist()
    for end in sorted({*looks}) if len(steps) >= WINDOW else ():
        places, until = {*steps[:WINDOW], *steps[end - WINDOW : end]}, columns.named[STEP][steps[end - 1]]
        rows = sorted(columns.rows([*places.union(validated)]), key=lambda row: row[STEP])
        now = alerts([row for row in rows if row[STEP] <= until], {}, keys)
        wrong = {one.name: one.what for one in now if one.level in ("bad", "warn")}
        found += [(until, "alert", f"{name}: {wrong[name]}") for name in wrong.keys() - before]
        before = {*wrong}
    return [{"step": int(step), "kind": kind, "text": text} for step, kind, text in sorted(found)]


def wilson(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Wilson's 95% interval of a share of `count` episodes: 5 of 10 lie between 0.24 and 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z * Z / (2 * count)
    width = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    whole = 1 + Z * Z / count
    return (centre - width) / whole, (centre + width) / whole
