"""Makes columns for charts of a run's metrics, and marks of what happened."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import defstruct
from msgspec.structs import astuple

from asyncrl.config import leaves
from asyncrl.errors import AsyncrlError
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import WINDOW, alerts
from asyncrl.observe.metrics import Row
from asyncrl.store.launches import described, launches_of
from asyncrl.store.reader import RunReader

POINTS = 1000  # places of a curve that a page is sent; a longer stretch is thinned
LOOKS = 100  # places at which a run is searched for alerts
CHUNK = 1 << 18  # bytes of the file that are decoded at a time
LOST = ("rollout/attempts_failed/worker_lost", "rollout/attempts_failed/engine_lost")
STEP, PLAYED = "training/step", "val-aux/episodes"
Z = 1.96  # of a 95% interval


class Measured:
    """The metrics of a run, read from their file as it grows: of each name a number for each row, NaN where
    there is none. In single precision: 50,000 steps of 200 metrics are 40 MB."""

    def __init__(self, path: Path) -> None:
        self._path, self.read = path, 0
        self._rows = {STEP: array("f")}
        self._decode = _decoder(self._rows)

    def update(self) -> None:
        """Read what was written since."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self.read)
            while lines := [line for line in file.readlines(CHUNK) if line.endswith(b"\n")]:
                self.read += sum(map(len, lines))
                file.seek(self.read)  # the last line may have been under way
                rows = [row for line in lines if (row := self._row_of(line))]
                columns = zip_longest(*rows, fillvalue=math.nan)  # earlier ones may lack the newest names
                for values, more in zip(self._rows.values(), columns, strict=False):
                    values.extend(more)
        steps, trained = self._row(STEP), ~np.isnan(self._row(metric.STEP_SECONDS))
        order = np.lexsort((trained, steps))
        self.steps, place, counts = np.unique(steps[order], return_inverse=True, return_counts=True)
        last = np.cumsum(counts) - 1
        earlier = np.delete(np.arange(len(order)), last)
        self._last, self._earlier, self._place = order[last], order[earlier], place[earlier]

    def _row_of(self, line: bytes) -> Sequence[float]:
        """Of each name a number. A line that cannot be decoded has new names, or NaN, which JSON has not, or
        was cut by a crash."""
        with suppress(msgspec.DecodeError):
            return astuple(self._decode(line))
        row: Row = {}
        with suppress(ValueError):
            row = json.loads(line)
        if STEP in row and row.keys() - self._rows.keys():
            nothing = self._row("").tobytes()
            self._rows |= {name: array("f", nothing) for name in row if name not in self._rows}
            self._decode = _decoder(self._rows)
        return [row.get(name, math.nan) for name in self._rows] if STEP in row else ()

    def _row(self, name: str) -> np.ndarray:
        return np.array(self._rows.get(name) or np.full(len(self._rows[STEP]), math.nan, "f"))

    def values(self, name: str) -> np.ndarray:
        """One for each of `steps`. A step that was repeated after a crash counts as it was last, with the
        validation that judged it; only what a validation alone has is taken of it."""
        row = self._row(name)
        values, earlier = row[self._last], row[self._earlier]
        missing = np.isnan(values[self._place]) & ~np.isnan(earlier)
        values[self._place[missing]] = earlier[missing]  # of several the last one
        return values

    def having(self, *names: str) -> np.ndarray:
        """The places of steps at which one of these is known."""
        return np.flatnonzero(np.any([~np.isnan(self.values(name)) for name in names], axis=0))

    def rows(self, places: np.ndarray) -> list[Row]:
        some = {name: self.values(name)[places].tolist() for name in self._rows}
        rows = [dict(zip(some, row, strict=True)) for row in zip(*some.values(), strict=True)]
        return [{name: value for name, value in row.items() if not math.isnan(value)} for row in rows]

    def known(self) -> tuple[set[str], set[str]]:
        """All names, and those that are not always 0."""
        return {*self._rows}, {name for name in self._rows if np.any(np.nan_to_num(self._row(name)))}


def _decoder(names: Iterable[str]) -> Callable[[bytes], msgspec.Struct]:
    """Make what decodes rows that have only these names, in half the time that dictionaries take."""
    renamed = {f"field{number}": name for number, name in enumerate(names)}
    fields = [(field, float, math.nan) for field in renamed]
    row = defstruct("Row", fields, rename=renamed, forbid_unknown_fields=True)
    return msgspec.json.Decoder(row).decode


def series(
    columns: Measured, by: str = "step", since: float | None = None, until: float | None = None
) -> dict[str, Any]:
    """`columns`: of each metric a value or None for each place. `step`, `seconds` and `tokens` (trained so
    far) are what charts have as x, and `by` that of `since` and `until`. Of a stretch of more than POINTS
    steps there are the least and the highest value of each bucket, and validations."""
    tokens = np.nancumsum(columns.values("trainer/model_tokens"))
    axes = {"step": columns.steps, "seconds": columns.values("time_s"), "tokens": tokens}
    x = np.maximum.accumulate(np.nan_to_num(axes.get(by, columns.steps)))
    start = 0 if since is None else max(0, int(np.searchsorted(x, since)) - 1)  # lines go on to the edges
    end = len(x) if until is None else min(len(x), int(np.searchsorted(x, until, "right")) + 1)
    edges = np.linspace(start, end, POINTS // 2 + 1).astype(int)
    thin, validated = end - start > POINTS, columns.having(*metric.HELD_OUT)
    slots = np.stack([edges[:-1], edges[1:] - 1], 1).ravel() if thin else np.arange(start, end)
    places = np.union1d(slots, _some(validated[(validated >= start) & (validated < end)]))

    def shown(name: str) -> list[float | None]:
        column, found = columns.values(name), np.full(len(x), math.nan)
        if not thin or name.startswith("val-"):
            return _listed(column[places])
        low, high = (pick.reduceat(column[:end], edges[:-1]) for pick in (np.fmin, np.fmax))
        rising = column[edges[1:] - 1] >= column[edges[:-1]]
        found[slots] = np.where(rising, [low, high], [high, low]).T.ravel()
        return _listed(found[places])

    names = [name for name in sorted(columns.known()[0] - {STEP}) if not name.startswith(metric.LAG_TOKENS)]
    known = {name: shown(name) for name in names}
    modes = [name for name in (metric.SAMPLED, metric.GREEDY) if name in known]
    played = [(count or 0.0) / len(modes) for count in known.get(PLAYED, [])] if modes else []
    for name in modes:
        pairs = [wilson(*one) for one in zip(known[name], played, strict=False)]
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
    """Names of both ends of the bands around a mean, the widest first, but for those that never change."""
    for name in known:
        base = name.removesuffix("mean")
        pairs = [(base + low, base + high) for low, high in metric.QUANTILES if name.endswith("/mean")]
        ends = [pair for pair in pairs if known.keys() >= {*pair}]
        if found := [pair for pair in ends if any(len({*known[end]} - {None}) > 1 for end in pair)]:
            yield name, found


def marks(run_dir: Path, columns: Measured) -> list[dict[str, Any]]:
    """What happened at a step: kind and text."""
    steps, trained = columns.steps.tolist(), columns.having(metric.STEP_SECONDS)
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


def wilson(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Wilson's 95% interval of a share of `count` episodes: 5 of 10 lie between 0.24 and 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z * Z / (2 * count)
    width = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    whole = 1 + Z * Z / count
    return (centre - width) / whole, (centre + width) / whole
