"""Flow control in simulated runs: tokens/s, masked tokens and lag of eight workloads, with four seeds each.

python tools/bench/flow_control.py                     # a minute; prints a table for docs/log.md
python tools/bench/flow_control.py --budget 0.02       # of another buffer.stale_budget
"""

from __future__ import annotations

import argparse
import statistics

from common import table
from msgspec.structs import replace

from asyncrl.buffer.simulator import LogNormal, SimulatedStep, Simulation, Workload

PLAIN = Workload()
SLOW_TOOL = replace(PLAIN, members=8, turns=4, tool=LogNormal(0.097, 1.5))
TAIL = replace(  # that of async_ratio.py: 0.3 s a call, the demo's model
    PLAIN,
    members=8,
    turns=1,
    again=0.47,
    tokens=LogNormal(7.0, 0.3),
    tool=LogNormal(0.097, 1.5),
    speed=600.0,
    train=0.085,
    publish=0.02,
    limit=600.0,
)
WORKLOADS = {
    "tail": replace(TAIL, deadline="auto"),
    "tail, complete": TAIL,
    "rollout bound": PLAIN,
    "trainer bound": replace(PLAIN, train=1.0),
    "slow tool": SLOW_TOOL,
    "slow tool, partial": replace(SLOW_TOOL, deadline=1.0),
    "lengths": replace(PLAIN, turns=1, tokens=LogNormal(100.0, 1.0), slots=256),
    "synchronous": replace(SLOW_TOOL, bound=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.01)
    options = parser.parse_args()
    lines = []
    for name, workload in WORKLOADS.items():
        runs = [
            Simulation(replace(workload, budget=options.budget), seed).run(options.steps)
            for seed in range(1, options.seeds + 1)
        ]
        lines.append([name, *figures(runs)])
    print(table(["workload", "tokens/s", "masked", "lag", "live limit"], lines))


def figures(runs: list[list[SimulatedStep]]) -> list[str]:
    """Means over the runs; of masked tokens and lag over their steps."""
    speeds = [sum(s.tokens for s in run) / sum(s.measured.seconds for s in run) for run in runs]
    steps = [(step.measured.masked, step.lag, step.limit) for run in runs for step in run]
    masked, lag, limit = (statistics.mean(values) for values in zip(*steps, strict=True))
    return [f"{statistics.mean(speeds):.0f}", f"{masked:.2%}", f"{lag:.2f}", f"{limit:.1f}"]


if __name__ == "__main__":
    main()
