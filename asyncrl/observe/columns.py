"""Reads the metrics of a run as columns of numbers, as their file grows."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.observe.metrics import STEP_SECONDS, Row

CHUNK = 1 << 18  # bytes of the file that are decoded at a time
STEP = "training/step"


class Measured:
    """The metrics of a run, read from their file as it grows: of each name a number for each row, NaN where
    there is none. In single precision: 50,000 steps of 200 metrics are 40 MB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read = 0
        self._rows = {STEP: array("f")}

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
        steps = self._row(STEP)
        trained = ~np.isnan(self._row(STEP_SECONDS))
        order = np.lexsort((trained, steps))
        self.steps, place, counts = np.unique(steps[order], return_inverse=True, return_counts=True)
        last = np.cumsum(counts) - 1
        earlier = np.delete(np.arange(len(order)), last)
        self._last = order[last]
        self._earlier = order[earlier]
        self._place = place[earlier]

    def _row_of(self, line: bytes) -> Sequence[float]:
        """Of each name a number. A line that cannot be decoded has NaN, which JSON has not, or was cut by a
        crash."""
        row: Row = {}
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError:
            with suppress(ValueError):
                row = json.loads(line)
        if STEP in row and row.keys() - self._rows.keys():
            nothing = self._row("").tobytes()
            self._rows |= {name: array("f", nothing) for name in row if name not in self._rows}
        return [row.get(name, math.nan) for name in self._rows] if STEP in row else ()

    def _row(self, name: str) -> np.ndarray:
        return np.array(self._rows.get(name) or np.full(len(self._rows[STEP]), math.nan, "f"))

    def values(self, name: str) -> np.ndarray:
        """One for each of `steps`. A step that was repeated after a crash counts as it was last, with the
        validation that judged it; only what a validation alone has is taken of it."""
        row = self._row(name)
        values = row[self._last]
        earlier = row[self._earlier]
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
