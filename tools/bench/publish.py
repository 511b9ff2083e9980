"""What a publish costs the trainer, against a plain copy of the weights in memory, and what the probe costs.

    python tools/bench/publish.py [--hidden 1024] [--layers 13] [--dtype bfloat16] [--repeats 15]

A random Qwen2 (251M parameters with the defaults) under FSDP2, on one rank and one thread, as in a run:
masters in float32, exported as `--dtype`. In turns, each `--repeats` times: "memcpy" copies one flat tensor
of all parameters into one of the exported type; "publish" is `Publishing.publish`, all that the trainer
waits for at each version; "probe" is `Publishing.score_probe`: the forwards that score the probe and its
rounding, when an engine was started and at most every PROBE_INTERVAL steps. Medians of CPU time: on one
thread that is the wall time of a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import table
from weights import build

from asyncrl.config import parse
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.publishing import Publishing
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from asyncrl.types import PolicyVersion
from asyncrl.wire.sockets import choose_endpoints

WARM = 2  # turns that are not counted: both host buffers are touched for the first time


def turns(model: str, dtype: str, repeats: int, world: World, run_dir: Path) -> dict[str, list[float]]:
    """Return the seconds of each kind of work, turn by turn.

    Versions are only offered for fetching: nothing is written.
    """
    config = parse(
        {
            "name": "bench",
            "model": {"path": model, "dtype": dtype},
            "data": {"train": "x"},
            "engine": {"name": "sglang"},
            "weights": {"transport": "collective"},
        }
    )

    policy = load_policy(config.model, world)
    publishing = Publishing(config, choose_endpoints("127.0.0.1", 0), run_dir, world, policy)
    count = sum(parameter.numel() for parameter in policy.parameters())
    source = torch.ones(count)
    target = torch.zeros(count, dtype=policy.export_dtype)

    done = 0

    def publish() -> None:
        nonlocal done
        done += 1
        publishing.publish(PolicyVersion(0, done))

    works: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source),
        "publish": publish,
        "probe": publishing.score_probe,
    }

    cpu_seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(WARM + repeats):
        for name, work in works.items():
            began = time.process_time()
            work()
            cpu_seconds[name].append(time.process_time() - began)

    publishing.drain()
    print(f"{count / 1e6:.0f}M parameters, exported as {dtype}\n")
    return {name: seconds[WARM:] for name, seconds in cpu_seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"hidden": 1024, "layers": 13, "repeats": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = build(Path(directory) / "model", args.hidden, args.layers)
        world = join_ranks(0, 1, device="cpu")
        cpu_seconds = turns(model, args.dtype, args.repeats, world, Path(directory))
        leave_ranks()

    lines = []
    for name, seconds in cpu_seconds.items():
        ratios = [
            seconds_of_turn / copy
            for seconds_of_turn, copy in zip(seconds, cpu_seconds["memcpy"], strict=True)
        ]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append([name, f"{1e3 * statistics.median(seconds):.0f}", spread])

    print(table(["", "ms", "memcpys"], lines))


if __name__ == "__main__":
    main()
