"""Draws a run's timeline: a window in time, and nothing smaller than a pixel.

    timeline/*.jsonl ──► spans, each of a row of a process ──► window(from, to) ──► processes, rows, spans

A row is a line of the picture, and belongs to a process. The spans of a trainer rank follow each other in a
single row; in other processes, where many tasks run at once, each name is a row. Spans that concern an engine
are in a row of that engine: a push by the coordinator, the turns that a worker has sampled on a server.
Pauses between two launches are left out. Files are read once, and later only the added lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import START_EVENT, TimelineFile, TimelineLine, timeline_files
from asyncrl.runtime.activity import DECODE
from asyncrl.runtime.weight_loader import LOAD
from asyncrl.viewer.meanings import MEANINGS, meaning_of
from asyncrl.viewer.spans import (
    COORDINATOR,
    SPAN,
    merge_spans,
    shares,
    since_start,
    spans_by_row,
    window_totals,
)

WINDOW_PIXELS = 1500  # width of a window, unless all rows together would have more than MAX_SPANS spans
MAX_SPANS = 15_000  # spans of about 45 bytes, so that an answer stays below 1 MB
MAX_ROWS = 24  # rows of a process; names come from users' tools, too, and further names share the row OTHER
MAX_STEPS = 400  # steps on the ruler
MAX_SECONDS = 1e9  # farthest time of a window, in seconds from the run's start
OTHER = "others"  # the row of all names beyond MAX_ROWS
WORK = "work"  # the row of a trainer rank
PROCESS_ORDER = (COORDINATOR, "trainer", "worker")  # engines follow


class LaneReader:
    """Reads the timeline of a run, which may still go on. For a single thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, TimelineFile] = {}
        self._spans = np.empty(0, SPAN)
        self._row_numbers: dict[tuple[str, str], int] = {}  # keys: process and name
        self._name_numbers: dict[str, int] = {}
        self._text_numbers: dict[str, int] = {}
        self._process_starts: dict[str, list[float]] = {}  # times by process

    def window(
        self, since: float | None = None, until: float | None = None, step: int | None = None
    ) -> dict[str, Any]:
        """Return everything between two times, or within a step; by default the whole run. Raises OSError,
        and ConfigError where a time is no number or beyond MAX_SECONDS, or where there is no such step.

        All times are seconds since the run's start. A row took `share` of the process's time; a span is
        [start, end, name, calls, seconds, longest, text]: the index in `names`, how many calls or spans were
        merged, the sum of durations, the longest duration, and details of a single span. Spans of less than
        `pixel` seconds are merged. `names`: [meaning, title]. `steps`: [step, end]; `marks`: [time, text].
        `totals`: of the window.
        """
        if not all(time is None or abs(time) <= MAX_SECONDS for time in (since, until)):  # nan neither
            raise ConfigError(f"lanes: from and to must be seconds since the start, within ±{MAX_SECONDS:g}")

        for found_file in timeline_files(self._run_dir):
            file = self._files.setdefault(found_file.path, found_file)
            if len(added_spans := np.fromiter(self._read_added(file), SPAN)):
                self._spans = np.concatenate([self._spans, added_spans])

        if not len(self._spans):
            return {"processes": []}

        spans, marks = since_start(self._spans, self._process_starts)
        is_step = spans["name"] == self._name_numbers.get("step", -1)
        is_step &= spans["row"] == self._row_numbers.get(("trainer 0", WORK), -1)
        steps = list(zip(spans["step"][is_step].tolist(), spans["end"][is_step].tolist(), strict=True))
        if step is not None:
            if step not in (step_ends := dict(steps)):  # a repeated step counts where it ended last
                last_step = max(step_ends, default="none")
                raise ConfigError(f"lanes: step {step} is not in the timeline (last step: {last_step})")
            until = step_ends[step]
            since = max((end for _, end in steps if end < until), default=0.0)

        since = since or 0.0
        run_seconds = float(spans["end"].max())
        until = max(run_seconds if until is None else until, since + 1e-6)
        reaches_window = (spans["end"] >= since) & (spans["start"] <= until)
        window_spans = spans if reaches_window.all() else spans[reaches_window]  # 50 MB for a million spans

        # Make pixels larger until there are few enough spans.
        pixel = (until - since) / WINDOW_PIXELS
        merged_spans = merge_spans(window_spans, since, pixel)
        while len(merged_spans) > MAX_SPANS and pixel < until - since:
            pixel *= 1.25 * len(merged_spans) / MAX_SPANS
            merged_spans = merge_spans(window_spans, since, pixel)

        shown_steps = [step_end for step_end in steps if since <= step_end[1] <= until]
        names = [meaning_of(name) for name in self._name_numbers]
        process_kinds = [process.partition(" ")[0] for process, _ in self._row_numbers]
        processes = sorted({process for process, _ in self._row_numbers}, key=_process_order)

        row_shares = shares(spans, np.array([processes.index(process) for process, _ in self._row_numbers]))
        row_spans = spans_by_row(merged_spans, list(self._text_numbers), len(row_shares), pixel)
        lanes: dict[str, list[dict[str, Any]]] = {process: [] for process in processes}
        ordered_rows = sorted(
            self._row_numbers.items(), key=lambda row: (meaning_of(row[0][1])[0], -row_shares[row[1]])
        )
        for (process, name), row_number in ordered_rows:
            title = meaning_of(name)[1]
            row = {"title": title, "share": row_shares[row_number], "spans": row_spans[row_number]}
            lanes[process].append(row)

        return {
            "length": run_seconds,
            "window": (since, until),
            "pixel": pixel,
            "names": names,
            "kinds": MEANINGS,
            "processes": [{"title": process, "rows": rows} for process, rows in lanes.items()],
            "steps": shown_steps[:: len(shown_steps) // MAX_STEPS + 1],
            "marks": marks,
            "totals": window_totals(window_spans, process_kinds, names, since, until),
        }

    def _read_added(self, file: TimelineFile) -> Iterator[tuple[float, ...]]:
        process_kind = "worker" if file.role == "rollout" else file.role
        index = file.path.stem.rpartition("-")[2]
        process = process_kind if process_kind == COORDINATOR else f"{process_kind} {index}"
        numbers_by_key: dict[tuple[str, str, str], tuple[int, int, int]] = {}

        for line in file.read_added():
            if line.name == START_EVENT:
                self._process_starts.setdefault(process, []).append(line.start)
                continue

            key = (line.name, line.engine, line.error)
            duration = line.end - line.start
            if key not in numbers_by_key:
                numbers_by_key[key] = self._numbers(file.role, process, line)
            seconds = duration if line.seconds < 0 else line.seconds
            longest = min(seconds / max(line.calls, 1), duration) if line.longest < 0 else line.longest
            epoch, step = line.version
            if epoch < 0:  # the work is of no version
                epoch = -1
                step = line.step

            yield (
                line.start,
                line.end,
                seconds,
                longest,
                *numbers_by_key[key],
                line.calls,
                step,
                line.micro,
                epoch,
            )

    def _numbers(self, role: str, process: str, line: TimelineLine) -> tuple[int, int, int]:
        """Return the numbers of the line's row, name and text."""
        name = line.name
        row = name
        text = line.error
        before_decode, is_remote, server = name.partition(f"{DECODE} on ")
        if is_remote and not before_decode:
            text = process
            process = server
            row = DECODE
            name = DECODE
        elif role == "trainer":
            row = WORK
        elif name == LOAD:
            if line.engine == "eval":  # a second engine of a worker
                row += " (validation)"
        elif line.engine:
            process = line.engine

        row_count = sum(row_process == process for row_process, _ in self._row_numbers)
        if (process, row) not in self._row_numbers and row_count >= MAX_ROWS:
            row = OTHER

        row_number = self._row_numbers.setdefault((process, row), len(self._row_numbers))
        name_number = self._name_numbers.setdefault(name, len(self._name_numbers))
        text_number = self._text_numbers.setdefault(text, len(self._text_numbers))
        return row_number, name_number, text_number


def _process_order(process: str) -> tuple[int, int, str]:
    """Return the sort key of a process: the coordinator, trainer ranks, workers, engines, each by number."""
    process_kind = process.partition(" ")[0]
    return (
        PROCESS_ORDER.index(process_kind) if process_kind in PROCESS_ORDER else len(PROCESS_ORDER),
        len(process),
        process,
    )
