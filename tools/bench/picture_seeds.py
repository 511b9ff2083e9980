"""The example of images from several seeds, with a trained vision tower, and with images of other questions.

    python tools/bench/picture_seeds.py --seeds 0 1 2 --vision-seed 3 --shuffled-seed 0

A seed is that of the model's random weights, of the order of the data and of sampling. Each run has two
stages, `asyncrl sft` and `asyncrl train`, and gets its own folder of data. A complete stage is not repeated
and one that was cut off goes on, so the runs may take more than one sitting. Prints one row per run, with the
CPU minutes of what this call has run. Overrides after `--` are for the second stage.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import ROOT, questions, summary, table, train, wilson

HEADER = ["run", "SFT minutes", "RL minutes", "CPU minutes", "sampled before RL", "after", "greedy before RL",
          "after", "lag mean / max", "conserved"]  # fmt: skip
TRAINED_TOWER = "model.train_vision=true"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--vision-seed", type=int, help="add a run whose RL trains the vision tower, too")
    parser.add_argument("--shuffled-seed", type=int, help="add a control, with images of other questions")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "picture_seeds")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    lines = [
        run_line(f"seed-{seed}", options.run_dir, seed, overrides=options.overrides) for seed in options.seeds
    ]
    if options.vision_seed is not None:
        overrides = [TRAINED_TOWER, *options.overrides]
        lines.append(run_line("trained-tower", options.run_dir, options.vision_seed, overrides=overrides))
    if options.shuffled_seed is not None:
        lines.append(
            run_line(
                "shuffled-images",
                options.run_dir,
                options.shuffled_seed,
                overrides=options.overrides,
                shuffled=True,
            )
        )

    print(table(HEADER, lines))


def run_line(
    name: str, run_dir: Path, seed: int, *, overrides: list[str], shuffled: bool = False
) -> list[str]:
    """Run both stages, as far as they are not complete, and return their row of the table."""
    data = run_dir / f"{name}-data"
    if not (data / "model" / "preprocessor_config.json").exists():  # written last
        command = [sys.executable, str(ROOT / "tools" / "prepare_pictures.py")]
        options = [f"--out={data}", f"--seed={seed}", *(["--shuffle-images"] if shuffled else [])]
        subprocess.run([*command, *options], check=True, cwd=ROOT)

    cpu_before = children_cpu_seconds()
    both_stages = [f"seed={seed}", f"data.test={data / 'test.parquet'}", "resume=auto"]
    sft_data = [f"model.path={data / 'model'}", f"data.train={data / 'demonstrations.parquet'}"]
    sft = run_stage(f"{name}-sft", run_dir, [*both_stages, *sft_data], experiment="images_sft", stage="sft")

    checkpoint = run_dir / f"{name}-sft" / "checkpoints" / f"step-{sft['steps']}" / "hf"
    rl_data = [f"model.path={checkpoint}", f"data.train={data / 'train.parquet'}"]
    rl = run_stage(name, run_dir, [*both_stages, *rl_data, *overrides], experiment="images", stage="train")

    cpu_seconds = children_cpu_seconds() - cpu_before
    line = table_line(name, sft, rl, cpu_seconds, questions(run_dir / name))
    print(line, flush=True)
    return line


def run_stage(
    name: str, run_dir: Path, overrides: list[str], *, experiment: str, stage: str
) -> Mapping[str, Any]:
    """Return the summary of a stage, which runs now, or goes on, unless it is complete."""
    run_summary = summary(run_dir / name)
    if run_summary.get("outcome") != "completed":
        run_summary = train(name, run_dir, overrides, deadline=4 * 3600.0, experiment=experiment, stage=stage)
    if run_summary.get("outcome") != "completed":
        sys.exit(f"{name} has not completed: see {run_dir / name}.out, and start again to go on")
    return run_summary


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table_line(
    name: str, sft: Mapping[str, Any], rl: Mapping[str, Any], cpu_seconds: float, question_count: int
) -> list[str]:
    return [
        name,
        f"{sft['seconds'] / 60:.1f}",
        f"{rl['seconds'] / 60:.1f}",
        f"{cpu_seconds / 60:.1f}" if cpu_seconds > 1 else "–",
        *(
            rate(rl[f"{key}_{when}"], question_count)
            for key in ("success", "greedy")
            for when in ("before", "after")
        ),
        f"{rl['lag_mean']:.2f} / {rl['lag_max']:.0f}",
        str(rl["conserved"]),
    ]


def rate(success: float, question_count: int) -> str:
    """Return a success rate with its 95% Wilson interval."""
    low, high = wilson(round(success * question_count), question_count)
    return f"{success:.1%} ({low:.0%}–{high:.0%})"


if __name__ == "__main__":
    main()
