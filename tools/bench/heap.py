"""What glibc's allocator costs a trainer, by MALLOC_MMAP_THRESHOLD_ and trimming: memory, and seconds a step.

    python tools/bench/heap.py [--model .models/smollm2-135m-instruct] [--steps 3]

One trainer alone trains on the same random episodes each time, 32 of 150 to 320 tokens a step, in
micro-batches as a run cuts them. Each setting runs in a process of its own. `trim`: unset, and malloc_trim
after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, SINGLE_THREAD, table

MIB = 1 << 20
WAYS = {"unset": None, "trim": None, "1 MiB": MIB, "32 MiB": 32 * MIB, "64 MiB": 64 * MIB}
EPISODES, PROMPT, ANSWER = 32, (130, 240), (20, 80)


def measure(model: str, steps: int, budget: int, dtype: str, trim: bool) -> dict[str, float]:
    """Train; the process's peak, and the means over all steps but the first."""
    import torch

    from asyncrl.config import parse
    from asyncrl.trainer import heap
    from asyncrl.trainer.step import Learner
    from asyncrl.trainer.world import join, leave

    torch.set_num_threads(1)
    learner = Learner(
        parse(
            {
                "name": "heap",
                "model": {"path": model, "dtype": dtype},
                "data": {"train": "none"},
                "rollout": {"max_tokens": 512, "max_new_tokens": 128},
                "trainer": {"micro_batch_tokens": budget},
            }
        ),
        join(0, 1, device="cpu"),
    )
    rng, times = random.Random(0), []
    for step in range(steps):
        cpu, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        for micro in micro_batches(rng, budget, step, learner.policy.lm.config.vocab_size):
            learner.accumulate(micro)
        learner.finish()
        if trim:
            heap.trim()
        now = resource.getrusage(resource.RUSAGE_SELF)
        spent = (now.ru_utime - cpu.ru_utime, now.ru_stime - cpu.ru_stime, time.monotonic() - wall)
        times.append(spent)
    leave()
    user, system, seconds = (sum(column) / (steps - 1) for column in zip(*times[1:], strict=True))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held, peak = pages * resource.getpagesize(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": peak / 1e9, "held": held / 1e9, "user": user, "system": system, "wall": seconds}


def micro_batches(
    rng: random.Random, budget: int, step: int, vocabulary: int, episodes: int = EPISODES
) -> Iterator[list]:
    """A step's episodes with their turn, as plans of at most `budget` padded tokens."""
    from asyncrl.buffer import packing
    from asyncrl.types import EpisodeResult, StopReason, Turn, VersionSpan
    from asyncrl.wire.messages.trainer import PlannedTrajectory

    work = []
    for i in range(episodes):
        context, ids = (
            tuple(rng.randrange(vocabulary) for _ in range(rng.randint(*r))) for r in (PROMPT, ANSWER)
        )
        spans = (VersionSpan(0, len(ids), step, step),)
        turn = Turn(0, context, ids, (-1.0,) * len(ids), spans, StopReason.STOP)
        results = tuple(EpisodeResult(float(won), len(ids)) for won in (0, 1))
        planned = PlannedTrajectory(f"{step}/{i}", f"{i // 2}", 1, results[i % 2], results, i % 2, 2, 1.0)
        work.append((planned, [turn]))
    lengths = [len(turn.context) + len(turn.ids) for _, (turn,) in work]
    pieces = [packing.Piece(i, n, 0, 1, n) for i, n in enumerate(lengths)]
    for part in packing.micro_batches(pieces, budget, padded=True):
        yield [work[i] for i in part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / ".models" / "smollm2-135m-instruct"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # of the process of one setting
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.model, args.steps, args.measure, args.dtype, args.ways == ["trim"])))
        return
    lines = []
    for budget in args.budgets:
        for way in args.ways:
            threshold = {"MALLOC_MMAP_THRESHOLD_": str(WAYS[way])} if WAYS[way] else {}
            command = [
                sys.executable,
                __file__,
                "--measure",
                str(budget),
                "--ways",
                way,
                "--model",
                args.model,
            ]
            command += ["--steps", str(args.steps), "--dtype", args.dtype]
            environment = os.environ | SINGLE_THREAD | threshold
            done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            lines.append([str(budget), way, *(f"{value:.1f}" for value in found.values())])
            print(*lines[-1], sep="  ", flush=True)
    print(f"{args.dtype}, one thread")
    print(
        table(
            ["micro_batch_tokens", "threshold", "peak GB", "held GB", "user s", "system s", "wall s"], lines
        )
    )


if __name__ == "__main__":
    main()
