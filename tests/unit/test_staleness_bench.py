"""What the staleness benchmark plans and how it sums up (tools/bench/staleness*.py)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.fakes.scripts import bench_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return bench_script("staleness")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return bench_script("staleness_report")


def row(arm: str, lag: int, seed: int, success: float) -> dict[str, Any]:
    return {"arm": arm, "lag": lag, "seed": seed, "success": success, "low": success - 0.1, "seconds": 9.6}


def test_lags_come_first_and_controls_run_once(bench: ModuleType) -> None:
    planned = [(p.arm, p.lag, p.seed) for p in bench.plan(["start", "shuffled", "none"], [16, 0], 2)]
    assert planned == [
        ("none", 16, 0),
        ("none", 16, 1),
        ("start", 0, 0),
        ("shuffled", 0, 0),
        ("none", 0, 0),
        ("shuffled", 0, 1),
        ("none", 0, 1),
    ]


def test_the_bound_is_the_lag_and_only_one_arm_is_uncorrected(bench: ModuleType) -> None:
    assert bench.Point("none", 8, 3).config().algorithm.correction == {}
    for arm in ("dapo", "rloo"):
        config = bench.Point(arm, 8, 3).config()
        assert (config.buffer.max_staleness, config.seed) == (8, 3)
        assert config.algorithm.correction != {}


def test_differences_are_paired_by_seed(report: ModuleType) -> None:
    rows = [row("none", 4, seed, value) for seed, value in enumerate((0.1, 0.5))]
    rows += [row("rloo", 4, seed, value) for seed, value in ((2, 0.9), (1, 0.75), (0, 0.35))]
    line = report.markdown(rows, ["none", "rloo"]).splitlines()[-1]
    # Means over all seeds, the gap over the two that both have: +0.25 in each.
    assert line.startswith("| `rloo` | 4 | 0.667 [")
    assert "+0.250 [+0.250, +0.250]" in line and "0.35 0.75 0.90" in line and line.endswith("| 0.25 | 10 |")
