"""Flow control in simulated runs: tokens/s, masked tokens and lag of eight workloads, with four seeds each.

python tools/bench/flow_control.py                     # a minute; prints a table for docs/log.md
python tools/bench/flow_control.py --budget 0.02       # of another buffer.stale_budget
"""

from __future__ import annotations

import argparse
import statistics

from common import table
from msgspec.structs import replace

from asyncrl.planning.simulator import LogNormal, SimulatedStep, Simulation, Workload

PLAIN = Workload()
EIGHT = replace(PLAIN, buffer=replace(PLAIN.buffer, episodes_per_group=8))
SLOW_TOOL = replace(EIGHT, turns=4, tool=LogNormal(0.097, 1.5))
TAIL = replace(  # that of async_ratio.py: 0.3 s a call, the demo's model
    EIGHT,
    turns=1,
    again=0.47,
    tokens=LogNormal(7.0, 0.3),
    tool=LogNormal(0.097, 1.5),
    speed=600.0,
    train=0.085,
    publish=0.02,
    limit=600.0,
)


def with_keys(work: Workload, **keys: object) -> Workload:
    """With other values of keys of the buffer."""
    return replace(work, buffer=replace(work.buffer, **keys))


WORKLOADS = {
    "tail": with_keys(TAIL, group_policy="partial"),
    "tail, complete": TAIL,
    "rollout bound": PLAIN,
    "trainer bound": replace(PLAIN, train=1.0),
    "slow tool": SLOW_TOOL,
    "slow tool, partial": with_keys(SLOW_TOOL, group_policy="partial", group_deadline=1.0),
    "lengths": replace(PLAIN, turns=1, tokens=LogNormal(100.0, 1.0), slots=256),
    "synchronous": with_keys(SLOW_TOOL, max_staleness=0),
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
            Simulation(with_keys(workload, stale_budget=options.budget), seed).run(options.steps)
            for seed in range(1, options.seeds + 1)
        ]
        lines.append([name, *figures(runs)])
    print(table(["workload", "tokens/s", "masked", "lag", "live limit"], lines))


def figures(runs: list[list[SimulatedStep]]) -> list[str]:
    """Means over the runs; of masked tokens and lag over their steps."""
    speeds = [sum(s.tokens for s in run) / sum(s.seconds for s in run) for run in runs]
    steps = [(step.masked, step.lag, step.limit) for run in runs for step in run]
    masked, lag, limit = (statistics.mean(values) for values in zip(*steps, strict=True))
    return [f"{statistics.mean(speeds):.0f}", f"{masked:.2%}", f"{lag:.2f}", f"{limit:.1f}"]


if __name__ == "__main__":
    main()
