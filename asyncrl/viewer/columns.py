"""The spans of a timeline's rows as columns: what a window shows of them, and their sums."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import Line

Arrays = dict[str, np.ndarray]
Key = tuple[str, str]  # process and title of a row
Total = tuple[str, int, int, float, float]
Shown = tuple[float, float, int, int, float, float, str]  # see LaneRow
Step = tuple[int, float]  # and its end, in seconds since the run's start
Pause = tuple[float, float]  # when it ended, and its seconds
LONG = 10.0  # seconds
APART = 60.0  # seconds: processes that begin again less than so after the coordinator were launched with it
COORDINATOR = "coordinator"
MOST_TOTALS = 200
SHOWN = ("start", "end", "name", "calls", "seconds", "longest")
MOST_TEXT = 120  # characters
COLUMNS = {"start": "d", "end": "d", "seconds": "f", "longest": "f", "name": "i", "text": "i", "calls": "i"}
COLUMNS |= {"step": "i", "micro": "i", "epoch": "i"}  # with their types


class Columns:
    """The spans of one row, in the order in which they ended. `names` and `texts` number what is in them."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.texts: dict[str, int] = {"": 0}
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in COLUMNS.items()}

    def extend(self, lines: Sequence[Line], name: str, text: str) -> None:
        named = self.names.setdefault(name, len(self.names)), self.texts.setdefault(text, len(self.texts))
        seconds = [line.end - line.start if line.seconds < 0 else line.seconds for line in lines]
        found: dict[str, Sequence[float]] = {
            "start": [line.start for line in lines],
            "end": [line.end for line in lines],
            "seconds": seconds,
            "longest": [
                min(took / max(line.calls, 1), line.end - line.start) if line.longest < 0 else line.longest
                for line, took in zip(lines, seconds, strict=True)
            ],
            "name": [named[0]] * len(lines),
            "text": [named[1]] * len(lines),
            "calls": [line.calls for line in lines],
            "step": [line.step if line.version[0] < 0 else line.version[1] for line in lines],
            "micro": [line.micro for line in lines],
            "epoch": [line.version[0] for line in lines],
        }
        for column, values in found.items():
            self._columns[column].extend(values)

    def numbers(self, of: dict[str, int]) -> list[int]:
        """The numbers of its names among those of a window."""
        return [of.setdefault(name, len(of)) for name in self.names]

    def arrays(self) -> Arrays:
        """Return views: no column can grow before they are forgotten."""
        return {name: np.frombuffer(column, column.typecode) for name, column in self._columns.items()}


def shares(rows: Mapping[Key, Arrays]) -> dict[Key, float]:
    """Which part of the time that its process has recorded each row took, at most 1."""
    first, last = dict[str, float](), dict[str, float]()
    for (process, _), row in rows.items():
        first[process] = min(first.get(process, np.inf), float(row["start"].min()))
        last[process] = max(last.get(process, 0.0), float(row["end"].max()))
    whole = {process: max(last[process] - first[process], 1e-9) for process in first}
    return {key: min(1.0, round(float(row["seconds"].sum()) / whole[key[0]], 5)) for key, row in rows.items()}


def totals(
    rows: Mapping[Key, Arrays], numbers: Mapping[Key, list[int]], since: float, until: float
) -> list[Total]:
    """What a window has by kind of process and name: the calls of spans that reach into it, their seconds in
    it, and the longest call. `numbers`: the names of a row. The most seconds first."""
    found: dict[tuple[str, int], list[float]] = {}
    for key, row in rows.items():
        if not len(row["end"]):
            continue
        length = np.maximum(row["end"] - row["start"], 1e-9)
        part = (np.minimum(row["end"], until) - np.maximum(row["start"], since)) / length
        seconds = np.bincount(row["name"], row["seconds"] * part)
        calls = np.bincount(row["name"], row["calls"])
        longest = np.zeros(len(seconds))
        np.maximum.at(longest, row["name"], row["longest"])
        for name in np.flatnonzero(np.bincount(row["name"])).tolist():
            kind = key[0].partition(" ")[0]
            sums = found.setdefault((kind, numbers[key][name]), [0.0, 0.0, 0.0])
            sums[0] += float(calls[name])
            sums[1] += float(seconds[name])
            sums[2] = max(sums[2], float(longest[name]))
    order = sorted(found.items(), key=lambda one: -one[1][1])[:MOST_TOTALS]
    return [(*key, int(sums[0]), round(sums[1], 6), round(sums[2], 6)) for key, sums in order]


def within(row: Arrays, since: float, until: float) -> Arrays:
    """The spans that reach into a window; not copied, where all do."""
    inside = (row["end"] >= since) & (row["start"] <= until)
    return row if inside.all() else {name: column[inside] for name, column in row.items()}


def pauses(rows: Mapping[Key, Arrays], launches: list[float]) -> list[Pause]:
    """The times before later launches in which nothing ran, where they are long."""
    found = list[Pause]()
    for at in launches:
        last = max(float(row["end"].max(initial=0.0, where=row["end"] <= at)) for row in rows.values())
        found += [(at, at - last)] * (0 < last < at - LONG)
    return found


def without(times: Any, paused: list[Pause]) -> Any:
    """Times on a clock that stands still meanwhile."""
    return times - sum(seconds * (times >= at) for at, seconds in paused) if paused else times


def marks(begun: Mapping[str, list[float]], paused: list[Pause], start: float) -> list[tuple[float, str]]:
    """Processes that began again, alone or all together: since the run's start."""
    again = begun.get(COORDINATOR, [])[1:]
    found = [(at, f"launched again, {dict(paused).get(at, 0):.0f} s later") for at in again]
    for who, times in begun.items():
        alone = [at for at in times[1:] if all(abs(at - other) >= APART for other in again)]
        found += [(at, f"{who} began again") for at in alone if who != COORDINATOR]
    return sorted((round(without(at, paused) - start, 3), text) for at, text in found)


def steps_of(row: Arrays, name: int, start: float) -> list[Step]:
    """The optimizer steps among a trainer's spans, in the order of time."""
    mine = row["name"] == name
    return list(zip(row["step"][mine].tolist(), (row["end"][mine] - start).tolist(), strict=True))


def step_window(steps: list[Step], step: int) -> Step | tuple[float, float]:
    """When a step was made: from the end of the one before; the last time, where it was made again.
    ConfigError."""
    for at in reversed(range(len(steps))):
        if steps[at][0] == step:
            return steps[at - 1][1] if at else 0.0, steps[at][1]
    last = f"the last one is {steps[-1][0]}" if steps else "it has none"
    raise ConfigError(f"lanes: step {step} is not in the timeline; {last}")


def merged(columns: Columns, row: Arrays, number: list[int], since: float, pixel: float) -> list[Shown]:
    """The spans of a row in a window. Those below a pixel are joined pixel by pixel, under the name that took
    the most of it."""
    texts = list(columns.texts)
    digits = max(0, 2 - int(np.floor(np.log10(pixel))))

    def span(start: float, end: float, name: int, calls: int, took: float, most: float, text: str) -> Shown:
        times = round(float(start), digits), round(float(end), digits)
        sums = round(float(took), 4), round(float(most), 4)
        return (*times, number[int(name)], int(calls), *sums, text)

    long = row["end"] - row["start"] >= pixel
    found = list[Shown]()
    for i in np.flatnonzero(long).tolist():
        start, end, name, calls, took, most = (row[column][i] for column in SHOWN)
        found.append(span(start - since, end - since, name, calls, took, most, detail(texts, row, i)))
    short = {name: column[~long] for name, column in row.items()}
    if not len(short["end"]):
        return sorted(found)
    first, last = (np.floor((short[name] - since) / pixel).astype(np.int64) for name in ("start", "end"))
    beyond = (short["end"] - since - last * pixel) / np.maximum(short["end"] - short["start"], 1e-9)
    beyond *= last > first  # the part in a second pixel
    across = np.flatnonzero(beyond)
    index = np.concatenate([np.arange(len(first)), across])
    origin = int(first.min())
    place = np.concatenate([first, last[across]]) - origin
    took = np.concatenate([short["seconds"] * (1 - beyond), (short["seconds"] * beyond)[across]])
    width, names = int(place.max()) + 1, len(number)
    taken = np.bincount(place * names + short["name"][index], took, width * names).reshape(width, names)
    calls = np.bincount(place[: len(first)], short["calls"], width)  # in the pixel where they begin
    most, newest = np.zeros(width), np.full(width, -1)
    np.maximum.at(most, place, short["longest"][index])
    newest[place] = index
    best, sums = taken.argmax(1), taken.sum(1)
    for at in np.flatnonzero(newest >= 0).tolist():
        text = detail(texts, short, newest[at]) if calls[at] <= 1 else ""
        start = (at + origin) * pixel
        found.append(span(start, start + pixel, best[at], calls[at], sums[at], most[at], text))
    return sorted(found)


def detail(texts: list[str], row: Arrays, index: int) -> str:
    """Describe one span beside its name."""
    step, micro, epoch = (int(row[name][index]) for name in ("step", "micro", "epoch"))
    words = [f"v{step} (epoch {epoch})" if epoch >= 0 else f"step {step}"] if step >= 0 else []
    words += [f"micro-batch {micro}"] if micro >= 0 else []
    text = texts[row["text"][index]]
    return ", ".join([*words, text[:MOST_TEXT]] if text else words)
