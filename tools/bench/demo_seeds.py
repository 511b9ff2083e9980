"""The demo from several seeds of RL, and with rewards that say nothing.

    python tools/bench/demo_seeds.py --seeds 0 1 2 --random-reward

Prints one row per run: success on held-out episodes before and after (sampled and greedy, with the lower end
of the 95% Wilson interval), training time, lag, share of multi-version trajectories, and whether the flow
added up.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import ROOT, questions, table, train, wilson

RANDOM = f"rollout.reward={ROOT / 'tools' / 'bench' / 'random_reward.py'}:compute_score"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--random-reward", action="store_true", help="add a control run that must not learn")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "seeds")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    lines = []
    for seed in options.seeds:
        result = train(f"seed-{seed}", options.run_dir, [f"seed={seed}", *options.overrides])
        lines.append(line(f"seed {seed}", result, questions(options.run_dir / f"seed-{seed}")))
        print(lines[-1], flush=True)

    if options.random_reward:
        result = train("random-reward", options.run_dir, [RANDOM, *options.overrides])
        lines.append(line("random reward", result, questions(options.run_dir / "random-reward")))

    print(table(HEADER, lines))


HEADER = ["run", "steps", "training s", "sampled before", "sampled after", "greedy before", "greedy after",
          "multi-version", "lag mean / max", "masked", "idle trainer / rollout", "conserved"]  # fmt: skip


def line(name: str, r: dict[str, Any], count: int) -> list[str]:
    low = wilson(round(r["success_after"] * count), count)[0]
    greedy_low = wilson(round(r["greedy_after"] * count), count)[0]
    return [
        name,
        str(r["steps"]),
        f"{r['seconds']:.0f}",
        f"{r['success_before']:.3f}",
        f"{r['success_after']:.3f} (≥ {low:.3f})",
        f"{r['greedy_before']:.3f}",
        f"{r['greedy_after']:.3f} (≥ {greedy_low:.3f})",
        f"{r['trajectories_multi_version']:.2f}",
        f"{r['lag_mean']:.2f} / {r['lag_max']:.0f}",
        f"{r['masked_token_frac']:.4f}",
        f"{r['trainer_idle_frac']:.2f} / {r['rollout_idle_frac']:.2f}",
        str(r["conserved"]),
    ]


if __name__ == "__main__":
    main()
