"""What each process did when: spans on the wall clock, so that the processes of a machine line up.

One append-only JSON-lines file per process, `timeline/<role>-<index>.jsonl`; `overlap` reads them all. A line
has a name, start and end in seconds of `time.time`, and details: which `version` (trainer epoch, step) was
loaded, by which `engine`, of which `step`. Spans of many tasks at once are joined, see `runtime/activity.py`:
`calls` is how many of them began, and `seconds` what they took together, so that on average
seconds / (end - start) ran at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

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

    def record(self, name: str, start: float, end: float, **details: object) -> None:
        """A span that is over, in seconds of `time.time`. On a full disk it is lost: the process goes on."""
        line = {"name": name, "start": round(start, 6), "end": round(end, 6)} | details
        with self._lock, suppress(OSError):
            if self._file.closed:
                return
            self._file.write(msgspec.json.encode(line).decode() + "\n")
            if self._clock() - self._flushed >= FLUSH_EVERY:
                self._file.flush()
                self._flushed = self._clock()

    def past(self, name: str, seconds: float, **details: object) -> None:
        """A span that ends now, and took so long; with 0 an event."""
        now = self._clock()
        self.record(name, now - seconds, now, **details)

    @contextmanager
    def span(self, name: str, **details: object) -> Iterator[None]:
        """The body is a span, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.record(name, start, self._clock(), **details)

    def close(self) -> None:
        """Write what is buffered. Later records are ignored."""
        with self._lock, suppress(OSError):
            self._file.close()


def overlap(run_dir: Path) -> float | None:
    """The share of the training time, from a trainer's first span to its last, in which all ranks and all
    workers were busy; None if nothing was trained."""
    busy: dict[str, list[list[Span]]] = {role: [] for role in BUSY}
    for path in sorted((run_dir / "timeline").glob("*.jsonl")):
        role = path.stem.rpartition("-")[0]
        if role in BUSY:
            busy[role].append(union((s, e) for name, s, e in read(path) if name in BUSY[role]))
    training = [span for rank in busy["trainer"] for span in rank]
    if not training or not busy["rollout"]:
        return 0.0 if training else None
    everyone = [*busy["trainer"], *busy["rollout"]]
    edges = sorted((at, step) for spans in everyone for s, e in spans for at, step in ((s, 1), (e, -1)))
    at_work, since, together = 0, 0.0, 0.0
    for at, step in edges:
        together += (at - since) * (at_work == len(everyone))
        at_work, since = at_work + step, at
    whole = max(end for _, end in training) - min(start for start, _ in training)
    return together / whole if whole else 0.0


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
