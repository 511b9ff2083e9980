"""What a heavy tail costs in learning: asynchronous training with a slow tool against synchronous training.

    python tools/bench/tail_learning.py --seeds 0 1 2 3 4 5 6 7     # 35 minutes on two cores

Seeds are paired: the same prompts in the same order, as many steps. Each run's last checkpoint then plays
the same held-out questions with the same random numbers, none of which is in the demo's data. The interval
is Student's t of the paired differences, one-sided 95%. A run whose result is there is not repeated; `--draw`
runs nothing and prints the table. Overrides stand behind `--` and are given to all runs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from common import ROOT, summary, table, train
from lagged import Ask, Player
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from asyncrl.config import parse
from asyncrl.coordinator.workers import sampling_key
from asyncrl.data import load_samples
from asyncrl.data.rows import write_splits

sys.path.insert(0, str(ROOT / "tools"))
from prepare_chain_math import rows

LATENCY = "rollout.tool_args.calculator={latency_mean: 0.3, latency_sigma: 1.5}"
ARMS = {
    "sync": ["buffer.max_staleness=0"],  # what a tool's delay is makes no difference to what it learns
    "async": [LATENCY],
    "complete": [LATENCY, "buffer.group_policy=complete"],
}
COMMON = ["validation.samples=0", "data.test=''", "checkpoint.every=0"]
HEADER = ["arm", "seeds", "success, mean", "of each seed", "minus sync", "95% lower bound", "lag",
          "masked", "s/step"]  # fmt: skip
T_95 = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94}  # one-sided, by seeds
T_MORE = 1.895  # eight; for more seeds a little too much


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["sync", "async"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tests", type=int, default=2048, help="held-out questions, each sampled once")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "bench-tail-learning")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    questions = write_questions(args.run_dir, args.tests)
    for name, arm, seed in ((f"{arm}-{seed}", arm, seed) for seed in args.seeds for arm in args.arms):
        result = args.run_dir / name / "held_out.json"
        if args.draw or result.exists():
            continue
        own = [f"seed={seed}", f"total_steps={args.steps}", *ARMS[arm], *COMMON, *args.overrides]
        done = train(name, args.run_dir, own)
        if done["exit_code"]:
            sys.exit(f"{name} ended with {done['exit_code']}")
        successes = held_out(args.run_dir / name, questions, args.tests)
        result.write_text(json.dumps({"successes": successes, "tests": args.tests}))
        print(f"{name}: {successes / args.tests:.3f} after {done['wall_s']:.0f} s", flush=True)
    print(report(args.run_dir, args.arms, args.seeds))


def held_out(run_dir: Path, questions: Path, tests: int, at_once: int = 256) -> int:
    """Successes of the run's last checkpoint."""
    config = parse(msgspec.yaml.decode((run_dir / "config.yaml").read_bytes()))
    (export,) = (run_dir / "checkpoints").glob("step-*/hf")
    player = Player(replace(config, rollout=replace(config.rollout, tool_args={})))  # no delays
    weights = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
    asks = [
        Ask(f"h{sample.row}", sample, sampling_key(0, f"h{sample.row}", 0))
        for sample in load_samples(str(questions))[:tests]
    ]
    played = [e for i in range(0, tests, at_once) for e in player.play(weights, 1, asks[i : i + at_once])]
    return sum(episode.command.result.reward == 1.0 for episode in played)  # type: ignore[union-attr]


def write_questions(folder: Path, tests: int) -> Path:
    """Such as the demo's, but none of these."""
    known = {
        sample.prompt[0].content
        for split in ("train", "test")
        for sample in load_samples(str(ROOT / f"examples/multiturn/calculator/data/{split}.parquet"))
    }
    drawn = rows(random.Random("tail_learning"), 2 * tests + len(known))
    new = [row for row in drawn if row["prompt"][0]["content"] not in known]
    write_splits(folder, {"held_out": new[:tests]})
    return folder / "held_out.parquet"


def report(run_dir: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """One line per arm, of the seeds that are there."""
    found = {}
    for arm in arms:
        paths = {seed: run_dir / f"{arm}-{seed}" / "held_out.json" for seed in seeds}
        kept = {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}
        found[arm] = {seed: one["successes"] / one["tests"] for seed, one in kept.items()}
    lines = []
    for arm, rates in found.items():
        if not rates:
            continue
        runs = [summary(run_dir / f"{arm}-{seed}") for seed in rates]
        shared = rates.keys() & found.get("sync", {}).keys()
        paired = [] if arm == "sync" else [rates[seed] - found["sync"][seed] for seed in sorted(shared)]
        lines.append(
            [
                *(arm, str(len(rates)), f"{statistics.fmean(rates.values()):.3f}"),
                " ".join(f"{rate:.3f}" for rate in rates.values()),
                *(f"{100 * x:+.1f} points" if math.isfinite(x) else "" for x in bounds(paired)),
                f"{statistics.fmean(run['lag_mean'] for run in runs):.2f}",
                f"{statistics.fmean(run['masked_token_frac'] for run in runs):.2%}",
                f"{statistics.fmean(run['seconds'] / run['steps'] for run in runs):.2f}",
            ]
        )
    return table(HEADER, lines)


def bounds(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and lower end of the one-sided 95% interval; NaN where there are too few."""
    n = len(differences)
    if n < 2:
        return math.nan, math.nan
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - T_95.get(n, T_MORE) * error


if __name__ == "__main__":
    main()
