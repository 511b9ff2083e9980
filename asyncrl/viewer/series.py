"""Makes columns for charts of a run's metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncrl.observe.metrics import GREEDY, LAG_TOKENS, SAMPLED, Row
from asyncrl.observe.summary import lags

POINTS = 2000  # rows that a page is sent; a longer run is thinned
Z = 1.96  # of a 95% interval


def series(rows: Sequence[Row]) -> dict[str, Any]:
    """`columns`: of each metric a value or None for each step; `step`, `seconds` and `tokens` (trained so
    far) are what charts have as x. `lags`: tokens taken by lag, of all steps."""
    merged = _by_step(rows)
    tokens, so_far = [], 0.0
    for row in merged:
        so_far += row.get("trainer/model_tokens", 0.0)
        tokens.append(so_far)
    every, last = math.ceil(len(merged) / POINTS) or 1, len(merged) - 1  # and all that have a validation
    kept = [at for at, row in enumerate(merged) if at % every == 0 or at == last or SAMPLED in row]
    names = sorted({name for index in kept for name in merged[index]})
    columns: dict[str, list[float | None]] = {
        name: [merged[index].get(name) for index in kept] for name in names if not name.startswith(LAG_TOKENS)
    }
    played = [(row, row.get("val-aux/episodes", 0.0)) for row in (merged[index] for index in kept)]
    of_mode = [
        count / max(1, (SAMPLED in row) + (GREEDY in row)) for row, count in played
    ]  # held-out episodes
    for name in (SAMPLED, GREEDY):
        if name in columns:
            pairs = [wilson(*one) for one in zip(columns[name], of_mode, strict=True)]
            columns[f"{name}/low"], columns[f"{name}/high"] = ([pair[at] for pair in pairs] for at in (0, 1))
    return {
        "step": [merged[index]["training/step"] for index in kept],
        "seconds": [merged[index].get("time_s", 0.0) for index in kept],
        "tokens": [tokens[index] for index in kept],
        "columns": columns,
        "lags": lags(merged),
    }


def _by_step(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Returns a row per step: a step that was repeated after a crash counts as it was last, with the
    validation that judged it."""
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        old = merged.get(row["training/step"], {})
        merged[row["training/step"]] = {**old, **row} if "timing_s/step" in row else {**row, **old}
    return [merged[step] for step in sorted(merged)]


def wilson(share: float | None, count: float) -> tuple[float | None, float | None]:
    """Wilson's 95% interval of a share of `count` episodes: 5 of 10 lie between 0.24 and 0.76."""
    if share is None or count <= 0:
        return None, None
    centre = share + Z * Z / (2 * count)
    width = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    whole = 1 + Z * Z / count
    return (centre - width) / whole, (centre + width) / whole
