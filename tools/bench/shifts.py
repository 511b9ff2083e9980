"""Compares engine and trainer by shifts with both at once on the same cores, in the demo.

    python tools/bench/shifts.py --cores 1           # 10 minutes
    python tools/bench/shifts.py --steps 12 --seeds 1 engine=sglang_cpu engine.servers=1
    python tools/bench/shifts.py --leaks 200         # shifts: memory and open files must not grow

It prints means, and (smallest–largest) of the seeds:

sleep           seconds until engines sleep
back            seconds until the trainer's state is back on its device
wake            seconds until that state has left, and an engine has loaded
steps a shift   optimizer steps for each shift of the trainer
again a shift   tokens of contexts that engines compute again after a sleep: counted in the recorded turns,
                wherever another version goes on. Without shifts updates in place keep the KV cache
over a change   share of turns that two versions have sampled
in one stream   share of these turns that no server has lost, moved or taken back
both compute    seconds in which a rank and an engine computed at once
difference      the largest one between a token's log-prob in engine and trainer, with the same version
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import psutil
from common import ROOT, rows, table, train

from tests.fakes.processes import role_processes

sys.path.insert(0, str(ROOT / "tools"))

from asyncrl.buffer.payloads import decode_turn
from asyncrl.store.reader import RunReader
from asyncrl.types import Turn
from tests.fakes.audit import at_once

ARMS = {"at once": [], "shifts": ["engine.colocated=1"]}
MANY = [  # small batches, and a shift for each part of one that is ready
    *("engine.colocated=1", "buffer.shift_fill=0", "buffer.groups_per_batch=2", "data.test=''"),
    *("buffer.episodes_per_group=4", "rollout.slots=16", "trainer.lr_schedule=constant"),
]
KEYS = ("timing_s/step", "shift/sleep_s", "timing_s/wake", "shift/wake_s")
GIVEN_UP = ("/lost", "/moved", "/retracted")  # metrics of engine/<i>: requests that other requests continue
SHOWN = {
    "s/step": ".2f",
    "tokens/s": ".0f",
    "sleep, s": ".3f",
    "back, s": ".3f",
    "wake, s": ".3f",
    "steps a shift": ".2f",
    "again a shift": ".0f",
    "over a change": ".1%",
    "in one stream": ".1%",
    "both compute, s": ".2f",
    "difference": ".1e",
    "success after": ".1%",
}
# First step that counts for growth; number of steps for the median of a level.
EARLY = 50
WINDOW = 20
GROWTH = 0.03  # share of memory that may be added
OF_STEPS = ("checkpoints", "copies", "ratios", "transcripts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=0, help="that all processes of a run share; 0: all")
    parser.add_argument(
        "--leaks", type=int, default=0, metavar="STEPS", help="so many steps, nearly each with a shift"
    )
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "bench-shifts")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    if args.leaks:
        return leaks(args.leaks, args.run_dir, args.overrides)

    values_by_arm: dict[str, dict[str, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for seed in range(args.seeds):
        for arm, arm_values in values_by_arm.items():  # in turn: what else runs on the machine concerns both
            for measure, value in measured(arm, seed, args).items():
                arm_values[measure].append(value)
            print(
                arm,
                seed,
                {measure: round(values[-1], 3) for measure, values in arm_values.items()},
                flush=True,
            )

    lines = [
        [arm, *(spread(arm_values[measure], form) for measure, form in SHOWN.items())]
        for arm, arm_values in values_by_arm.items()
    ]

    print(table(["", *SHOWN], lines))
    return 0


def measured(arm: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run an arm, from a directory without such a run, and return its measures."""
    name = f"{arm.replace(' ', '-')}-{seed}"
    run_overrides = [f"total_steps={args.steps}", f"seed={seed}", "checkpoint.every=0", "validation.every=0"]
    result = train(name, args.run_dir, [*run_overrides, *ARMS[arm], *args.overrides])
    steps = [row for row in rows(args.run_dir / name) if "timing_s/step" in row]
    mean = {key: statistics.mean(row.get(key, 0.0) for row in steps) for key in KEYS}
    turns = [turn for turns in recorded(args.run_dir / name) for turn in turns]
    over = sum(len({span.version for span in turn.generation.spans}) > 1 for turn in turns)
    given_up = sum(value for key, value in steps[-1].items() if key.endswith(GIVEN_UP))
    both = sum(end - start for start, end in at_once(args.run_dir / name))

    measures = {"s/step": mean["timing_s/step"], "tokens/s": result["tokens_per_s"], "both compute, s": both}
    measures |= {"over a change": over / len(turns), "in one stream": 1 - given_up / max(1, over)}
    if shifts := steps[-1].get("shift/count"):
        again = sum(sum(lost(turns)) for turns in recorded(args.run_dir / name))
        measures |= {"steps a shift": args.steps / shifts, "again a shift": again / shifts}
        measures |= {"sleep, s": mean["shift/sleep_s"], "wake, s": mean["shift/wake_s"]}
        measures |= {"back, s": mean["timing_s/wake"]}

    measures["difference"] = result["logprob_diff_max_same_version"]
    return measures | {"success after": result["success_after"]}


def spread(values: list[float], form: str) -> str:
    """Mean, smallest and largest."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})" if values else "–"


def recorded(run_dir: Path) -> Iterator[list[Turn]]:
    """Return the turns of each episode that the index still has."""
    with closing(RunReader.open(run_dir)) as reader:
        for member in [member for group in reader.groups() for member in reader.group_members(group.id)]:
            frames = reader.turn_frames(member.uid, member.turns, ["generated"])
            yield [decode_turn(frame) for frame in frames if frame]


def lost(turns: list[Turn]) -> Iterator[int]:
    """Yield the length of an episode's context wherever the version of its tokens changes."""
    version_starts = list[tuple[int, int]]()
    length = 0
    for turn in turns:
        length += len(turn.context)
        version_starts += [(length + span.start, span.version) for span in turn.generation.spans]
        length += len(turn.generation.ids)
    yield from (at for (_, before), (at, version) in pairwise(version_starts) if version != before)


# -- growth ------------------------------------------------------------------------------------------------


def leaks(steps: int, run_dir: Path, overrides: list[str]) -> int:
    """Return 1 if something grew between WINDOW steps from EARLY on and the last WINDOW."""
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)
    name = f"leaks-{os.getpid()}"

    def watch(launcher: int) -> None:
        step = int(max((row.get("training/step", 0) for row in rows(run_dir / name)), default=0))
        for resource, value in resource_use(launcher, run_dir / name):
            samples[resource].append((step, value))

    result = train(name, run_dir, [f"total_steps={steps}", *MANY, *overrides], watch=watch)

    lines = []
    grown = False
    for resource, resource_samples in sorted(samples.items()):
        early = [value for step, value in resource_samples if EARLY <= step < EARLY + WINDOW]
        late_values = [value for step, value in resource_samples if steps - WINDOW <= step < steps]
        early_median = statistics.median(early)
        late_median = statistics.median(late_values)
        early_maximum = max(early)
        late_maximum = max(late_values)
        grew = late_median > early_median * (1 + GROWTH) if "MB" in resource else late_maximum > early_maximum
        grown |= grew

        lines.append(
            [
                resource,
                *(f"{value:.0f}" for value in (early_median, late_median, early_maximum, late_maximum)),
                "**grew**" * grew,
            ]
        )

    shifts = max(row.get("shift/count", 0.0) for row in rows(run_dir / name))
    print(f"{shifts:.0f} shifts, {result['steps']} steps; conserved: {result['conserved']}")
    heads = [f"from step {EARLY}, median", f"to step {steps}, median", "largest", "largest", ""]
    print(table(["", *heads], lines))

    return int(grown or result["exit_code"] != 0)


def resource_use(launcher: int, run_dir: Path) -> Iterator[tuple[str, float]]:
    """Yield memory and open files of each role, and the number of files in the run directory without files
    of steps."""
    for role, process in role_processes(launcher).items():
        with suppress(psutil.Error):
            if role != "coordinator-0":  # soak.py measures the coordinator's memory per step
                yield f"{role}, MB", process.memory_info().rss / 1e6
            yield f"{role}, open files", process.num_fds()
    names = [path.relative_to(run_dir).parts for path in run_dir.rglob("*")]
    yield "files of the run", sum(name_parts[0] not in OF_STEPS for name_parts in names)


if __name__ == "__main__":
    sys.exit(main())
