"""run.png: reward, success, lag, and idle shares over time, from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.observe.files import read_rows
from asyncrl.observe.summary import GREEDY, GREEDY_SCORE, NLL, NLL_HELD_OUT, REWARD, SAMPLED, SAMPLED_SCORE

# Panels: title, (metric, label, line style).
PANELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "reward and held-out score",
        (
            (REWARD, "reward (all landed)", "-"),
            (NLL, "loss per token, of a supervised run", "-"),
            (NLL_HELD_OUT, "loss per token, held out", "o-"),
            (SAMPLED_SCORE, "score, sampled", "o-"),
            (GREEDY_SCORE, "score, greedy", "s--"),
        ),
    ),
    ("held-out success", ((SAMPLED, "sampled", "o-"), (GREEDY, "greedy", "s--"))),
    (
        "lag of trained tokens (batches)",
        (
            ("staleness/lag/mean", "mean", "-"),
            ("staleness/lag/p95", "p95", "--"),
            ("staleness/lag/max", "max", ":"),
        ),
    ),
    (
        "idle share",
        (("async/trainer_idle_frac", "trainer", "-"), ("async/rollout_idle_frac", "rollout", "--")),
    ),
)


def draw(run_dir: Path) -> Path | None:
    """Draw the picture; None when there is no metrics row."""
    rows = read_rows(run_dir)
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 11), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, lines) in zip(figure.subplots(len(PANELS), 1, sharex=True), PANELS, strict=True):
        for name, label, style in lines:
            points = [(row["time_s"], row[name]) for row in rows if name in row and "time_s" in row]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.2)
        _finish(axes, title)
    axes.set_xlabel("seconds")
    path = run_dir / "run.png"
    figure.savefig(path, dpi=110)
    return path


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))  # rewards may be negative
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)
