"""Records the timeline of a run: spans of the processes on the wall clock, so that processes line up.

Each process appends to one JSON-lines file, `timeline/<role>-<index>.jsonl`; `timeline_files` lists the
files. A line has a name, start and end in seconds of `time.time`, and details: the loaded `version` (trainer
epoch, step), the `engine`, the `step`. Spans of simultaneous tasks are joined, see `runtime/activity.py`:
`calls` tasks began, `seconds` is the sum of the tasks' durations, so that on average seconds / (end - start)
tasks ran at once, and `longest` is the longest duration of a task that ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from asyncrl.observe.files import ends_in_a_line

CHUNK_BYTES = 1 << 20  # bytes read at a time
NO_VERSION = (-1, -1)
NO_NUMBER = -1
MAX_NUMBER = 1 << 31
START_EVENT = "start"  # event: a process began; every further start in a file is a restart
FLUSH_SECONDS = 1.0  # seconds between flushes; a crash may lose so much
BUSY_SPANS = {"trainer": frozenset({"train", "step"}), "rollout": frozenset({"decode"})}

Span = tuple[float, float]


class Timeline:
    """Writes one process's spans, from any of its threads."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_complete = ends_in_a_line(path)
        self._file = path.open("a")
        if not is_complete:  # the last line was cut by a kill; its bytes stay, as they may be copied already
            self._file.write("\n")

        self._clock = clock
        self._flushed_at = clock()
        self._lock = threading.Lock()

    def record(self, name: str, start: float, end: float, **details: object) -> None:
        """Record a span that is over, in seconds of `time.time`. On a full disk the span is lost."""
        line = {"name": name, "start": round(start, 6), "end": round(end, 6)} | details
        with self._lock, suppress(OSError):
            if self._file.closed:
                return

            self._file.write(msgspec.json.encode(line).decode() + "\n")
            if self._clock() - self._flushed_at >= FLUSH_SECONDS:
                self._file.flush()
                self._flushed_at = self._clock()

    def record_past(self, name: str, seconds: float, **details: object) -> None:
        """Record a span that ends now and took `seconds`; with 0 an event."""
        now = self._clock()
        self.record(name, now - seconds, now, **details)

    @contextmanager
    def span(self, name: str, **details: object) -> Iterator[None]:
        """Record the body as a span, also if the body raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.record(name, start, self._clock(), **details)

    def close(self) -> None:
        """Write buffered lines and close the file. Later records are ignored."""
        with self._lock, suppress(OSError):
            self._file.close()


class TimelineLine(msgspec.Struct, frozen=True, gc=False):
    """Holds a line of a timeline, see `Timeline`."""

    name: str
    start: float
    end: float
    calls: int = 1
    seconds: float = -1.0  # -1: end - start
    longest: float = -1.0  # -1: end - start
    step: int = NO_NUMBER
    micro: int = NO_NUMBER
    version: tuple[int, int] = NO_VERSION
    engine: str = ""
    error: str = ""

    @property
    def is_sound(self) -> bool:
        """Return False if the clock was set back meanwhile, or a number cannot come from a run."""
        numbers = (self.calls, self.step, self.micro, *self.version)
        return self.start <= self.end and min(numbers) >= -1 and max(numbers) < MAX_NUMBER


class TimelineFile:
    """Reads the new lines of one timeline file again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.role = path.stem.rpartition("-")[0]
        self._offset = 0

    def read_added(self) -> Iterator[TimelineLine]:
        """Read the whole lines added since the last call. Unreadable lines are left out."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                complete_lines = chunk[: chunk.rfind(b"\n") + 1]
                if not complete_lines:
                    return  # a line that is not complete yet

                self._offset += len(complete_lines)
                file.seek(self._offset)
                try:
                    spans = _decoder.decode_lines(complete_lines)  # all at once, which is fast
                except (msgspec.DecodeError, UnicodeDecodeError):
                    spans = []
                    for line in complete_lines.splitlines():
                        with suppress(msgspec.DecodeError, UnicodeDecodeError):
                            spans.append(_decoder.decode(line))
                yield from (span for span in spans if span.is_sound)


_decoder = msgspec.json.Decoder(TimelineLine)


def busy_overlap(run_dir: Path) -> float | None:
    """Return the fraction of the training time, from the trainer's first span to the last, in which all ranks
    and all workers were busy; None if nothing was trained."""
    busy: dict[str, list[list[Span]]] = {role: [] for role in BUSY_SPANS}
    for file in timeline_files(run_dir):
        if names := BUSY_SPANS.get(file.role):
            busy[file.role].append(
                merge_spans((span.start, span.end) for span in file.read_added() if span.name in names)
            )

    training = [span for rank in busy["trainer"] for span in rank]
    if not training or not busy["rollout"]:
        return 0.0 if training else None

    all_processes = [*busy["trainer"], *busy["rollout"]]
    edges = sorted(
        (moment, step)
        for spans in all_processes
        for start, end in spans
        for moment, step in ((start, 1), (end, -1))
    )

    busy_processes = 0
    previous_moment = 0.0
    seconds_together = 0.0

    for moment, step in edges:
        if busy_processes == len(all_processes):
            seconds_together += moment - previous_moment
        busy_processes += step
        previous_moment = moment

    training_start = min(span_start for span_start, _ in training)
    training_seconds = max(span_end for _, span_end in training) - training_start
    return seconds_together / training_seconds if training_seconds else 0.0


def timeline_files(run_dir: Path) -> list[TimelineFile]:
    """List the unread timeline files of all processes of a run, by name."""
    return [TimelineFile(path) for path in sorted((run_dir / "timeline").glob("*-*.jsonl"))]


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into ordered spans that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged
