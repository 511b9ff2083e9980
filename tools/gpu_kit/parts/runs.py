"""What runs of `asyncrl` leave behind: for the parts that start some."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

TAIL = 25  # lines of each log


def summary(run_dir: Path) -> dict[str, Any]:
    """The run's summary; empty where it has written none."""
    with suppress(OSError, ValueError):
        written: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        return written
    return {}


def step_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics of the steps so far."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [row for row in map(json.loads, lines) if "timing_s/step" in row]


def ends_of_logs(run_dir: Path, *others: Path) -> str:
    """The last lines of everything that the run said."""
    ends = []
    for file in (*others, *sorted(run_dir.glob("logs/*"))):
        if file.is_file():
            lines = file.read_text(errors="replace").splitlines()[-TAIL:]
            ends.append("\n".join([f"--- {file.name}", *lines]))
    return "\n".join(ends)


def account(flow: dict[str, int]) -> str:
    """The account of episodes in words: "96 issued, 90 trained, …"."""
    return ", ".join(f"{value} {name}" for name, value in flow.items() if value)


def mean_of(rows: Iterable[dict[str, Any]], name: str) -> float | None:
    """The mean of a metric over the rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None
