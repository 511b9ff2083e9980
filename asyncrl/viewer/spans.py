"""Holds the spans of a run's timeline in one table: its shares, its sums, and what a window in
time shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.observe.metrics import clock

SPAN = np.dtype(
    [(name, "f8") for name in ("start", "end")]
    + [(name, "f4") for name in ("seconds", "longest")]
    + [(name, "i4") for name in ("row", "name", "text", "calls", "step", "micro", "epoch")]
)
Marks = list[tuple[float, str]]
COORDINATOR = "coordinator"
LONG = 10.0  # seconds
APART = 60.0  # seconds: processes that begin again less than so after the coordinator were launched with it
MOST_TEXT = 120  # characters


def since_start(spans: np.ndarray, begun: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, Marks]:
    """Return spans on the run's clock, which begins with the first of them, and stands still while nothing
    ran before a later launch, where that is long; and where processes began again, alone or all together."""
    start = float(spans["start"].min())
    again = begun.get(COORDINATOR, [])[1:]
    paused = dict[float, float]()
    for at in again:
        last = float(spans["end"].max(initial=0, where=spans["end"] <= at))
        if 0 < last < at - LONG:
            paused[at] = at - last

    def moved(times: Any) -> Any:
        return times - start - sum(seconds * (times >= at) for at, seconds in paused.items())

    marks = [(moved(at), f"launched again, {clock(paused.get(at, 0))} later") for at in again]
    for who, times in begun.items():
        alone = [at for at in times[1:] if all(abs(at - other) >= APART for other in again)]
        marks += [(moved(at), f"{who} began again") for at in alone]
    spans = spans.copy()
    spans["start"], spans["end"] = moved(spans["start"]), moved(spans["end"])
    return spans, sorted(marks)


def shares(spans: np.ndarray, process: np.ndarray) -> list[float]:
    """Return which part of the time that its process has recorded each row took, at most 1. `process`: the
    number of a row's process."""
    first = np.full(len(process), np.inf)
    last = np.zeros(len(process))
    np.minimum.at(first, process[spans["row"]], spans["start"])
    np.maximum.at(last, process[spans["row"]], spans["end"])
    took = np.bincount(spans["row"], spans["seconds"], len(process))
    return np.minimum(1, took / np.maximum(last - first, 1e-9)[process]).round(5).tolist()


def totals(
    spans: np.ndarray, kinds: Sequence[str], names: Sequence[tuple[int, str]], since: float, until: float
) -> list[dict[str, Any]]:
    """Return what a window has by kind of process, `of`, and name: the calls of spans that reach into it, the
    seconds that they took in it, and the longest call; the most seconds first. `kinds`: of the rows."""
    known = sorted({*kinds})
    group = np.array([known.index(kind) for kind in kinds])[spans["row"]] * len(names) + spans["name"]
    part = np.minimum(spans["end"], until) - np.maximum(spans["start"], since)
    part /= np.maximum(spans["end"] - spans["start"], 1e-9)
    seconds = np.bincount(group, spans["seconds"] * part)
    calls = np.bincount(group, spans["calls"])
    longest = np.zeros(len(seconds))
    np.maximum.at(longest, group, spans["longest"])
    sums = {"calls": calls.astype(int), "took": seconds.round(6), "longest": longest.round(6)}
    return [
        {"of": known[at // len(names)], "kind": names[at % len(names)][0], "name": names[at % len(names)][1]}
        | {key: column[at].item() for key, column in sums.items()}
        for at in sorted(np.unique(group).tolist(), key=lambda at: -seconds[at])
    ]


def merged(spans: np.ndarray, since: float, pixel: float) -> np.ndarray:
    """Return the spans of a window by row. Those below a pixel that begin in the same one are joined, under
    what the longest of them is, without its text. Each is at least a pixel wide, or up to the next one."""
    if not len(spans):
        return spans
    long = spans["end"] - spans["start"] >= pixel
    place = np.floor((spans["start"] - since) / pixel).clip(-1)
    order = np.lexsort((spans["seconds"], long, place, spans["row"]))
    other = np.diff(place[order]).astype(bool) | np.diff(spans["row"][order]).astype(bool)
    first = np.flatnonzero(np.append(True, other | long[order][1:]))
    last = np.append(first[1:], len(spans)) - 1
    found = spans[order[last]]
    for name in ("seconds", "calls"):
        found[name] = np.add.reduceat(spans[name][order], first)
    for name in ("end", "longest"):
        found[name] = np.maximum.reduceat(spans[name][order], first)
    found["start"] = np.minimum.reduceat(spans["start"][order], first)
    found["text"][first < last] = -1
    following = np.append(np.where(np.diff(found["row"]), np.inf, found["start"][1:]), np.inf)
    found["end"] = np.maximum(found["end"], np.minimum(found["start"] + pixel, following))
    return found


def by_row(spans: np.ndarray, texts: Sequence[str], rows: int, pixel: float) -> list[list[list[Any]]]:
    """Return what is drawn of each row."""
    digits = max(0, 2 - int(np.floor(np.log10(pixel))))
    since, until = (spans[name].round(digits).tolist() for name in ("start", "end"))
    seconds, longest = (spans[name].astype(float).round(4).tolist() for name in ("seconds", "longest"))
    row, name, calls = (spans[name].tolist() for name in ("row", "name", "calls"))
    details = spans[["text", "step", "micro", "epoch"]].tolist()
    told = ["" if one[0] < 0 else _detail(texts, *one) for one in details]  # of what was merged: none
    found: list[list[list[Any]]] = [[] for _ in range(rows)]
    for of, *span in zip(row, since, until, name, calls, seconds, longest, told, strict=True):
        found[of].append(span)
    return found


def _detail(texts: Sequence[str], text: int, step: int, micro: int, epoch: int) -> str:
    """Describe a span beside its name."""
    words = [f"v{step} (epoch {epoch})" if epoch >= 0 else f"step {step}"] if step >= 0 else []
    words += [f"micro-batch {micro}"] if micro >= 0 else []
    return ", ".join(filter(None, [*words, texts[text][:MOST_TEXT]]))
