"""What of the spans a picture shows: a window in time, and nothing smaller than a pixel of it.

Spans ──► window(from, to) ──► lanes: processes, rows, spans [start, end, name, calls, seconds, text]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.viewer.spans import Columns, Spans

PIXELS = 1500  # of a window's width, unless all rows together would have more than MOST_SPANS
MOST_SPANS = 15_000  # of about 45 bytes, so that an answer stays below 1 MB
MOST_TEXT = 120  # characters
FARTHEST = 1e9  # seconds from the run's start that can be asked for


class LaneRow(msgspec.Struct):
    """A line of the picture. A span is [start, end, name, calls, seconds, text]. Its times are seconds since
    the window's start; `name` is the number of its name; `calls` how many calls or spans are in it, and
    `seconds` what they took together: on average seconds / (end - start) of them ran at once. `text`:
    details, "" for spans that were merged."""

    title: str
    spans: list[tuple[float, float, int, int, float, str]]


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


class LaneReader:
    """Of one run, which may be under way. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.spans = Spans(run_dir)

    def window(self, since: float | None = None, until: float | None = None) -> LaneWindow:
        """What lies between two times, in seconds since the run's start; all of it by default. Raises
        OSError, and ConfigError where a time is no number, or beyond FARTHEST."""
        if not all(time is None or abs(time) <= FARTHEST for time in (since, until)):  # nan neither
            raise ConfigError(f"lanes: from and to must be seconds since the start, within ±{FARTHEST:g}")
        self.spans.update()
        rows = self.spans.arrays()
        start = float(min((row["start"].min() for row in rows.values()), default=0.0))
        end = float(max((row["end"].max() for row in rows.values()), default=0.0))
        since = start if since is None else start + since
        until = end if until is None else start + until
        until, pixels = max(until, since + 1e-6), PIXELS
        while True:
            pixel = (until - since) / pixels
            names: dict[str, int] = {}
            lanes = [LaneProcess(process, []) for process in processes(rows)]
            of = {lane.title: lane.rows for lane in lanes}
            for who, title in sorted(rows):
                spans = merged(self.spans.rows[who, title], rows[who, title], since, until, pixel, names)
                of[who].append(LaneRow(title, spans))
            count = sum(len(row.spans) for lane in lanes for row in lane.rows)
            if count <= MOST_SPANS or pixels < 2:
                return LaneWindow(start, end, since, until, pixel, list(names), lanes)
            pixels //= 2


def processes(rows: dict[tuple[str, str], Any]) -> list[str]:
    """Titles in order: the coordinator, trainer ranks, workers, engines, each by number."""

    def key(title: str) -> tuple[int, str, int]:
        kind, _, number = title.partition(" ")
        order = ("coordinator", "trainer", "worker")
        return (
            order.index(kind) if kind in order else len(order),
            kind,
            int(number) if number.isdigit() else 0,
        )

    return sorted({process for process, _ in rows}, key=key)


def merged(
    columns: Columns, row: dict[str, Any], since: float, until: float, pixel: float, names: dict[str, int]
) -> list[tuple[float, float, int, int, float, str]]:
    """The spans of a row in a window. Those below a pixel are joined pixel by pixel, under the name that took
    the most of it."""
    inside = (row["end"] >= since) & (row["start"] <= until)
    row = {name: column[inside] for name, column in row.items()}
    known = list(columns.names)
    number = np.array([names.setdefault(name, len(names)) for name in known], dtype=np.int64)
    long = row["end"] - row["start"] >= pixel
    found = [
        (*_times(row["start"][i] - since, row["end"][i] - since, pixel), int(number[row["name"][i]]),
         int(row["calls"][i]), round(float(row["seconds"][i]), 4), detail(columns, row, i))
        for i in np.flatnonzero(long).tolist()
    ]  # fmt: skip
    short = {name: column[~long] for name, column in row.items()}
    if len(short["end"]):
        bins = np.floor((short["start"] - since) / pixel).astype(np.int64)
        pixels, place = np.unique(bins, return_inverse=True)
        seconds, calls = np.bincount(place, short["seconds"]), np.bincount(place, short["calls"])
        keys, kind = np.unique(place * len(known) + short["name"], return_inverse=True)
        taken = np.bincount(kind, short["seconds"])
        best = {
            int(keys[k]) // len(known): int(keys[k]) % len(known) for k in np.argsort(taken, kind="stable")
        }
        last = dict(zip(place.tolist(), range(len(place)), strict=True))
        for n, at in enumerate(pixels.tolist()):
            times = _times(at * pixel, (at + 1) * pixel, pixel)
            text = detail(columns, short, last[n]) if calls[n] <= 1 else ""
            found.append((*times, int(number[best[n]]), int(calls[n]), round(float(seconds[n]), 4), text))
    return sorted(found)


def _times(start: float, end: float, pixel: float) -> tuple[float, float]:
    digits = max(0, 2 - int(np.floor(np.log10(pixel))))
    return round(float(start), digits), round(float(end), digits)


def detail(columns: Columns, row: dict[str, Any], index: int) -> str:
    """What is said of one span beside its name."""
    step, micro, epoch = (int(row[name][index]) for name in ("step", "micro", "epoch"))
    words = [f"v{step} (epoch {epoch})" if epoch >= 0 else f"step {step}"] if step >= 0 else []
    words += [f"micro-batch {micro}"] if micro >= 0 else []
    text = list(columns.texts)[row["text"][index]] if row["text"][index] else ""
    return ", ".join([*words, text[:MOST_TEXT]] if text else words)
