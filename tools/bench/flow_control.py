"""Flow control in simulated runs: tokens/s, masked tokens and lag of eight workloads, with four seeds each.

python tools/bench/flow_control.py                     # a minute; prints a table for docs/log.md
python tools/bench/flow_control.py --budget 0.02       # of another buffer.stale_budget
"""

from __future__ import annotations

import argparse
import math
import statistics
from random import Random

from common import table
from msgspec.structs import replace

from asyncrl.planning.simulator import Recorded, RecordedTurn, SimulatedStep, Simulation, Workload

GROUPS = 1000  # that episodes are drawn from


def drawn(
    members: int,
    turns: int,
    tokens: tuple[float, float],
    call: tuple[float, float] = (0.0, 0.0),
    again: float = 0.0,
) -> Recorded:
    """Groups whose episodes sample `turns` times, and once more with probability `again`, and again, with a
    tool call between two turns. Medians and sigmas of log-normal tokens of a turn, and seconds of a call."""
    random = Random(0)

    def episode() -> tuple[RecordedTurn, ...]:
        count = turns
        while random.random() < again:
            count += 1
        played = [RecordedTurn(log_normal(*tokens), log_normal(*call)) for _ in range(count)]
        return (*played[:-1], replace(played[-1], wait=0.0))

    def log_normal(median: float, sigma: float) -> float:
        return median * math.exp(random.gauss(0.0, sigma))

    return tuple(tuple(episode() for _ in range(members)) for _ in range(GROUPS))


PLAIN = Workload(drawn(4, 2, (20.0, 0.0)))
EIGHT = replace(PLAIN.buffer, episodes_per_group=8)
SLOW_TOOL = Workload(drawn(8, 4, (20.0, 0.0), (0.097, 1.5)), EIGHT)
TAIL = Workload(  # that of async_ratio.py: 0.3 s a call, the demo's model
    drawn(8, 1, (7.0, 0.3), (0.097, 1.5), again=0.47),
    EIGHT,
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
    "lengths": replace(PLAIN, recorded=drawn(4, 1, (100.0, 1.0)), slots=256),
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
