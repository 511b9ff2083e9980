"""What trainer ranks on several machines send to rank 0 for a version: whole, and as what has changed.

    python tools/bench/gather.py [--ranks 2] [--megabits 1000] [--hidden 768] [--layers 12] [--steps 3]

A random Qwen2 (138M parameters with the defaults) takes AdamW steps on random text, sharded by FSDP2 over
ranks on machines of their own, which are emulated by Linux namespaces, their links limited by tc (0: not at
all). Every step is published twice, in bfloat16 from float32 masters: whole, and as a delta. Prints the bytes
that rank 0 received, and the seconds until the version was written: medians over the steps. 4 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import ROOT, SINGLE_THREAD, table
from weights import BUCKET_BYTES, RATES, build, train_step

from asyncrl.config import ModelConfig
from asyncrl.trainer.model import load_policy, shards
from asyncrl.trainer.world import World, join, leave
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.shards import HostShards
from tests.fakes.nodes import WORK, emulated, forbidden

PORT, DEADLINE = 29500, 300.0
TOKENS = 64
KINDS = ("whole", "delta")


class Measured(dict[str, list[tuple[int, float]]]):
    """Bytes received and seconds, of each step, by kind."""


def publish_steps(world: World, model: str, rate: float, steps: int) -> Measured:
    policy = load_policy(ModelConfig(path=model, dtype="float32"), world)
    policy.export_dtype = torch.bfloat16
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    found = Measured({kind: [] for kind in KINDS})
    hosts = {kind: HostShards(shards(policy), policy.published, torch.bfloat16, DEADLINE) for kind in KINDS}
    writers = {
        "whole": VersionWriter(Path(WORK, "whole"), BUCKET_BYTES),
        "delta": VersionWriter(Path(WORK, f"deltas-{rate:g}"), BUCKET_BYTES, full_every=1 << 30),
    }
    for step in range(steps + 2):  # the first delta is a whole version, and the next one touches new memory
        train_step(policy, optimizer, TOKENS, step)
        for kind, host in hosts.items():
            index = host.claim(lambda busy: world.gather(busy, list[int]))
            host.copy(index, shards(policy))
            if world.rank == 0:
                snapshot = host.snapshot(index, PolicyVersion(0, step), 0.0)
                before, begin = host.received, time.monotonic()
                writers[kind].write(snapshot)
                disk.prune(Path(WORK, "whole"), 1)
                found[kind].append((host.received - before, time.monotonic() - begin))
            world.gather(0, int)
    for host in hosts.values():
        host.close(DEADLINE)
    return found


def rank_process(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = join(options.rank, options.ranks, f"tcp://{options.master}:{PORT}", "cpu", timeout_s=DEADLINE)
    rows = []
    for rate in RATES:
        found = publish_steps(world, options.model, rate, options.steps)
        for kind, steps in found.items() if world.rank == 0 else ():
            sizes, seconds = zip(*steps[2:], strict=True)
            received = f"{statistics.median(sizes) / 1e6:.1f}"
            rows.append([f"{rate:g}", kind, received, f"{statistics.median(seconds):.2f}"])
    if rows:
        print(table(["lr", "version", "MB that rank 0 received", "s until it was written"], rows))
    leave()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"ranks": 2, "megabits": 1000, "hidden": 768, "layers": 12, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        rank_process(options)
        return 0
    if why := forbidden():
        sys.exit(why)
    with tempfile.TemporaryDirectory(dir=Path.home()) as place, emulated(options.ranks) as nodes:
        model = build(Path(place) / "model", options.hidden, options.layers)
        env = os.environ | SINGLE_THREAD | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
        own = [f"--ranks={options.ranks}", f"--steps={options.steps}", f"--model={model}"]
        processes = []
        for rank, node in enumerate(nodes):
            if options.megabits:
                node.limit(options.megabits)
            words = [sys.executable, str(Path(__file__)), *own, f"--rank={rank}"]
            command = node.command(*words, f"--master={nodes[0].address}")
            processes.append(subprocess.Popen(command, env=env))
        return max(abs(process.wait(2 * DEADLINE)) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
