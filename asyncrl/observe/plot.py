"""run.png: the curves of a run, from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.files import read_rows
from asyncrl.observe.metrics import STEP_SECONDS, Row, charts, clock
from asyncrl.observe.summary import latest


def draw(run_dir: Path) -> Path | None:
    """Draw the picture, replacing an older one as a whole; None when there is no metrics row."""
    rows = read_rows(run_dir)
    if not rows:
        return None
    from matplotlib import rc_context

    path = run_dir / "run.png"
    temporary = path.with_suffix(".tmp")
    with rc_context({"text.parse_math": False}):  # names of runs may have dollar signs
        figure(run_dir.resolve().name, rows).savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    return path


def figure(name: str, rows: Sequence[Row]) -> Any:
    """Make a matplotlib figure of the charts of which something is known. The x axis counts steps, and a
    validation is at the step whose weights it judged. The upper axis says when steps were committed."""
    from matplotlib.figure import Figure

    names, happened = set[str]().union(*rows), {name for row in rows for name in row if row[name]}
    found = {chart.title: chart.metrics for chart in charts(names, happened)}
    height = max(1, (len(found) + 1) // 2)
    drawn = Figure(figsize=(12, 2.5 * height), layout="constrained")
    drawn.suptitle(name, fontsize=13, wrap=True)
    grid = drawn.subplots(height, 2, sharex=True, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (title, lines) in zip(grid.flat, found.items(), strict=False):
        for metric, label in lines.items():
            points = [(row["training/step"], row[metric]) for row in latest(r for r in rows if metric in r)]
            marks = "o" if metric.startswith("val-") or len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), marker=marks, label=label, markersize=4, linewidth=1.2)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))  # rewards may be negative
        axes.legend(fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    for axes in grid[0]:
        _add_times(axes, rows)
    return drawn


def _add_times(axes: Any, rows: Sequence[Row]) -> None:
    """Add an upper axis with the time since the start at which steps were committed."""
    import numpy as np

    committed = latest(row for row in rows if STEP_SECONDS in row and "time_s" in row)
    if not committed:
        return
    steps = [row["training/step"] for row in committed]
    low, high = axes.get_xlim()
    marks = [step for step in axes.get_xticks() if max(low, steps[0]) <= step <= min(high, steps[-1])]
    seconds = np.interp(marks, steps, [row["time_s"] for row in committed])
    upper = axes.secondary_xaxis("top")
    upper.set_xticks(marks, [clock(at) for at in seconds], fontsize=8)
    upper.set_xlabel("h:mm:ss since the start", fontsize=8)
