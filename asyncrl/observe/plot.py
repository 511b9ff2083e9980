"""run.png: the curves of a run, from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.files import read_rows
from asyncrl.observe.progress import clock
from asyncrl.observe.summary import (
    COMPONENT,
    COMPONENT_HELD_OUT,
    GREEDY,
    GREEDY_SCORE,
    NLL,
    NLL_HELD_OUT,
    REWARD,
    SAMPLED,
    SAMPLED_SCORE,
    Row,
    latest,
    matching,
)

ATTEMPTS = "rollout/attempts_failed/*"
STYLES = ("-", "--", ":", "-.")

# Panels: title, and its lines by metric; a `*` in a metric stands for any text, which comes before the label.
# Steps are joined by a line; validations, which are few, have marks.
PANELS: dict[str, dict[str, str]] = {
    "reward, and score on held-out samples": {
        REWARD: "reward (all landed)",
        SAMPLED_SCORE: "held out, sampled",
        GREEDY_SCORE: "held out, greedy",
    },
    "success on held-out samples (share)": {SAMPLED: "sampled", GREEDY: "greedy"},
    "components of the reward": {COMPONENT: "", COMPONENT_HELD_OUT: ", held out"},
    "loss": {"actor/pg_loss": "policy", NLL: "per token (supervised)", NLL_HELD_OUT: "per token, held out"},
    "entropy (nats per token)": {"actor/entropy": "policy"},
    "attempts that failed (total, by kind)": {ATTEMPTS: ""},
    "episodes filtered, dropped and failed (total)": {
        "flow/filtered": "filtered",
        "flow/dropped": "dropped",
        "flow/failed": "failed",
    },
    "lag of trained tokens (steps)": {
        "staleness/lag/mean": "mean",
        "staleness/lag/p95": "p95",
        "staleness/lag/max": "max",
    },
    "trained tokens masked for their lag (share)": {"staleness/masked_token_frac": "masked"},
    "idle (share of time)": {"async/trainer_idle_frac": "trainer", "async/rollout_idle_frac": "rollout"},
    "response length (tokens)": {
        "rollout/response_length/mean": "mean",
        "rollout/response_length/max": "max",
    },
}


def draw(run_dir: Path) -> Path | None:
    """Draw the picture, replacing an older one as a whole; None when there is no metrics row."""
    rows = read_rows(run_dir)
    if not rows:
        return None
    path = run_dir / "run.png"
    temporary = path.with_suffix(".tmp")
    figure({run_dir.resolve().name: rows}).savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    return path


def figure(runs: Mapping[str, Sequence[Row]]) -> Any:
    """A matplotlib figure of the rows of runs, by name. The x axis counts steps. A validation is at the step
    whose weights it judged, not where its row was written. With one run the upper axis says when its steps
    were committed; with several, a colour is a run."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # names of runs may have dollar signs
        return _figure(runs)


def _figure(runs: Mapping[str, Sequence[Row]]) -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 15), layout="constrained")
    drawn.suptitle(", ".join(runs), fontsize=13, wrap=True)
    grid = drawn.subplots((len(PANELS) + 1) // 2, 2, sharex=True)
    for axes in grid.flat[len(PANELS) :]:
        axes.set_visible(False)
    for axes, (title, lines) in zip(grid.flat, PANELS.items(), strict=False):
        for number, (name, rows) in enumerate(runs.items()):
            for line, (metric, label) in enumerate(_lines(lines, rows).items()):
                points = _points(rows, metric)
                if not points:
                    continue
                look = {"color": f"C{number}", "linestyle": STYLES[line % 4]} if len(runs) > 1 else {}
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o" if metric.startswith("val-") or len(points) == 1 else None,
                    label=f"{name}: {label}" if len(runs) > 1 else label,
                    markersize=4,
                    linewidth=1.2,
                    **look,
                )
        _finish(axes, title)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    if len(runs) == 1:
        for axes in grid[0]:
            _add_times(axes, *runs.values())
    return drawn


def _points(rows: Sequence[Row], metric: str) -> list[tuple[float, float]]:
    """(step, value), by step: a step that was repeated after a crash counts once, as it was last."""
    return [(row["training/step"], row[metric]) for row in latest(row for row in rows if metric in row)]


def _lines(lines: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """Metric → label, with those that a `*` stands for. Kinds of failure that did not happen are left out."""
    found: dict[str, str] = {}
    for metric, label in lines.items():
        named = matching(metric, rows) if "*" in metric else {"": metric}
        if metric == ATTEMPTS:
            named = {text: name for text, name in named.items() if any(row.get(name) for row in rows)}
        found |= {name: f"{text}{label}" for text, name in named.items()}
    return found


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    if not axes.lines:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="grey")
        axes.set_yticks([])
        return
    axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))  # rewards may be negative
    axes.legend(fontsize=8)


def _add_times(axes: Any, rows: Sequence[Row]) -> None:
    """An upper axis with the time since the start at which steps were committed."""
    import numpy as np

    committed = latest(row for row in rows if "timing_s/step" in row and "time_s" in row)
    if not committed:
        return
    steps = [row["training/step"] for row in committed]
    low, high = axes.get_xlim()
    marks = [step for step in axes.get_xticks() if max(low, steps[0]) <= step <= min(high, steps[-1])]
    seconds = np.interp(marks, steps, [row["time_s"] for row in committed])
    upper = axes.secondary_xaxis("top")
    upper.set_xticks(marks, [clock(at) for at in seconds], fontsize=8)
    upper.set_xlabel("h:mm:ss since the start", fontsize=8)
