"""The picture of a run's timeline: a window in time, and nothing smaller than a pixel of it.

    timeline/*.jsonl ──► (process, row) ──► columns ──► window(from, to) ──► lanes: processes, rows, spans

A row is a line of the picture, and belongs to a process. What a trainer rank does follows one after another
and is one row; of other processes, where many tasks run at once, each name is a row of its own. Spans that
say which engine they concern are in a row of that one: a push by the coordinator, the turns that a worker has
sampled on a server. Files are read once, and then only what was added.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import BUSY, Line, TimelineFile, files
from asyncrl.runtime.activity import DECODE
from asyncrl.runtime.weight_loader import LOAD

PIXELS = 1500  # of a window's width, unless all rows together would have more than MOST_SPANS
MOST_SPANS = 15_000  # of about 45 bytes, so that an answer stays below 1 MB
MOST_TEXT = 120  # characters
MOST_ROWS = 24  # of one process; names come from users' tools, too. More are joined as OTHER
FARTHEST = 1e9  # seconds from the run's start that can be asked for
OTHER = "others"
WORK, HELD = "work", "version"  # rows: a trainer's, and the version that an engine holds
COLUMNS = {"start": "d", "end": "d", "seconds": "d", "name": "i", "text": "i", "calls": "q", "step": "q"}
COLUMNS |= {"micro": "q", "epoch": "q"}  # with their types
PROCESS = {"rollout": "worker"}  # what people call it, by the role in a file's name
ORDER = ("coordinator", "trainer", "worker")  # of processes; engines follow

Arrays = dict[str, np.ndarray]
Shown = tuple[float, float, int, int, float, str]


class LaneRow(msgspec.Struct):
    """A line of the picture. A span is [start, end, name, calls, seconds, text]. Its times are seconds since
    the window's start; `name` is the number of its name; `calls` how many calls or spans are in it, and
    `seconds` what they took together: on average seconds / (end - start) of them ran at once. `text`:
    details, "" for spans that were merged."""

    title: str
    spans: list[Shown]


class LaneProcess(msgspec.Struct):
    title: str
    rows: list[LaneRow]


class LaneWindow(msgspec.Struct, rename={"since": "from", "until": "to"}):
    """The whole run is from `start` to `end`, the window from `since` to `until`: seconds of `time.time`.
    Spans of less than `pixel` seconds are merged."""

    start: float
    end: float
    since: float
    until: float
    pixel: float
    names: list[str]
    processes: list[LaneProcess]


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

    def arrays(self) -> Arrays:
        """Copies: the columns may grow meanwhile."""
        return {name: np.array(column) for name, column in self._columns.items()}


class LaneReader:
    """Reads the timeline of one run, which may be under way. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, TimelineFile] = {}
        self._rows: dict[tuple[str, str], Columns] = {}  # by process and title

    def window(self, since: float | None = None, until: float | None = None) -> LaneWindow:
        """Return what lies between two times, in seconds since the run's start; all of it by default. Raises
        OSError, and ConfigError where a time is no number, or beyond FARTHEST."""
        if not all(time is None or abs(time) <= FARTHEST for time in (since, until)):  # nan neither
            raise ConfigError(f"lanes: from and to must be seconds since the start, within ±{FARTHEST:g}")
        self._update()
        rows = self._arrays()
        start = float(min((row["start"].min() for row in rows.values()), default=0.0))
        end = float(max((row["end"].max() for row in rows.values()), default=0.0))
        since = start if since is None else start + since
        until = end if until is None else start + until
        until, pixels = max(until, since + 1e-6), PIXELS
        while True:
            pixel = (until - since) / pixels
            names: dict[str, int] = {}
            lanes = {title: LaneProcess(title, []) for title in sorted({who for who, _ in rows}, key=_place)}
            for who, title in sorted(rows):
                spans = _merged(self._rows[who, title], rows[who, title], since, until, pixel, names)
                lanes[who].rows.append(LaneRow(title, spans))
            count = sum(len(row.spans) for lane in lanes.values() for row in lane.rows)
            if count <= MOST_SPANS or pixels < 2:
                return LaneWindow(start, end, since, until, pixel, list(names), list(lanes.values()))
            pixels //= 2

    def _update(self) -> None:
        """Read what was added since the last call."""
        for file in files(self._run_dir):
            file = self._files.setdefault(file.path, file)
            _, _, index = file.path.stem.rpartition("-")
            name = file.role if file.role == "coordinator" else f"{PROCESS.get(file.role, file.role)} {index}"
            for line in file.added():
                self._add(file.role, name, line)

    def _arrays(self) -> dict[tuple[str, str], Arrays]:
        """The columns of all rows. A version is held until the next one; the last, to the end of what its
        process has recorded."""
        found = {key: columns.arrays() for key, columns in self._rows.items()}
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
        lane = " (validation)" * (line.engine == "eval")  # an embedded engine has a second one for validation
        decoding, on, server = line.name.partition(f"{DECODE} on ")
        if on and not decoding:
            process, row, text = server, DECODE, of
        elif role in BUSY and DECODE not in BUSY[role]:
            row = WORK
        elif line.name == LOAD:
            if not line.error:  # from here on the engine holds it: an event, of which the next is the end
                self._row(process, HELD + lane).append(
                    msgspec.structs.replace(line, start=line.end), HELD, ""
                )
            row = LOAD + lane
        elif line.engine:
            process = line.engine
        self._row(process, row).append(line, DECODE if row == DECODE else line.name, text)

    def _row(self, process: str, title: str) -> Columns:
        key = process, title
        if key not in self._rows and sum(who == process for who, _ in self._rows) >= MOST_ROWS:
            key = process, OTHER
        return self._rows.setdefault(key, Columns())


def _place(title: str) -> tuple[int, str, int]:
    """Order processes: the coordinator, trainer ranks, workers, engines, each by number."""
    kind, _, number = title.partition(" ")
    place = ORDER.index(kind) if kind in ORDER else len(ORDER)
    return place, kind, int(number) if number.isdigit() else 0


def _merged(
    columns: Columns, row: Arrays, since: float, until: float, pixel: float, names: dict[str, int]
) -> list[Shown]:
    """The spans of a row in a window. Those below a pixel are joined pixel by pixel, under the name that took
    the most of it."""
    inside = (row["end"] >= since) & (row["start"] <= until)
    row = {name: column[inside] for name, column in row.items()}
    number, texts = [names.setdefault(name, len(names)) for name in columns.names], list(columns.texts)
    digits = max(0, 2 - int(np.floor(np.log10(pixel))))

    def span(start: float, end: float, name: int, calls: int, seconds: float, text: str) -> Shown:
        times = round(float(start), digits), round(float(end), digits)
        return (*times, number[int(name)], int(calls), round(float(seconds), 4), text)

    long = row["end"] - row["start"] >= pixel
    found = list[Shown]()
    for i in np.flatnonzero(long).tolist():
        start, end, seconds = (row[name][i] for name in ("start", "end", "seconds"))
        text = _detail(texts, row, i)
        found.append(span(start - since, end - since, row["name"][i], row["calls"][i], seconds, text))
    short = {name: column[~long] for name, column in row.items()}
    if not len(short["end"]):
        return sorted(found)
    bins = np.floor((short["start"] - since) / pixel).astype(np.int64)
    pixels, place = np.unique(bins, return_inverse=True)
    sums, calls = np.bincount(place, short["seconds"]), np.bincount(place, short["calls"])
    taken = np.zeros((len(pixels), len(number)))
    np.add.at(taken, (place, short["name"]), short["seconds"])
    best, last = taken.argmax(1), dict(zip(place.tolist(), range(len(place)), strict=True))
    for n, at in enumerate(pixels.tolist()):
        text = _detail(texts, short, last[n]) if calls[n] <= 1 else ""
        found.append(span(at * pixel, (at + 1) * pixel, best[n], calls[n], sums[n], text))
    return sorted(found)


def _detail(texts: list[str], row: Arrays, index: int) -> str:
    """Describe one span beside its name."""
    step, micro, epoch = (int(row[name][index]) for name in ("step", "micro", "epoch"))
    words = [f"v{step} (epoch {epoch})" if epoch >= 0 else f"step {step}"] if step >= 0 else []
    words += [f"micro-batch {micro}"] if micro >= 0 else []
    text = texts[row["text"][index]]
    return ", ".join([*words, text[:MOST_TEXT]] if text else words)
