"""The points of staleness.py as Markdown and as a picture. Intervals are bootstrapped over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import table

RESAMPLES = 10_000
HEADER = [
    "arm",
    "lag",
    "success, mean [95%]",
    "minus lag 0",
    "minus `none`",
    "of each seed",
    "least ≥",
    "CPU s/run",
]


@dataclass(frozen=True)
class Cell:
    """The seeds of an arm at a lag: success of each seed, the least 95% Wilson bound of a seed, CPU
    seconds per run."""

    arm: str
    lag: int
    success: dict[int, float]
    least: float
    seconds: float

    @property
    def values(self) -> np.ndarray:
        return np.array([self.success[seed] for seed in sorted(self.success)])


def cells(rows: Sequence[dict[str, Any]], arms: Sequence[str]) -> list[Cell]:
    """In the order of the arms, then by lag."""
    rows_by_cell: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_cell.setdefault((row["arm"], row["lag"]), []).append(row)
    return [
        Cell(
            arm,
            lag,
            {row["seed"]: row["success"] for row in group},
            min(row["low"] for row in group),
            float(np.mean([row["seconds"] for row in group])),
        )
        for (arm, lag), group in sorted(
            rows_by_cell.items(), key=lambda item: (arms.index(item[0][0]), item[0][1])
        )
    ]


def interval(values: np.ndarray) -> tuple[float, float]:
    """95% percentile bootstrap of the mean. One value has no interval: NaN."""
    if len(values) < 2:
        return float("nan"), float("nan")
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values))).mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def markdown(rows: Sequence[dict[str, Any]], arms: Sequence[str]) -> str:
    """A matrix of arms and lags, then every point."""
    by_place = {(cell.arm, cell.lag): cell for cell in cells(rows, arms)}
    lags = sorted({lag for _, lag in by_place})
    present = [arm for arm in arms if any((arm, lag) in by_place for lag in lags)]
    matrix = [
        [f"`{arm}`", *(_mean(by_place[arm, lag].values) if (arm, lag) in by_place else "" for lag in lags)]
        for arm in present
    ]

    lines = [
        [
            f"`{cell.arm}`",
            str(cell.lag),
            _mean(cell.values),
            _difference(cell, by_place.get((cell.arm, 0))),
            _difference(cell, by_place.get(("none", cell.lag))),
            " ".join(f"{value:.2f}" for value in cell.values),
            f"{cell.least:.2f}",
            f"{cell.seconds:.0f}",
        ]
        for cell in by_place.values()
    ]

    first = table(["success, mean [95%]", *(f"lag {lag}" for lag in lags)], matrix)
    return "\n\n".join([first, table(HEADER, lines)])


def draw(rows: Sequence[dict[str, Any]], arms: Sequence[str], path: Path) -> None:
    """Draw a panel per arm: every seed a dot, the mean with its interval, `none` in grey behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    all_cells = cells(rows, arms)
    arms_with_lags = [arm for arm in arms if len({cell.lag for cell in all_cells if cell.arm == arm}) > 1]
    columns = min(4, max(len(arms_with_lags), 1))
    height = -(-len(arms_with_lags) // columns) or 1
    figure = Figure(figsize=(2.6 * columns, 2.3 * height), layout="constrained")
    FigureCanvasAgg(figure)

    panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False).flat
    lags = sorted({cell.lag for cell in all_cells})
    for axes, arm in zip(panels, arms_with_lags, strict=False):
        _line(axes, [cell for cell in all_cells if cell.arm == "none"], lags, "0.75")
        _line(
            axes,
            [cell for cell in all_cells if cell.arm == arm],
            lags,
            "tab:blue" if arm != "none" else "0.4",
        )

        axes.set(title=arm, ylim=(-0.02, 1.02), xticks=range(len(lags)), xticklabels=lags)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)

    figure.supxlabel("forced lag (steps)", fontsize=9)
    figure.supylabel("held-out success", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _line(axes: Any, line: Sequence[Cell], lags: Sequence[int], color: str) -> None:
    at = [lags.index(cell.lag) for cell in line]
    for x, cell in zip(at, line, strict=True):
        axes.plot([x] * len(cell.values), cell.values, ".", color=color, markersize=3, alpha=0.5)
        axes.vlines(x, *interval(cell.values), color=color, linewidth=2)
    axes.plot(at, [cell.values.mean() for cell in line], "-o", color=color, markersize=3, linewidth=1)


def _mean(values: np.ndarray) -> str:
    low, high = interval(values)
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]" if len(values) > 1 else f"{values.mean():.3f}"


def _difference(cell: Cell, reference: Cell | None) -> str:
    """Paired by seed."""
    common = sorted(cell.success.keys() & reference.success.keys()) if reference else []
    if reference is None or not common or (cell.arm, cell.lag) == (reference.arm, reference.lag):
        return ""
    gaps = np.array([cell.success[seed] - reference.success[seed] for seed in common])
    low, high = interval(gaps)
    return f"{gaps.mean():+.3f} [{low:+.3f}, {high:+.3f}]" if len(gaps) > 1 else f"{gaps.mean():+.3f}"
