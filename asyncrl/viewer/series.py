"""Makes columns for charts of a run's metrics, and marks for events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import leaves
from asyncrl.errors import AsyncrlError
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import find_alerts
from asyncrl.observe.columns import STEP_NAME, MetricColumns
from asyncrl.observe.evidence import SETTLED_STEPS, WINDOW_STEPS
from asyncrl.observe.held_out import wilson_interval
from asyncrl.store.launches import describe_differences, launches_of
from asyncrl.store.reader import RunReader

MAX_POINTS = 1000  # points of a curve on a page; a longer curve is thinned
ALERT_CHECKS = 100  # positions at which a run is searched for alerts
LOST_METRICS = ("rollout/attempts_failed/worker_lost", "rollout/attempts_failed/engine_lost")


def curve_series(
    columns: MetricColumns, x_axis: str = "step", since: float | None = None, until: float | None = None
) -> dict[str, Any]:
    """Return curves. `columns`: for each metric a value or None for each row. `step`, `seconds` and `tokens`
    (trained so far) are the possible x axes, and `x_axis` names the axis of `since` and `until`. A stretch of
    more than MAX_POINTS steps is reduced to the least and the highest value of each bucket, and validations.
    """
    tokens = np.nancumsum(columns.values("trainer/model_tokens"), dtype=float)
    axes = {"step": columns.steps, "seconds": columns.values("time_s"), "tokens": tokens}
    x_values = np.maximum.accumulate(np.nan_to_num(axes.get(x_axis, columns.steps)))

    # A row more on either side, so that lines reach the edges of the chart.
    first_row = 0
    last_row = len(x_values)
    if since is not None:
        first_row = max(0, int(np.searchsorted(x_values, since)) - 1)
    if until is not None:
        last_row = min(len(x_values), int(np.searchsorted(x_values, until, "right")) + 1)

    # The lowest and the highest value of a bucket go to the first and the last row of the bucket.
    bucket_edges = np.linspace(first_row, last_row, MAX_POINTS // 2 + 1).astype(int)
    is_thinned = last_row - first_row > MAX_POINTS
    bucket_rows = np.arange(first_row, last_row)
    if is_thinned:
        bucket_rows = np.stack([bucket_edges[:-1], bucket_edges[1:] - 1], 1).ravel()

    validated_rows = columns.steps_having(*metric.HELD_OUT)
    validated_rows = validated_rows[(validated_rows >= first_row) & (validated_rows < last_row)]
    shown_rows = np.union1d(bucket_rows, _thinned(validated_rows))

    def shown_values(name: str) -> list[float | None]:
        column = columns.values(name)
        if not is_thinned or name.startswith("val-"):
            return _rounded_list(column[shown_rows])

        lowest = np.fmin.reduceat(column[:last_row], bucket_edges[:-1])
        highest = np.fmax.reduceat(column[:last_row], bucket_edges[:-1])
        is_rising = column[bucket_edges[1:] - 1] >= column[bucket_edges[:-1]]
        thinned = np.full(len(x_values), math.nan)
        thinned[bucket_rows] = np.where(is_rising, [lowest, highest], [highest, lowest]).T.ravel()

        return _rounded_list(thinned[shown_rows])

    names = [
        name
        for name in sorted(columns.metric_names()[0] - {STEP_NAME})
        if not name.startswith(metric.LAG_TOKENS)
    ]
    curves = {name: shown_values(name) for name in names}
    success_modes = [name for name in (metric.SAMPLED, metric.GREEDY) if name in curves]
    question_counts = curves.get(metric.ASKED, [None] * len(shown_rows))
    for name in success_modes:
        intervals = [
            wilson_interval(fraction, count or 0.0)
            for fraction, count in zip(curves[name], question_counts, strict=True)
        ]
        curves[f"{name}/low"] = [interval[0] for interval in intervals]
        curves[f"{name}/high"] = [interval[1] for interval in intervals]

    return {
        **{name: _rounded_list(values[shown_rows]) for name, values in axes.items()},
        "steps": len(x_values),
        "columns": curves,
        "bands": {
            **dict(_bands(curves)),
            **{name: [(f"{name}/low", f"{name}/high")] for name in success_modes},
        },
    }


def _thinned(rows: np.ndarray) -> np.ndarray:
    return rows[:: len(rows) // (MAX_POINTS // 2) + 1]


def _rounded_list(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _bands(curves: Mapping[str, Sequence[float | None]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the names of both ends of the bands around a mean, the widest first; constant bands are left
    out."""
    for name in (name for name in curves if name.endswith("/mean")):
        prefix = name.removesuffix("mean")
        pairs = [(prefix + low_suffix, prefix + high_suffix) for low_suffix, high_suffix in metric.QUANTILES]
        if changing_bands := [
            pair
            for pair in pairs
            if curves.keys() >= {*pair} and any(len({*curves[end]} - {None}) > 1 for end in pair)
        ]:
            yield name, changing_bands


def run_marks(run_dir: Path, columns: MetricColumns) -> list[dict[str, Any]]:
    """Return the events of a run by step: kind and text."""
    steps = columns.steps.tolist()
    trained = columns.steps_having(metric.STEP_SECONDS)
    check_positions = np.linspace(
        WINDOW_STEPS, len(trained), ALERT_CHECKS if len(trained) >= WINDOW_STEPS else 0
    )
    windows = [trained[end - WINDOW_STEPS : end] for end in np.unique(check_positions.astype(int))]
    validated = _thinned(columns.steps_having(*metric.HELD_OUT))

    # Rules also compare with the first steps, and with the steps before the best validation so far.
    successes = columns.values(metric.SAMPLED)[validated]
    best_before = np.fmax.accumulate(np.append(-math.inf, successes))[:-1]
    best_windows = [trained[trained <= best][-WINDOW_STEPS:] for best in validated[successes > best_before]]
    read_rows = np.unique(np.concatenate([validated, trained[:SETTLED_STEPS], *best_windows, *windows]))
    row_by_index = dict(zip(read_rows.tolist(), columns.rows(read_rows), strict=True))

    validation_marks = (
        (steps[row_index], metric.figures(metric.HELD_OUT, row_by_index[row_index]))
        for row_index in validated.tolist()
    )
    marks = [(step, "validation", ", ".join(texts)) for step, texts in validation_marks]

    counted = columns.steps_having(LOST_METRICS[0])
    counts = np.sum([np.nan_to_num(columns.values(name)[counted]) for name in LOST_METRICS], axis=0)
    new_losses = zip(counted.tolist(), np.diff(counts, prepend=0.0).tolist(), strict=True)
    loss_text = "attempts lost with a worker: {:.0f}".format
    marks += [(steps[row_index], "lost", loss_text(count)) for row_index, count in new_losses if count > 0]

    keys = dict[str, Any]()
    with suppress(AsyncrlError), closing(RunReader.open(run_dir)) as reader:
        launches = launches_of(run_dir)
        keys |= leaves(launches[-1].config)
        launch_marks = dict.fromkeys(reader.restarts(), ("restart", "restarted"))
        for old_launch, new_launch in pairwise(launches):
            launch_marks[new_launch.first_step] = (
                "resume",
                f"resumed with {describe_differences(old_launch.config, new_launch.config)}",
            )

        marks += [(step, *mark) for step, mark in launch_marks.items()]

    alerts_before = set[str]()
    for last_row in (int(window[-1]) for window in windows):
        current_alerts = find_alerts(
            [row for row_index, row in row_by_index.items() if row_index <= last_row], {}, keys
        )
        active_alerts = {alert.name: alert.what for alert in current_alerts if alert.level in ("bad", "warn")}
        marks += [
            (steps[last_row], "alert", f"{name}: {active_alerts[name]}")
            for name in active_alerts.keys() - alerts_before
        ]
        alerts_before = {*active_alerts}

    return [{"step": int(step), "kind": kind, "text": text} for step, kind, text in sorted(marks)]
