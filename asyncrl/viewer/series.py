"""Makes columns for charts of a run's metrics, and marks of what happened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import leaves
from asyncrl.errors import AsyncrlError
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import WINDOW, alerts
from asyncrl.observe.columns import STEP, Measured
from asyncrl.observe.held_out import wilson
from asyncrl.store.launches import described, launches_of
from asyncrl.store.reader import RunReader

POINTS = 1000  # places of a curve that a page is sent; a longer stretch is thinned
LOOKS = 100  # places at which a run is searched for alerts
LOST = ("rollout/attempts_failed/worker_lost", "rollout/attempts_failed/engine_lost")


def series(
    columns: Measured, by: str = "step", since: float | None = None, until: float | None = None
) -> dict[str, Any]:
    """Return curves. `columns`: of each metric a value or None for each place. `step`, `seconds` and `tokens`
    (trained so far) are what charts have as x, and `by` that of `since` and `until`. Of a stretch of more
    than POINTS steps there are the least and the highest value of each bucket, and validations."""
    tokens = np.nancumsum(columns.values("trainer/model_tokens"), dtype=float)
    axes = {"step": columns.steps, "seconds": columns.values("time_s"), "tokens": tokens}
    x = np.maximum.accumulate(np.nan_to_num(axes.get(by, columns.steps)))
    start = 0 if since is None else max(0, int(np.searchsorted(x, since)) - 1)  # lines go on to the edges
    end = len(x) if until is None else min(len(x), int(np.searchsorted(x, until, "right")) + 1)
    edges = np.linspace(start, end, POINTS // 2 + 1).astype(int)
    thin = end - start > POINTS
    validated = columns.having(*metric.HELD_OUT)
    slots = np.stack([edges[:-1], edges[1:] - 1], 1).ravel() if thin else np.arange(start, end)
    places = np.union1d(slots, _some(validated[(validated >= start) & (validated < end)]))

    def shown(name: str) -> list[float | None]:
        column = columns.values(name)
        found = np.full(len(x), math.nan)
        if not thin or name.startswith("val-"):
            return _listed(column[places])
        low, high = (pick.reduceat(column[:end], edges[:-1]) for pick in (np.fmin, np.fmax))
        rising = column[edges[1:] - 1] >= column[edges[:-1]]
        found[slots] = np.where(rising, [low, high], [high, low]).T.ravel()
        return _listed(found[places])

    names = [name for name in sorted(columns.known()[0] - {STEP}) if not name.startswith(metric.LAG_TOKENS)]
    known = {name: shown(name) for name in names}
    modes = [name for name in (metric.SAMPLED, metric.GREEDY) if name in known]
    asked = known.get(metric.ASKED, [None] * len(places))
    for name in modes:
        pairs = [wilson(share, count or 0.0) for share, count in zip(known[name], asked, strict=True)]
        known[f"{name}/low"], known[f"{name}/high"] = ([pair[at] for pair in pairs] for at in (0, 1))
    return {
        **{name: _listed(values[places]) for name, values in axes.items()},
        "steps": len(x),
        "columns": known,
        "bands": {**dict(_bands(known)), **{name: [(f"{name}/low", f"{name}/high")] for name in modes}},
    }


def _some(places: np.ndarray) -> np.ndarray:
    return places[:: len(places) // (POINTS // 2) + 1]


def _listed(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _bands(known: Mapping[str, Sequence[float | None]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the names of both ends of the bands around a mean, the widest first; none that never changes."""
    for name in known:
        base = name.removesuffix("mean")
        pairs = [(base + low, base + high) for low, high in metric.QUANTILES if name.endswith("/mean")]
        ends = [pair for pair in pairs if known.keys() >= {*pair}]
        if found := [pair for pair in ends if any(len({*known[end]} - {None}) > 1 for end in pair)]:
            yield name, found


def marks(run_dir: Path, columns: Measured) -> list[dict[str, Any]]:
    """What happened at a step: kind and text."""
    steps = columns.steps.tolist()
    trained = columns.having(metric.STEP_SECONDS)
    looks = np.linspace(WINDOW, len(trained), LOOKS if len(trained) >= WINDOW else 0)
    windows = [trained[end - WINDOW : end] for end in np.unique(looks.astype(int))]
    validated = _some(columns.having(*metric.HELD_OUT))
    places = np.unique(np.concatenate([validated, *windows]))
    rows = dict(zip(places.tolist(), columns.rows(places), strict=True))
    judged = ((steps[at], metric.figures(metric.HELD_OUT, rows[at])) for at in validated.tolist())
    found = [(step, "validation", ", ".join(texts)) for step, texts in judged]
    counted = columns.having(LOST[0])
    counts = np.sum([np.nan_to_num(columns.values(name)[counted]) for name in LOST], axis=0)
    grown = zip(counted.tolist(), np.diff(counts, prepend=0.0).tolist(), strict=True)
    lost = "{:.0f} attempts lost with a worker".format
    found += [(steps[at], "lost", lost(count)) for at, count in grown if count > 0]
    keys = dict[str, Any]()
    with suppress(AsyncrlError), closing(RunReader.open(run_dir)) as reader:
        launches = launches_of(run_dir)
        keys |= leaves(launches[-1].config)
        again = dict.fromkeys(reader.restarts(), ("restart", "started again"))
        for old, new in pairwise(launches):
            again[new.step + 1] = "resume", f"resumed with {described(old.config, new.config)}"
        found += [(step, *what) for step, what in again.items()]
    before = set[str]()
    for last in (int(window[-1]) for window in windows):
        now = alerts([row for at, row in rows.items() if at <= last], {}, keys)
        wrong = {one.name: one.what for one in now if one.level in ("bad", "warn")}
        found += [(steps[last], "alert", f"{name}: {wrong[name]}") for name in wrong.keys() - before]
        before = {*wrong}
    return [{"step": int(step), "kind": kind, "text": text} for step, kind, text in sorted(found)]
