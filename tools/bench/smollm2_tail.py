"""A pretrained model learns while its tool has a very long tail: the default bound on staleness against 4.

    python tools/bench/smollm2_tail.py --seeds 0 1 2     # 20 to 30 minutes a seed on 2 quiet cores

A call takes one training step in the median, log-normal, sigma 2 (`--step`: its seconds, without delays).
Seconds are of the run, from its first step's begin, until the success of all episodes that landed in two
steps on end reaches `--goal`. A run that is complete is not repeated. Overrides stand behind `--`.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from pathlib import Path

from common import ROOT, rows, summary, table, train

from asyncrl.observe.metrics import LAG, MASKED, REWARD, STEP_SECONDS

TOOL = f"{ROOT / 'tools' / 'bench' / 'replayed.py'}:slow_expressions"
ARMS = {"bound 4": ["buffer.max_staleness=4"], "bound 16 (default)": []}
COMMON = [
    "validation.samples=0",
    "data.test=''",
    "checkpoint.every=0",
    "rollout.slots=256",
    f"rollout.tools=[{TOOL}]",
    "rollout.tool_timeout=590",
]
HEADER = [
    "seed",
    "bound",
    "steps to goal",
    "seconds to goal",
    "s/step",
    "lag",
    "masked",
    "success of the last two steps",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--step", type=float, default=15.0, help="seconds")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "bench-smollm2-tail")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    delay = f"{{mu: {math.log(args.step):.4f}, sigma: 2}}"
    delay = f"rollout.tool_args={{{TOOL.replace(':', chr(92) + ':')}: {delay}}}"
    lines = []
    for seed in args.seeds:
        for arm, own in ARMS.items():
            name = f"{arm.split(' (')[0].replace(' ', '-')}-{seed}"
            if summary(args.run_dir / name).get("outcome") != "completed":
                overrides = [
                    *COMMON,
                    *own,
                    delay,
                    f"seed={seed}",
                    f"total_steps={args.steps}",
                    *args.overrides,
                ]
                train(name, args.run_dir, overrides, deadline=3600.0, experiment="smollm2")
            lines.append([str(seed), arm, *line(rows(args.run_dir / name), args.goal)])
            print(table(HEADER, lines[-1:]), flush=True)
    print(table(HEADER, lines))


def line(steps: list[dict[str, float]], goal: float) -> list[str]:
    """Of a run's rows of metrics."""
    steps = [row for row in steps if STEP_SECONDS in row]
    scores = [row.get(REWARD, 0.0) for row in steps]
    pairs = [(a + b) / 2 for a, b in pairwise(scores)]
    reached = next((i + 2 for i, score in enumerate(pairs) if score >= goal), None)
    seconds = sum(row[STEP_SECONDS] for row in steps[:reached])

    def mean(key: str) -> float:
        return sum(row.get(key, 0.0) for row in steps) / len(steps)

    return [
        *((str(reached), f"{seconds:.0f}") if reached else ("–", "–")),
        *(f"{mean(STEP_SECONDS):.1f}", f"{mean(LAG):.1f}", f"{mean(MASKED):.1%}", f"{pairs[-1]:.1%}"),
    ]


if __name__ == "__main__":
    main()
