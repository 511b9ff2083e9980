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

CHUNK_BYTES = 1 << 18  # bytes of the file that are decoded at a time
STEP_NAME = "training/step"


class MetricColumns:
    """Holds the metrics of a run, read from the growing file: for each name a number of each row, NaN for
    missing numbers. In single precision: 50,000 steps of 200 metrics are 40 MB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self._columns = {STEP_NAME: array("f")}

    def update(self) -> None:
        """Read the rows written since the last update."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self.bytes_read)
            while lines := [line for line in file.readlines(CHUNK_BYTES) if line.endswith(b"\n")]:
                self.bytes_read += sum(map(len, lines))
                file.seek(self.bytes_read)  # the last line may be incomplete
                rows = [row for line in lines if (row := self._decode_row(line))]
                columns = zip_longest(*rows, fillvalue=math.nan)  # earlier rows may lack the newest names
                for values, new_values in zip(self._columns.values(), columns, strict=False):
                    values.extend(new_values)

        # Of the rows of a step the last is the one that trained, if there is one; others are earlier rows.
        steps = self._column(STEP_NAME)
        trained = ~np.isnan(self._column(STEP_SECONDS))
        order = np.lexsort((trained, steps))
        self.steps, step_indexes, counts = np.unique(steps[order], return_inverse=True, return_counts=True)

        last_positions = np.cumsum(counts) - 1
        earlier_positions = np.delete(np.arange(len(order)), last_positions)
        self._last_rows = order[last_positions]
        self._earlier_rows = order[earlier_positions]
        self._earlier_steps = step_indexes[earlier_positions]

    def _decode_row(self, line: bytes) -> Sequence[float]:
        """Return a number for each name; nothing for a row without a step, or a line cut by a crash. msgspec
        cannot decode the NaN that Python writes, so such lines are read by `json`."""
        row: Row = {}
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError:
            with suppress(ValueError):
                row = json.loads(line)

        if STEP_NAME in row and row.keys() - self._columns.keys():
            missing_values = self._column("").tobytes()
            self._columns |= {name: array("f", missing_values) for name in row if name not in self._columns}

        return [row.get(name, math.nan) for name in self._columns] if STEP_NAME in row else ()

    def _column(self, name: str) -> np.ndarray:
        return np.array(self._columns.get(name) or np.full(len(self._columns[STEP_NAME]), math.nan, "f"))

    def values(self, name: str) -> np.ndarray:
        """Return a value for each of `steps`. Of a step that was repeated after a crash the last row counts;
        numbers that only earlier rows have, such as a validation's, are added."""
        column = self._column(name)
        values = column[self._last_rows]
        earlier_values = column[self._earlier_rows]
        is_missing = np.isnan(values[self._earlier_steps]) & ~np.isnan(earlier_values)
        values[self._earlier_steps[is_missing]] = earlier_values[is_missing]  # of several rows the last
        return values

    def steps_having(self, *names: str) -> np.ndarray:
        """Return the indexes of the steps at which one of these metrics is known."""
        return np.flatnonzero(np.any([~np.isnan(self.values(name)) for name in names], axis=0))

    def rows(self, step_indexes: np.ndarray) -> list[Row]:
        columns = {name: self.values(name)[step_indexes].tolist() for name in self._columns}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [{name: value for name, value in row.items() if not math.isnan(value)} for row in rows]

    def metric_names(self) -> tuple[set[str], set[str]]:
        """Return all names, and the names whose values are not always 0."""
        return {*self._columns}, {name for name in self._columns if np.any(np.nan_to_num(self._column(name)))}
