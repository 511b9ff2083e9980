"""A run's spans as a trace that ui.perfetto.dev and chrome://tracing open: the Trace Event Format, in JSON.

Processes and rows become processes and threads; an arrow goes from each snapshot of the weights to the loads
of that version. Times are microseconds since the run's start.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.runtime.weight_loader import LOAD
from asyncrl.viewer.lanes import detail, processes
from asyncrl.viewer.spans import WORK, Spans

MICRO = 1e6
Event = dict[str, Any]


def write_trace(run_dir: Path, path: Path) -> int:
    """Write the trace of a run to `path`, compressed where that ends in .gz. Returns the number of events.
    ConfigError where nothing was recorded; raises OSError."""
    spans = Spans(run_dir)
    spans.update()
    if not spans.rows:
        raise ConfigError(f"{run_dir / 'timeline'}: has no spans: nothing to write a trace of")
    count = 0
    with gzip.open(path, "wb", 6) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for count, event in enumerate(events(spans), 1):
            file.write(b"\n" if count == 1 else b",\n")
            file.write(msgspec.json.encode(event))
        file.write(b"]}\n")
    return count


def events(spans: Spans) -> Iterator[Event]:
    """Names of processes and threads, a complete event for each span, and the arrows."""
    rows = spans.arrays()
    begin = min(row["start"].min() for row in rows.values())
    snapshots: dict[tuple[int, int], Event] = {}
    loads: list[tuple[tuple[int, int], Event]] = []
    for pid, process in enumerate(processes(rows), 1):
        yield _named("process_name", pid, 0, process)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        threads = itertools.count(1)
        for title in sorted(title for who, title in rows if who == process):
            columns, row = spans.rows[process, title], rows[process, title]
            known = list(columns.names)
            free: list[tuple[int, float]] = []  # thread, and until when it is in use
            for index in row["start"].argsort(kind="stable"):
                start, end = (round((row[side][index] - begin) * MICRO) for side in ("start", "end"))
                place = next((n for n, (_, until) in enumerate(free) if until <= start), len(free))
                if place == len(free):  # spans of one thread may not overlap
                    free.append((next(threads), 0))
                    yield _named("thread_name", pid, free[-1][0], f"{title} {place + 1}" if place else title)
                tid = free[place][0]
                free[place] = tid, end
                name, version = known[row["name"][index]], (int(row["epoch"][index]), int(row["step"][index]))
                said = detail(columns, row, index)
                args = {"calls": int(row["calls"][index]), "seconds": float(row["seconds"][index])}
                span = {"ph": "X", "cat": title, "name": name, "pid": pid, "tid": tid, "ts": start}
                event = span | {"dur": end - start, "args": args | ({"detail": said} if said else {})}
                yield event
                if title == WORK and version[0] >= 0:
                    snapshots.setdefault(version, event)  # of the first rank
                elif name == LOAD:
                    loads.append((version, event))
    for number, (version, load) in enumerate(loads, 1):
        if version in snapshots and snapshots[version]["ts"] <= load["ts"]:
            label = {"cat": "weights", "name": f"v{version[1]}", "id": number}
            yield {"ph": "s"} | label | _place(snapshots[version])
            yield {"ph": "f", "bp": "e"} | label | _place(load)


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _place(event: Event) -> Event:
    return {key: event[key] for key in ("pid", "tid", "ts")}
