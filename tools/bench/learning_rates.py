"""Presets at several learning rates, on the pretrained model's example: held-out success before and after.

    python tools/bench/learning_rates.py --presets grpo gspo --rates 5e-6 2e-5 5e-5    # 4 minutes a run

A run that is complete is not repeated. `--draw` prints the table of what is there, and runs nothing.
Overrides stand behind `--`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import ROOT, summary, table, train

KINDS, WHEN = ("success", "greedy"), ("before", "after")
HEADER = ["preset", "lr", "steps", "sampled before", "after", "greedy before", "after", "minutes"]
OVERRIDES = ["validation.samples=32", "checkpoint.every=0"]  # of 32, each sampled once and greedily


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experiment", default="smollm2")
    parser.add_argument("--presets", nargs="+", default=["dr_grpo"])
    parser.add_argument("--rates", nargs="+", default=["2e-5"])
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "bench-learning-rates")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    lines = []
    for preset in args.presets:
        for rate in args.rates:
            name = f"{preset}-{rate}"
            if not args.draw and summary(args.run_dir / name).get("outcome") != "completed":
                own = [f"algorithm={preset}", f"trainer.lr={rate}", *OVERRIDES, *args.overrides]
                found = train(name, args.run_dir, own, deadline=3600.0, experiment=args.experiment)
                print(f"{name}: {found.get('outcome')} after {found['wall_s'] / 60:.1f} minutes", flush=True)
            if (found := summary(args.run_dir / name)).get("steps"):
                shares = [
                    found[f"{kind}_{when}"] for kind in ("success", "greedy") for when in ("before", "after")
                ]
                shown = ["–" if share is None else f"{share:.1%}" for share in shares]
                lines.append([preset, rate, str(found["steps"]), *shown, f"{found['seconds'] / 60:.1f}"])
    print(table(HEADER, lines))


if __name__ == "__main__":
    main()
