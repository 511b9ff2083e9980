"""The spans of a run's timeline in a single table: shares, sums, and the visible part of a time window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.observe.metrics import clock_text

SPAN = np.dtype(
    [(name, "f8") for name in ("start", "end")]
    + [(name, "f4") for name in ("seconds", "longest")]
    + [(name, "i4") for name in ("row", "name", "text", "calls", "step", "micro", "epoch")]
)
Marks = list[tuple[float, str]]
COORDINATOR = "coordinator"
LONG_PAUSE = 10.0  # seconds
LAUNCH_WINDOW = 60.0  # seconds around a start of the coordinator in which processes belong to that launch
MAX_DETAIL_LENGTH = 120  # characters


def since_start(spans: np.ndarray, process_starts: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, Marks]:
    """Return spans on the run's clock, and marks where processes began again, alone or all together. The
    clock begins with the first span, and stands still in long pauses before a later launch."""
    run_start = float(spans["start"].min())
    relaunches = process_starts.get(COORDINATOR, [])[1:]
    pause_lengths = dict[float, float]()
    for relaunch in relaunches:
        last_end = float(spans["end"].max(initial=0, where=spans["end"] <= relaunch))
        if 0 < last_end < relaunch - LONG_PAUSE:
            pause_lengths[relaunch] = relaunch - last_end

    def on_run_clock(times: Any) -> Any:
        paused_seconds = sum(seconds * (times >= relaunch) for relaunch, seconds in pause_lengths.items())
        return times - run_start - paused_seconds

    marks = [
        (on_run_clock(relaunch), f"relaunched {clock_text(pause_lengths.get(relaunch, 0))} later")
        for relaunch in relaunches
    ]
    for process, times in process_starts.items():
        lone_starts = [
            start
            for start in times[1:]
            if all(abs(start - relaunch) >= LAUNCH_WINDOW for relaunch in relaunches)
        ]
        marks += [(on_run_clock(start), f"{process} restarted") for start in lone_starts]

    spans = spans.copy()
    spans["start"] = on_run_clock(spans["start"])
    spans["end"] = on_run_clock(spans["end"])
    return spans, sorted(marks)


def shares(spans: np.ndarray, process_of_row: np.ndarray) -> list[float]:
    """Return the fraction, at most 1, of the process's recorded time that each row took. `process_of_row`:
    the number of a row's process."""
    first_start = np.full(len(process_of_row), np.inf)
    last_end = np.zeros(len(process_of_row))
    np.minimum.at(first_start, process_of_row[spans["row"]], spans["start"])
    np.maximum.at(last_end, process_of_row[spans["row"]], spans["end"])
    row_seconds = np.bincount(spans["row"], spans["seconds"], len(process_of_row))

    process_seconds = np.maximum(last_end - first_start, 1e-9)
    return np.minimum(1, row_seconds / process_seconds[process_of_row]).round(5).tolist()


def window_totals(
    spans: np.ndarray,
    kind_of_row: Sequence[str],
    names: Sequence[tuple[int, str]],
    since: float,
    until: float,
) -> list[dict[str, Any]]:
    """Return sums of a window by kind of process (`of`) and name: the calls of spans that reach into the
    window, the seconds inside the window, and the longest call; the most seconds first. `kind_of_row`: the
    kinds of process by row."""
    process_kinds = sorted({*kind_of_row})

    # A group is a kind of process and a name.
    kind_numbers = np.array([process_kinds.index(kind) for kind in kind_of_row])
    group_number = kind_numbers[spans["row"]] * len(names) + spans["name"]

    window_fraction = np.minimum(spans["end"], until) - np.maximum(spans["start"], since)
    window_fraction /= np.maximum(spans["end"] - spans["start"], 1e-9)
    seconds = np.bincount(group_number, spans["seconds"] * window_fraction)
    calls = np.bincount(group_number, spans["calls"])
    longest = np.zeros(len(seconds))
    np.maximum.at(longest, group_number, spans["longest"])
    group_sums = {"calls": calls.astype(int), "took": seconds.round(6), "longest": longest.round(6)}

    return [
        {
            "of": process_kinds[group_index // len(names)],
            "kind": names[group_index % len(names)][0],
            "name": names[group_index % len(names)][1],
        }
        | {key: column[group_index].item() for key, column in group_sums.items()}
        for group_index in sorted(
            np.unique(group_number).tolist(), key=lambda group_index: -seconds[group_index]
        )
    ]


def merge_spans(spans: np.ndarray, since: float, pixel: float) -> np.ndarray:
    """Return the spans of a window by row. Spans below a pixel that begin in the same pixel are merged, under
    the name of the longest span, without a text. Each span is at least a pixel wide, or reaches up to the
    next span."""
    if not len(spans):
        return spans

    is_long = spans["end"] - spans["start"] >= pixel
    pixel_index = np.floor((spans["start"] - since) / pixel).clip(-1)
    sorted_order = np.lexsort((spans["seconds"], is_long, pixel_index, spans["row"]))

    # A group is a long span, or the short spans of a row that begin in the same pixel.
    changes_pixel = np.diff(pixel_index[sorted_order]).astype(bool)
    changes_row = np.diff(spans["row"][sorted_order]).astype(bool)
    starts_group = changes_pixel | changes_row
    group_starts = np.flatnonzero(np.append(True, starts_group | is_long[sorted_order][1:]))
    group_ends = np.append(group_starts[1:], len(spans)) - 1

    # The last span of a group is the longest span, because of the order.
    merged = spans[sorted_order[group_ends]]
    for name in ("seconds", "calls"):
        merged[name] = np.add.reduceat(spans[name][sorted_order], group_starts)
    for name in ("end", "longest"):
        merged[name] = np.maximum.reduceat(spans[name][sorted_order], group_starts)
    merged["start"] = np.minimum.reduceat(spans["start"][sorted_order], group_starts)
    merged["text"][group_starts < group_ends] = -1

    next_start = np.append(np.where(np.diff(merged["row"]), np.inf, merged["start"][1:]), np.inf)
    merged["end"] = np.maximum(merged["end"], np.minimum(merged["start"] + pixel, next_start))

    return merged


def spans_by_row(
    spans: np.ndarray, texts: Sequence[str], row_count: int, pixel: float
) -> list[list[list[Any]]]:
    """Return the spans to draw for each row."""
    digits = max(0, 2 - int(np.floor(np.log10(pixel))))
    since, until = (spans[column].round(digits).tolist() for column in ("start", "end"))
    seconds, longest = (spans[column].astype(float).round(4).tolist() for column in ("seconds", "longest"))
    row_numbers, name_numbers, calls = (spans[column].tolist() for column in ("row", "name", "calls"))

    detail_texts = list[str]()  # beside the names
    for text, step, micro, epoch in spans[["text", "step", "micro", "epoch"]].tolist():
        detail_parts = list[str]()
        if text >= 0:  # otherwise a merged span, which has no details
            if step >= 0:
                detail_parts.append(f"v{step} (epoch {epoch})" if epoch >= 0 else f"step {step}")
            if micro >= 0:
                detail_parts.append(f"micro-batch {micro}")
            detail_parts.append(texts[text][:MAX_DETAIL_LENGTH])
        detail_texts.append(", ".join(filter(None, detail_parts)))

    row_spans: list[list[list[Any]]] = [[] for _ in range(row_count)]
    for row_number, *span in zip(
        row_numbers, since, until, name_numbers, calls, seconds, longest, detail_texts, strict=True
    ):
        row_spans[row_number].append(span)

    return row_spans
