"""Asynchronous against synchronous, with a slow tool: wall time of the same number of steps.

    python tools/bench/async_ratio.py --steps 50 --latency 0.3

Both runs are the same program and the same work per step; only `buffer.max_staleness` differs. T is wall
time per step. g and t are the seconds per step that the rollout engines and the trainer were busy computing
in the synchronous run: the limit T_sync/(g + t) is for roles that share all machines, T_sync/max(g, t) for
roles that have their own.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from common import ROOT, rows, table, train


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--latency", type=float, default=0.3, help="mean seconds of a tool call (log-normal)")
    parser.add_argument("--sigma", type=float, default=1.5, help="sigma of its logarithm")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "async-ratio")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    common = [
        f"total_steps={options.steps}",
        f"rollout.tool_args.calculator={{latency_mean: {options.latency}, latency_sigma: {options.sigma}}}",
        *("validation.samples=0", "data.test=''", "checkpoint.every=0", "observe.plot=false"),
        *options.overrides,
    ]
    modes = {"sync (max_staleness=0)": ["buffer.max_staleness=0"], "async (default)": []}
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for repeat in range(options.repeats):
        for index, (mode, overrides) in enumerate(modes.items()):
            name = f"run-{index}-{repeat}"
            result = train(name, options.run_dir, common + overrides)
            runs[mode].append(measure(result, rows(options.run_dir / name)))
            print(mode, runs[mode][-1], flush=True)
    report(
        {
            mode: {key: statistics.median(r[key] for r in found) for key in found[0]}
            for mode, found in runs.items()
        }
    )


def measure(result: dict[str, Any], found: list[dict[str, float]]) -> dict[str, float]:
    """Seconds per step after the first, whose time includes the start of the processes."""
    steps = [row for row in found if "timing_s/step" in row][1:]
    seconds = sum(row["timing_s/step"] for row in steps)
    busy = {
        role: sum(row["timing_s/step"] * (1 - row.get(f"async/{role}_idle_frac", 1.0)) for row in steps)
        for role in ("rollout", "trainer")
    }
    return {
        "T": seconds / len(steps),
        "g": busy["rollout"] / len(steps),
        "t": busy["trainer"] / len(steps),
        "total": result["seconds"],
        "lag": result["lag_mean"],
    }


def report(medians: dict[str, dict[str, float]]) -> None:
    lines = [
        [mode, f"{m['total']:.1f}", f"{m['T']:.2f}", f"{m['g']:.2f}", f"{m['t']:.2f}", f"{m['lag']:.2f}"]
        for mode, m in medians.items()
    ]
    print(table(["mode", "wall s", "T s/step", "g busy s/step", "t busy s/step", "lag mean"], lines))
    sync, fast = medians.values()
    print(f"\nT_sync / T_async = {sync['T'] / fast['T']:.2f}")
    print(f"limit T_sync/(g + t) = {sync['T'] / (sync['g'] + sync['t']):.2f}")
    print(f"limit T_sync/max(g, t) = {sync['T'] / max(sync['g'], sync['t']):.2f}")


if __name__ == "__main__":
    main()
