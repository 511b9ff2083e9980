"""The pretrained model's example, from several seeds, and with others' rewards: curve and table.

    python tools/bench/smollm2.py --seeds 0 1 2 --control     # 20 to 30 minutes a run on 2 quiet cores
    python tools/bench/smollm2.py --draw                      # again from what is there, running nothing

Each run validates on all held-out questions every second step. A run that is complete is not repeated, one
that was cut off goes on from its last checkpoint: the whole may take more than one sitting. The curve goes to
`--plot`, the table to standard output; they show runs that were stopped, too. Overrides stand behind `--`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import ROOT, questions, rows, summary, table, train, wilson

from asyncrl.observe.metrics import GREEDY, REWARD, SAMPLED

CONTROL = "control"
OTHERS = f"algorithm.advantage={ROOT / 'tools' / 'bench' / 'others_reward.py'}:of_a_sibling"
OVERRIDES = ["validation.samples=256", "validation.every=2", "checkpoint.every=2", "resume=auto"]
HEADER = ["run", "sampled before", "after", "greedy before", "after", "minutes", "steps", "tokens", "lag max",
          "conserved"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experiment", default="smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])

    parser.add_argument(
        "--control",
        action="store_true",
        help="one more run, in which each episode gets the reward of another",
    )

    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs")
    parser.add_argument("--plot", type=Path, help="default: docs/pictures/EXPERIMENT.png")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    folder = args.run_dir / f"bench-{args.experiment}"

    runs = {f"seed-{seed}": [f"seed={seed}"] for seed in args.seeds}
    runs |= {CONTROL: [f"seed={args.seeds[0]}", OTHERS]} if args.control else {}
    for name, run_overrides in runs.items():
        if not args.draw and summary(folder / name).get("outcome") != "completed":
            overrides = [*OVERRIDES, *run_overrides, *args.overrides]
            result = train(name, folder, overrides, deadline=4 * 3600.0, experiment=args.experiment)
            print(f"{name}: {result.get('outcome')} after {result['wall_s'] / 60:.1f} minutes", flush=True)

    done = {name: run_summary for name in runs if (run_summary := summary(folder / name)).get("steps")}
    print(
        table(
            HEADER, [line(name, run_summary, questions(folder / name)) for name, run_summary in done.items()]
        )
    )

    plot = args.plot or ROOT / "docs" / "pictures" / f"{args.experiment}.png"
    draw(plot, {name: rows(folder / name) for name in done})
    print(f"drawn: {plot}")


def line(name: str, run_summary: Mapping[str, Any], episodes: int) -> list[str]:
    return [
        name,
        *(
            share(run_summary[f"{key}_{when}"], episodes)
            for key in ("success", "greedy")
            for when in ("before", "after")
        ),
        f"{run_summary['seconds'] / 60:.1f}",
        str(run_summary["steps"]),
        f"{run_summary['tokens_trained']:,}",
        f"{run_summary['lag_max']:.0f}",
        str(run_summary["conserved"]),
    ]


def share(value: float | None, episodes: int) -> str:
    """Return a share with its 95% Wilson interval."""
    if value is None:
        return "–"
    low, high = wilson(round(value * episodes), episodes)
    return f"{value:.1%} ({low:.0%}–{high:.0%})"


def draw(path: Path, runs: Mapping[str, list[dict[str, float]]]) -> None:
    """Held-out success by step: sampled episodes whole lines, greedy ones dashed; the reward of the episodes
    trained on dotted; the control grey. (A validation that is due while one runs is left out.)"""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)

    axes = figure.subplots()
    for index, (name, metrics) in enumerate(runs.items()):
        colour = "0.6" if name == CONTROL else f"C{index}"
        for metric, style, kind in (
            (SAMPLED, "o-", "sampled"),
            (GREEDY, "s--", "greedy"),
            (REWARD, ":", "reward in training"),
        ):
            points = [(row["training/step"], 100 * row[metric]) for row in metrics if metric in row]
            label = f"{name}, {kind}"
            axes.plot(
                *zip(*points, strict=True), style, color=colour, label=label, markersize=4, linewidth=1.2
            )

    axes.set(xlabel="optimizer steps", ylabel="held-out success, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    if runs:
        axes.legend(fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
