"""The picture of a run's timeline: a window in time, and nothing smaller than a pixel of it.

    timeline/*.jsonl ──► (process, row) ──► columns ──► window(from, to) ──► lanes: processes, rows, spans

A row is a line of the picture, and belongs to a process. What a trainer rank does follows one after another
and is one row; of other processes, where many tasks run at once, each name is a row of its own. Spans that
say which engine they concern are in a row of that one: a push by the coordinator, the turns that a worker has
sampled on a server. Pauses between two launches are left out. Files are read once, then what was added.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import BUSY, START, Line, TimelineFile, files
from asyncrl.runtime.activity import DECODE
from asyncrl.runtime.weight_loader import LOAD
from asyncrl.viewer import columns
from asyncrl.viewer.columns import COORDINATOR, Arrays, Columns, Key, Pause, Shown, Step, Total
from asyncrl.viewer.meanings import MEANINGS, meaning

PIXELS = 1500  # of a window's width, unless all rows together would have more than MOST_SPANS
MOST_SPANS = 15_000  # of about 45 bytes, so that an answer stays below 1 MB
MOST_ROWS = 24  # of one process; names come from users' tools, too. More are joined as OTHER
FARTHEST = 1e9  # seconds from the run's start that can be asked for
OTHER = "others"
WORK, HELD = "work", "version"  # rows: a trainer's, and the version that an engine holds
AT_ONCE = 20_000  # lines of a file
MOST_STEPS = 400  # on the ruler
PROCESS = {"rollout": "worker"}  # what people call it, by the role in a file's name
ORDER = (COORDINATOR, "trainer", "worker")  # of processes; engines follow


class LaneRow(msgspec.Struct):
    """A line of the picture, which took `share` of its process's time. A span is [start, end, name, calls,
    seconds, longest, text]. Its times are seconds since the window's start; `name` is the number of its name;
    `calls` how many calls or spans are in it, `seconds` what they took together, and `longest` one of them.
    `text`: details, "" for spans that were merged."""

    title: str
    meaning: int
    share: float
    spans: list[Shown]


class LaneProcess(msgspec.Struct):
    title: str
    rows: list[LaneRow]


class LaneWindow(msgspec.Struct, rename={"since": "from", "until": "to"}):
    """The whole run is from `start` to `end`, the window from `since` to `until`: seconds of `time.time`.
    Spans of less than `pixel` seconds are merged. `steps`: [step, end] of the trainer; `marks`: [time, text];
    both since the run's start. `totals` of the window: [kind of process, name, calls, seconds, longest]."""

    start: float
    end: float
    since: float
    until: float
    pixel: float
    names: list[str]
    meanings: list[int]  # of the names
    processes: list[LaneProcess]
    steps: list[Step]
    marks: list[tuple[float, str]]
    totals: list[Total]
    kinds: tuple[str, ...] = MEANINGS


class LaneReader:
    """Reads the timeline of one run, which may be under way. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, TimelineFile] = {}
        self._rows: dict[Key, Columns] = {}
        self._begun: dict[str, list[float]] = {}  # when processes began
        self._pauses: list[Pause] = []

    def window(
        self, since: float | None = None, until: float | None = None, step: int | None = None
    ) -> LaneWindow:
        """Return what lies between two times, in seconds since the run's start, or the time of a step; all of
        it by default. Raises OSError, and ConfigError where a time is no number or beyond FARTHEST, or where
        there is no such step."""
        if not all(time is None or abs(time) <= FARTHEST for time in (since, until)):  # nan neither
            raise ConfigError(f"lanes: from and to must be seconds since the start, within ±{FARTHEST:g}")
        self._update()
        rows = self._arrays()
        start = float(min((row["start"].min() for row in rows.values()), default=0.0))
        end = float(max((row["end"].max() for row in rows.values()), default=0.0))
        work = self._rows.get(("trainer 0", WORK), Columns())
        steps = (
            columns.steps_of(rows["trainer 0", WORK], work.names["step"], start)
            if "step" in work.names
            else []
        )
        if step is not None:
            since, until = columns.step_window(steps, step)
        since = start if since is None else start + since
        until = end if until is None else start + until
        until, pixels, share = max(until, since + 1e-6), PIXELS, columns.shares(rows)
        inside = {key: columns.within(row, since, until) for key, row in rows.items()}
        while sum(min(len(row["end"]), pixels) for row in inside.values()) > MOST_SPANS and pixels > 1:
            pixels = pixels * 9 // 10
        while True:  # spans that overlap may still be more
            pixel, names = (until - since) / pixels, dict[str, int]()
            lanes = {title: LaneProcess(title, []) for title in sorted({who for who, _ in rows}, key=_place)}
            numbers = {key: row.numbers(names) for key, row in self._rows.items()}
            for key, row in inside.items():
                spans = columns.merged(self._rows[key], row, numbers[key], since, pixel)
                number, title = meaning(key[1])
                lanes[key[0]].rows.append(LaneRow(title, number, share[key], spans))
            count = sum(len(row.spans) for lane in lanes.values() for row in lane.rows)
            if count <= MOST_SPANS or pixels < 2:
                break
            pixels //= 2
        for lane in lanes.values():
            lane.rows.sort(key=lambda row: (row.meaning, -row.share))
        ticks = [one for one in steps if since <= one[1] + start <= until]
        known = [meaning(name) for name in names]
        acting = {key: row for key, row in inside.items() if not key[1].startswith(HELD)}
        return LaneWindow(
            *(start, end, since, until, pixel, [name for _, name in known], [number for number, _ in known]),
            *(list(lanes.values()), ticks[:: len(ticks) // MOST_STEPS + 1]),
            columns.marks(self._begun, self._pauses, start),
            columns.totals(acting, numbers, since, until),
        )

    def _update(self) -> None:
        """Read what was added since the last call."""
        for file in files(self._run_dir):
            file = self._files.setdefault(file.path, file)
            _, _, index = file.path.stem.rpartition("-")
            name = COORDINATOR if file.role == COORDINATOR else f"{PROCESS.get(file.role, file.role)} {index}"
            added = file.added()
            while lines := list(islice(added, AT_ONCE)):
                alike: dict[tuple[str, str, str], list[Line]] = {}
                for line in lines:
                    alike.setdefault((line.name, line.engine, line.error), []).append(line)
                for some in alike.values():
                    self._add(file.role, name, some)

    def _arrays(self) -> dict[Key, Arrays]:
        """The columns of all rows, without pauses. A version is held until the next one; the last, to the end
        of what its process has recorded."""
        found = {key: row.arrays() for key, row in self._rows.items()}
        self._pauses = columns.pauses(found, self._begun.get(COORDINATOR, [])[1:])
        for row in found.values():
            row |= {name: columns.without(row[name], self._pauses) for name in ("start", "end")}
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

    def _add(self, role: str, of: str, lines: list[Line]) -> None:
        """Add spans of one name, engine and error, in the order of the file."""
        line = lines[0]
        if line.name == START:
            self._begun.setdefault(of, []).extend(one.start for one in lines)
            return
        process, row, text = of, line.name, line.error
        lane = " (validation)" * (line.engine == "eval")  # an embedded engine has a second one for validation
        decoding, on, server = line.name.partition(f"{DECODE} on ")
        if on and not decoding:
            process, row, text = server, DECODE, of
        elif role in BUSY and DECODE not in BUSY[role]:
            row = WORK
        elif line.name == LOAD:
            if not line.error:  # from here on the engine holds it: an event, of which the next is the end
                events = [msgspec.structs.replace(one, start=one.end) for one in lines]
                self._row(process, HELD + lane).extend(events, HELD, "")
            row = LOAD + lane
        elif line.engine:
            process = line.engine
        self._row(process, row).extend(lines, DECODE if row == DECODE else line.name, text)

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
