"""What each process did when: spans on the wall clock, so that the processes of a machine line up.

One append-only JSON-lines file per process, `timeline/<role>-<index>.jsonl`; `overlap` reads them all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.observe.files import read_lines

FLUSH_EVERY = 1.0  # seconds; what a crash may lose
BUSY = {"trainer": frozenset({"train", "step"}), "rollout": frozenset({"decode"})}

Span = tuple[float, float]


class Timeline:
    """Writes one process's spans, from any of its threads."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._clock = clock
        self._flushed = clock()
        self._lock = threading.Lock()

    def record(self, name: str, start: float, end: float) -> None:
        """A span that is over, in seconds of `time.time`. On a full disk it is lost: the process goes on."""
        with self._lock, suppress(OSError):
            if self._file.closed:
                return
            self._file.write(f'{{"name": {json.dumps(name)}, "start": {start:.6f}, "end": {end:.6f}}}\n')
            if self._clock() - self._flushed >= FLUSH_EVERY:
                self._file.flush()
                self._flushed = self._clock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The body is a span, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.record(name, start, self._clock())

    def close(self) -> None:
        """Write what is buffered. Later records are ignored."""
        with self._lock, suppress(OSError):
            self._file.close()


@dataclass(frozen=True)
class Overlap:
    """Shares of `seconds`, the time from the first training span to the last."""

    seconds: float
    trainer: float  # all ranks busy
    rollout: float  # all workers busy
    both: float


def overlap(run_dir: Path) -> Overlap:
    """How much of the training time trainer and rollout were busy at once."""
    busy: dict[str, list[list[Span]]] = {role: [] for role in BUSY}
    for path in sorted((run_dir / "timeline").glob("*.jsonl")):
        role = path.stem.rpartition("-")[0]
        if role in BUSY:
            busy[role].append(union((s, e) for name, s, e in read(path) if name in BUSY[role]))
    training = [span for rank in busy["trainer"] for span in rank]
    if not training:
        return Overlap(0.0, 0.0, 0.0, 0.0)
    window = [(min(start for start, _ in training), max(end for _, end in training))]
    trainer, rollout = (intersection([window, *busy[role]]) if busy[role] else [] for role in BUSY)
    whole = length(window) or 1.0
    both = length(intersection([trainer, rollout])) / whole
    return Overlap(length(window), length(trainer) / whole, length(rollout) / whole, both)


def read(path: Path) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of a file; a line cut by a crash is left out."""
    for row in read_lines(path):
        yield row["name"], row["start"], row["end"]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as ordered spans that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(sets: Iterable[list[Span]]) -> list[Span]:
    """Time that is in every set; each is ordered and free of overlaps."""
    first, *rest = sets
    for other in rest:
        common, i, j = [], 0, 0
        while i < len(first) and j < len(other):
            start, end = max(first[i][0], other[j][0]), min(first[i][1], other[j][1])
            if start < end:
                common.append((start, end))
            if first[i][1] < other[j][1]:
                i += 1
            else:
                j += 1
        first = common
    return first


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
