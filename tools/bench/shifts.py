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
GIVEN_UP = ("/lost", "/moved", "/retracted")  # of engine/<i>: requests that go on as others
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
# the step from which growth counts; how many steps a level is the median of
EARLY = 50
WINDOW = 20
GROWTH = 0.03  # of memory
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
    found: dict[str, dict[str, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for seed in range(args.seeds):
        for arm, own in found.items():  # in turn: what else runs on the machine concerns both
            for what, value in measured(arm, seed, args).items():
                own[what].append(value)
            print(arm, seed, {what: round(values[-1], 3) for what, values in own.items()}, flush=True)
    lines = [[arm, *(spread(own[what], form) for what, form in SHOWN.items())] for arm, own in found.items()]
    print(table(["", *SHOWN], lines))
    return 0


def measured(arm: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Run it, from a directory without such a run."""
    name = f"{arm.replace(' ', '-')}-{seed}"
    given = [f"total_steps={args.steps}", f"seed={seed}", "checkpoint.every=0", "validation.every=0"]
    result = train(name, args.run_dir, [*given, *ARMS[arm], *args.overrides])
    steps = [row for row in rows(args.run_dir / name) if "timing_s/step" in row]
    mean = {key: statistics.mean(row.get(key, 0.0) for row in steps) for key in KEYS}
    turns = [turn for turns in recorded(args.run_dir / name) for turn in turns]
    over = sum(len({span.version for span in turn.generation.spans}) > 1 for turn in turns)
    given_up = sum(value for key, value in steps[-1].items() if key.endswith(GIVEN_UP))
    both = sum(end - start for start, end in at_once(args.run_dir / name))
    found = {"s/step": mean["timing_s/step"], "tokens/s": result["tokens_per_s"], "both compute, s": both}
    found |= {"over a change": over / len(turns), "in one stream": 1 - given_up / max(1, over)}
    if shifts := steps[-1].get("shift/count"):
        again = sum(sum(lost(turns)) for turns in recorded(args.run_dir / name))
        found |= {"steps a shift": args.steps / shifts, "again a shift": again / shifts}
        found |= {"sleep, s": mean["shift/sleep_s"], "wake, s": mean["shift/wake_s"]}
        found |= {"back, s": mean["timing_s/wake"]}
    found["difference"] = result["logprob_diff_max_same_version"]
    return found | {"success after": result["success_after"]}


def spread(values: list[float], form: str) -> str:
    """Mean, smallest and largest."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})" if values else "–"


def recorded(run_dir: Path) -> Iterator[list[Turn]]:
    """Turns of each episode that the index still has."""
    with closing(RunReader.open(run_dir)) as reader:
        for member in [member for group in reader.groups() for member in reader.group_members(group.id)]:
            frames = reader.turn_frames(member.uid, member.turns, ["generated"])
            yield [decode_turn(frame) for frame in frames if frame]


def lost(turns: list[Turn]) -> Iterator[int]:
    """Of an episode: the length of its context wherever the version of its tokens changes."""
    places = list[tuple[int, int]]()
    length = 0
    for turn in turns:
        length += len(turn.context)
        places += [(length + span.start, span.version) for span in turn.generation.spans]
        length += len(turn.generation.ids)
    yield from (at for (_, before), (at, version) in pairwise(places) if version != before)


# -- growth ------------------------------------------------------------------------------------------------


def leaks(steps: int, run_dir: Path, overrides: list[str]) -> int:
    """Return 1 if something grew between WINDOW steps from EARLY on and the last WINDOW."""
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)
    name = f"leaks-{os.getpid()}"

    def watch(launcher: int) -> None:
        step = int(max((row.get("training/step", 0) for row in rows(run_dir / name)), default=0))
        for what, value in looked(launcher, run_dir / name):
            samples[what].append((step, value))

    result = train(name, run_dir, [f"total_steps={steps}", *MANY, *overrides], watch=watch)
    lines = []
    grown = False
    for what, found in sorted(samples.items()):
        early = [value for step, value in found if EARLY <= step < EARLY + WINDOW]
        late = [value for step, value in found if steps - WINDOW <= step < steps]
        a = statistics.median(early)
        b = statistics.median(late)
        most = max(early)
        more = max(late)
        grew = b > a * (1 + GROWTH) if "MB" in what else more > most
        grown |= grew
        lines.append([what, *(f"{value:.0f}" for value in (a, b, most, more)), "**grew**" * grew])
    shifts = max(row.get("shift/count", 0.0) for row in rows(run_dir / name))
    print(f"{shifts:.0f} shifts, {result['steps']} steps; conserved: {result['conserved']}")
    heads = [f"from step {EARLY}, median", f"to step {steps}, median", "largest", "largest", ""]
    print(table(["", *heads], lines))
    return int(grown or result["exit_code"] != 0)


def looked(launcher: int, run_dir: Path) -> Iterator[tuple[str, float]]:
    """Memory and open files of each role, and files in the run directory but those of steps."""
    for role, process in role_processes(launcher).items():
        with suppress(psutil.Error):
            if role != "coordinator-0":  # what it keeps of each step is a matter of soak.py
                yield f"{role}, MB", process.memory_info().rss / 1e6
            yield f"{role}, open files", process.num_fds()
    names = [path.relative_to(run_dir).parts for path in run_dir.rglob("*")]
    yield "files of the run", sum(own[0] not in OF_STEPS for own in names)


if __name__ == "__main__":
    sys.exit(main())
