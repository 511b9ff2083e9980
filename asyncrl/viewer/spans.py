"""The spans of a run's timeline in columns, read once, and then only what was added.

    timeline/*.jsonl ──► (process, row) ──► columns: start, end, name, calls, seconds, step, micro, ...

A row is a line of a picture, and belongs to a process. What a trainer rank does follows one after another and
is one row; of other processes, where many tasks run at once, each name is a row of its own. Spans that say
which engine they concern are in a row of that one: a push by the coordinator, the turns that a worker has
sampled on a server.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.observe.timeline import BUSY, Line, TimelineFile, files
from asyncrl.runtime.busy_timer import DECODE
from asyncrl.runtime.weight_loader import LOAD

MOST_ROWS = 24  # of one process; names come from users' tools, too. More are joined as OTHER
OTHER = "others"
WORK, HELD = "work", "version"  # rows: a trainer's, and the version that an engine holds
COLUMNS = {"start": "d", "end": "d", "seconds": "d", "name": "i", "text": "i", "calls": "q", "step": "q"}
COLUMNS |= {"micro": "q", "epoch": "q"}  # with their types
PROCESS = {"rollout": "worker"}  # what people call it, by the role in a file's name


class Columns:
    """The spans of one row, in the order in which they ended. `names` and `texts` number what is in them."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.texts: dict[str, int] = {"": 0}
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in COLUMNS.items()}

    def append(self, line: Line, name: str, text: str) -> None:
        epoch, version = line.version
        seconds = line.end - line.start if line.seconds < 0 else line.seconds
        named = self.names.setdefault(name, len(self.names)), self.texts.setdefault(text, len(self.texts))
        row = (*named, line.calls, line.step if epoch < 0 else version, line.micro, epoch)
        for column, value in zip(self._columns.values(), (line.start, line.end, seconds, *row), strict=True):
            column.append(value)

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies: the columns may grow meanwhile."""
        return {name: np.array(column) for name, column in self._columns.items()}


class Spans:
    """All spans of a run. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, TimelineFile] = {}
        self.rows: dict[tuple[str, str], Columns] = {}  # by process and row
        self._count: dict[str, int] = {}  # rows of each process

    def update(self) -> None:
        """Read what was added since the last call. Raises OSError."""
        for file in files(self._run_dir):
            file = self._files.setdefault(file.path, file)
            _, _, index = file.path.stem.rpartition("-")
            name = file.role if file.role == "coordinator" else f"{PROCESS.get(file.role, file.role)} {index}"
            for line in file.added():
                self._add(file.role, name, line)

    def arrays(self) -> dict[tuple[str, str], dict[str, np.ndarray]]:
        """The columns of all rows. A version is held until the next one; the last, to the end of what its
        process has recorded."""
        found = {key: columns.arrays() for key, columns in self.rows.items()}
        ends: dict[str, float] = {}
        for (process, _), row in found.items():
            ends[process] = max(ends.get(process, 0.0), float(row["end"].max()))
        for (process, title), row in found.items():
            if title.startswith(HELD):
                order = np.argsort(row["start"], kind="stable")
                row.update({name: column[order] for name, column in row.items()})
                row["end"] = np.append(row["start"][1:], max(ends[process], row["start"][-1]))
                row["seconds"] = row["end"] - row["start"]
        return found

    def _add(self, role: str, of: str, line: Line) -> None:
        process, row, text = of, line.name, line.error
        decoding, on, server = line.name.partition(f"{DECODE} on ")
        if on and not decoding:
            process, row, text = server, DECODE, of
        elif role in BUSY and DECODE not in BUSY[role]:
            row = WORK
        elif line.name == LOAD:
            if not line.error:  # from here on the engine holds it: an event, of which the next is the end
                at = msgspec.structs.replace(line, start=line.end)
                self._row(process, _of_lane(HELD, line)).append(at, HELD, "")
            row = _of_lane(LOAD, line)
        elif line.engine:
            process = line.engine
        name = DECODE if row == DECODE else line.name
        self._row(process, row).append(line, name, text)

    def _row(self, process: str, row: str) -> Columns:
        if (process, row) not in self.rows:
            if self._count.get(process, 0) >= MOST_ROWS:
                row = OTHER
            self._count[process] = self._count.get(process, 0) + 1
        return self.rows.setdefault((process, row), Columns())


def _of_lane(row: str, line: Line) -> str:
    """An embedded engine has a second one beside it for validation."""
    return f"{row} (validation)" if line.engine == "eval" else row
