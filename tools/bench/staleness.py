"""Learning under forced lag: the calculator demo, with no correction and with each preset.

    python tools/bench/staleness.py --out staleness.jsonl --workers 2
    python tools/bench/staleness.py --out staleness.jsonl --table --plot docs/pictures/staleness.png

A run (lagged.py) trains on batches that the weights of `lag` steps before have sampled, and then plays 512
held-out episodes. All arms of a seed see the same prompts with the same random numbers. Finished runs are
appended to --out and skipped when the command is repeated. Arms beside the presets: `none` trains stale data
uncorrected, which a configuration refuses; `shuffled` deals the rewards of a batch to its episodes at random
and must not learn; `start` is the checkpoint before training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from common import ROOT, SINGLE_THREAD, wilson

from asyncrl.config import RunConfig
from asyncrl.config.composition import compose
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from lagged import Player

NO_TASK = {"sft", "distill", "gkd"}  # algorithms that learn from conversations or from a teacher
PRESETS = sorted(
    path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml") if path.stem not in NO_TASK
)
ARMS = ["start", "shuffled", "none", *PRESETS]
LAGS = [0, 4, 16, 1, 8]  # the telling ones first
STEPS = 40
TASK = [
    "name=staleness",
    "experiment=calculator",
    f"total_steps={STEPS}",
    "buffer.groups_per_batch=4",
    "buffer.episodes_per_group=8",
    "rollout.max_tokens=160",
    "trainer.lr=4e-4",
    "trainer.micro_batch_tokens=2048",
    "model.device=cpu",
]
CRITIC = {"ppo_critic": ["critic.lr=1e-3"]}
OPERATIONS = 4  # longest chain: episodes of one to five turns
SETTINGS = [*TASK, f"operations={OPERATIONS}"]


class Point(msgspec.Struct, frozen=True):
    """A run of the plan."""

    arm: str
    lag: int
    seed: int

    def config(self) -> RunConfig:
        """Raises ConfigError for an arm that cannot be composed."""
        overrides = [*TASK, f"seed={self.seed}"]
        if self.arm in PRESETS:
            arm_overrides = [f"algorithm={self.arm}", *CRITIC.get(self.arm, ())]
            return compose([*overrides, *arm_overrides, f"buffer.max_staleness={self.lag}"])
        if self.arm == "none":  # a configuration refuses it; run() raises the learner's bound
            return compose([*overrides, "algorithm.correction={}", "buffer.max_staleness=0"])
        return compose([*overrides, f"buffer.max_staleness={self.lag}"])


def plan(arms: Sequence[str], lags: Sequence[int], seeds: int) -> Iterator[Point]:
    """Lag by lag, and within one seed by seed, so that all arms have a point early. Controls: lag 0 only."""
    for lag in lags:
        for seed in range(seeds):
            for arm in arms:
                if not (arm == "start" and (lag or seed)) and not (arm == "shuffled" and lag):
                    yield Point(arm, lag, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "staleness.jsonl", help="finished runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--lags", nargs="+", type=int, default=LAGS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--table", action="store_true", help="print --out as Markdown; run nothing")
    parser.add_argument("--plot", type=Path, help="draw --out; run nothing")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.table or options.plot:
        show(options)
    elif options.workers > 1:
        spread(options.workers)
    else:
        points = list(plan(options.arms, options.lags, options.seeds))
        index, workers = options.share
        work(points[index::workers], options.out)


def show(options: argparse.Namespace) -> None:
    """Imported late: a run needs neither numpy's resampling nor a plot."""
    import staleness_report as report

    rows = finished(options.out)
    if options.table:
        print(report.markdown(rows, ARMS))
    if options.plot:
        report.draw(rows, ARMS, options.plot)


def spread(workers: int) -> None:
    """Start this command again, once per worker, each with its part of the runs."""
    arguments = [sys.executable, *sys.argv, "--workers", "1"]
    environment = os.environ | SINGLE_THREAD
    started = [
        subprocess.Popen([*arguments, "--share", str(i), str(workers)], env=environment)
        for i in range(workers)
    ]
    sys.exit(max(process.wait() for process in started))


def work(points: Sequence[Point], out: Path) -> None:
    """Run the points that --out does not hold yet.

    A failed run is printed, and tried again by the next command.
    """
    import torch  # here, so that --table is quick
    from lagged import Player

    torch.set_num_threads(1)
    player = Player(compose(TASK))

    out.parent.mkdir(parents=True, exist_ok=True)
    done = {Point(row["arm"], row["lag"], row["seed"]) for row in finished(out)}
    for point in points:
        if point in done:
            continue
        try:
            row = measured(point, player)
        except ConfigError as error:
            print(f"{point}: {error}", file=sys.stderr, flush=True)
        except Exception:
            print(f"{point}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        else:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{point}: success {row['success']:.3f} in {row['seconds']:.1f} s", flush=True)


def measured(point: Point, player: Player) -> dict[str, Any]:
    """Return a line of --out."""
    from lagged import Lagged, plain, run

    config = point.config()
    shuffled = point.arm == "shuffled"
    steps = 0 if point.arm == "start" else STEPS
    outcome = run(Lagged(config, point.lag, steps, OPERATIONS, shuffled=shuffled), player)
    low, high = wilson(outcome.successes, outcome.tests)
    success = outcome.successes / outcome.tests
    key = msgspec.structs.asdict(point) | {"success": success, "low": low, "high": high}
    return key | plain(outcome) | {"settings": SETTINGS}


def finished(out: Path) -> list[dict[str, Any]]:
    """Return the runs in a file. SystemExit: some runs have other settings."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    if any(row["settings"] != SETTINGS for row in rows):
        sys.exit(f"{out} holds runs with other settings; give another --out, or remove it")
    return rows


if __name__ == "__main__":
    main()
