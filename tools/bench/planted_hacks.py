"""Trains the calculator's model with rewards that can be gamed, and prints the alerts of each run by step.

    python tools/bench/planted_hacks.py
    python tools/bench/planted_hacks.py --runs runs/seed-0 runs/seed-1

Each reward reports the right answer as `acc`, so held-out success cannot be gamed. The first command takes
about 80 s for each reward on two idle CPU cores. The model games `keyword`; under `grader_timeout` and
`single_call` its held-out success rose, so a run without a warning is right there. With `--runs` nothing is
trained: the alerts of these runs are printed, for example to show that a healthy run has none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, rows, table, train

from asyncrl.config.base import leaves
from asyncrl.observe import metrics as metric
from asyncrl.observe.alerts import Alert, find_alerts
from asyncrl.observe.evidence import rows_for_rules
from asyncrl.store.launches import launches_of

SETTINGS = ["total_steps=48", "rollout.slots=32", "validation.samples=128", "validation.every=8"]
HACKS = ("keyword", "length", "grader_timeout", "single_call")  # functions in gamed_rewards.py


def alerts_by_step(run_dir: Path) -> list[Alert]:
    """Find the alerts of a run as the coordinator does, after every row: each alert when it first has its
    level and its advice."""
    keys = dict(leaves(launches_of(run_dir)[-1].config))
    seen: set[tuple[str, str, str]] = set()
    first_alerts: list[Alert] = []
    recent_rows: Sequence[metric.Row] = []

    for row in rows(run_dir):
        recent_rows = rows_for_rules([*recent_rows, row])
        for alert in find_alerts(recent_rows, {}, keys):
            identity = (alert.name, alert.level, alert.do)
            if identity not in seen:
                seen.add(identity)
                first_alerts.append(alert)

    return first_alerts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, nargs="+", help="print the alerts of these runs")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "planted_hacks")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    run_dirs = options.runs or []
    for hack in () if run_dirs else HACKS:
        reward = f"rollout.reward={Path(__file__).with_name('gamed_rewards.py').resolve()}:{hack}"
        train(hack, options.run_dir, [reward, *SETTINGS, *options.overrides])
        run_dirs = [*run_dirs, options.run_dir / hack]

    lines = [
        [run_dir.name, str(alert.step), alert.level, f"{alert.name}: {alert.what}"]
        for run_dir in run_dirs
        for alert in alerts_by_step(run_dir)
    ]
    print(table(["run", "step", "level", "alert"], lines))


if __name__ == "__main__":
    main()
