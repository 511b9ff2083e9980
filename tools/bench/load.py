"""Measure how much load the coordinator can handle: the real process, with simulated peers.

    python tools/bench/load.py --workers 512 --servers 64 --slots 20 --episodes 40000
    (ulimit -Sn 1024; python tools/bench/load.py --workers 750 --servers 0 --slots 8)    1,500 connections
    python tools/bench/load.py --slots 128 --life 20 --episodes 200000
    python tools/bench/load.py --turns 8 --tokens 1084 --slots 4 --life 1.4 --episodes 12000

The peers speak the real messages over real sockets, all from this process: hellos, heartbeats, turns with
payloads, endings; loads of every version; plans, commits, checkpoints. A load, a micro-batch and an
optimizer step take no time; an episode takes `--life` seconds on average (uniform, ±50%). With few slots they
limit the rate, to about 0.7 * slots / life (a group waits for its slowest member); with more slots the
coordinator does. It prints:

- episodes per second, their payloads in MiB per second, and CPU seconds of the coordinator per 1,000 of them,
  between 10% and 90% of the run: those of its loop, and those of the thread that encrypts and decrypts; turns
  of the first episodes come before the 10%, so let there be many times more than are in flight;
- quantiles of the turns of its loop from the start of the run on, in wall and in CPU time: on a machine with
  other work the wall times contain that work;
- its memory at 10%, 30%, … 90% of the run, and the share of a core that this process used: near 1, the peers
  are the limit.

`--profile FILE` writes cProfile's statistics of the coordinator; its times are then of no use.
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import json
import os
import random
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from common import ROOT, SINGLE_THREAD, table
from load_peers import Observer, Peer, SupervisorPeer, Trainer, Worker

from asyncrl.config import RunConfig, parse
from asyncrl.coordinator.loop import Coordinator, run
from asyncrl.data import Samples, samples_path
from asyncrl.isolation.child import raise_file_limit
from asyncrl.launch.process import full_pipe
from asyncrl.observe.files import read_summary
from asyncrl.types import Generation, Message, Sample, StopReason, Turn, VersionSpan
from asyncrl.types import TurnReply as Replies
from asyncrl.wire.messages.shared import Attempt, RunEnd, Status
from asyncrl.wire.sockets import Codec, Endpoints, choose_endpoints

TURNS = "turns.json"  # in the run directory: what `timed` has seen
BEAT = 0.5  # seconds between two heartbeats of a peer
QUANTILES = (0.5, 0.99, 0.999, 1.0)


def timed(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """Run the coordinator and time each turn of its loop.

    Takes the place of `run` in the coordinator's process.
    """
    # small: the memory of this process is measured
    walls = array("d")
    cpus = array("d")
    turn = Coordinator.run_pass
    profile = cProfile.Profile()

    def measured(self: Coordinator, now: float) -> None:
        wall = time.perf_counter()
        cpu = time.thread_time()
        turn(self, now)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)

    Coordinator.run_pass = measured  # type: ignore[method-assign]
    if path := os.environ.get("LOAD_PROFILE"):
        code = profile.runcall(run, config, endpoints, incarnation)
        profile.dump_stats(path)
    else:
        code = run(config, endpoints, incarnation)

    durations = {"wall": walls.tolist(), "cpu": cpus.tolist()}
    (Path(config.run_dir) / config.name / TURNS).write_text(json.dumps(durations))
    return code


class Bench:
    """All peers of a run, in one loop."""

    def __init__(self, options: argparse.Namespace, endpoints: Endpoints, process: psutil.Process) -> None:
        self.options = options
        self.endpoints = endpoints
        self.process = process
        self.launch = "load"
        self.context = zmq.Context()

        self.context.set(zmq.MAX_SOCKETS, 1 << 14)
        self.random = random.Random(options.seed)
        self.ending: RunEnd | None = None
        self.status: Status | None = None
        self.count = 0  # landed and acknowledged
        # (landed, wall, CPU of the coordinator's loop, of its other threads, its memory) at 10%, 30%, … 90%
        self.marks: list[tuple[int, float, float, float, int]] = []
        self._poller = zmq.Poller()
        self._ends = {}  # type: ignore[var-annotated]
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []  # (when, order, what)
        self._order = 0
        self._payloads: dict[tuple[int, int], bytes] = {}
        self.reply = msgspec.msgpack.encode(Replies())
        peers: list[Peer] = [Observer(self), Trainer(self)]
        peers += [SupervisorPeer(self, index) for index in range(options.servers)]
        peers += [Worker(self, index) for index in range(options.workers)]
        for peer in peers:
            self._repeat(peer, self.random.random() * BEAT)

    def add(self, socket: zmq.Socket, peer: Peer, codec: Codec) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._ends[socket] = peer, codec

    def _repeat(self, peer: Peer, seconds: float) -> None:
        def beat() -> None:
            peer.beat()
            self._repeat(peer, BEAT)

        self.later(seconds, beat)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._scheduled, (time.monotonic() + seconds, self._order, action))

    def play(self, worker: Worker, attempt: Attempt, turn: int) -> None:
        mean = self.options.life / self.options.turns
        self.later(self.random.uniform(0.5, 1.5) * mean, lambda: worker.play(attempt, turn))

    def payload(self, turn: int, version: int) -> bytes:
        key = (turn, version)
        if key not in self._payloads:
            half = self.options.tokens // 2
            ids = tuple(range(1000, 1000 + half))
            logprobs = (-0.25,) * half
            span = (VersionSpan(0, half, version, version),)
            turn_record = Turn(turn, ids, Generation(ids, logprobs, span, StopReason.STOP))
            self._payloads[key] = msgspec.msgpack.encode(turn_record)

        return self._payloads[key]

    def landed(self) -> None:
        self.count += 1
        if self.count == (2 * len(self.marks) + 1) * self.options.episodes // 10:
            cpu = {thread.id: thread.user_time + thread.system_time for thread in self.process.threads()}
            loop = cpu.pop(self.process.pid)
            memory = self.process.memory_info().rss
            self.marks.append((self.count, time.monotonic(), loop, sum(cpu.values()), memory))

    def serve(self) -> None:
        """Serve the peers until the run is over or the coordinator's process has ended."""
        deadline = time.monotonic() + self.options.deadline
        while self.ending is None and self.process.is_running() and time.monotonic() < deadline:
            for socket, _ in self._poller.poll(2):
                peer, codec = self._ends[socket]
                while self._read(socket, peer, codec):
                    pass
            now = time.monotonic()
            while self._scheduled and self._scheduled[0][0] <= now:
                heapq.heappop(self._scheduled)[2]()

    def _read(self, socket: zmq.Socket, peer: Peer, codec: Codec) -> bool:
        try:
            parts = socket.recv_multipart(flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        peer.receive(*codec.decode(parts))
        return True


def prepare(options: argparse.Namespace) -> Path:
    """Write the run directory as the launcher leaves it."""
    run_dir: Path = options.run_dir / "load"
    shutil.rmtree(run_dir, ignore_errors=True)
    (run_dir / "model").mkdir(parents=True)
    size = options.group_size
    groups = max(1, options.workers * options.slots // size // 4)  # with a target of 3 all slots are used
    config = parse(
        {
            "name": "load",
            "run_dir": str(options.run_dir),
            "total_steps": max(1, options.episodes // (groups * size)),
            "model": {"path": str(run_dir / "model"), "dtype": "float32", "device": "cpu"},
            "data": {"train": "none"},
            "engine": {"name": "sglang", "servers": options.servers} if options.servers else {},
            "rollout": {
                "workers": options.workers,
                "slots": options.slots,
                "max_tokens": max(4096, options.turns * options.tokens),
            },
            "trainer": {"micro_batch_tokens": 32 * options.turns * options.tokens},  # 32 episodes in each
            "buffer": {
                "groups_per_batch": groups,
                "episodes_per_group": size,
                "target_staleness": 3,
                "on_stale": options.on_stale,
                "group_policy": options.group_policy,
                "max_bytes": 1 << 50,
            },
            "checkpoint": {"every": 0},
        }
    )

    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    options.episodes = config.total_steps * groups * size
    samples = (Sample(row, "load", (Message("user", "? " * 100),), "1") for row in range(1000))
    path = samples_path(run_dir, "train")
    path.parent.mkdir()

    with path.open("w+b") as file:
        Samples.write(file, [samples])
    return run_dir


def start(run_dir: Path, endpoints: Endpoints, profile: str) -> subprocess.Popen[bytes]:
    """The coordinator's process."""
    command = [
        *(sys.executable, "-m", "asyncrl.launch.role", "coordinator", "--run-dir", str(run_dir)),
        *("--incarnation", "load", "--target", "load:timed"),
    ]

    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    env = os.environ | SINGLE_THREAD | {"PYTHONPATH": paths}
    env |= {"LOAD_PROFILE": profile} if profile else {}
    encoded_endpoints = msgspec.msgpack.encode(endpoints.for_role("coordinator"))
    with (run_dir / "coordinator.log").open("wb") as out, full_pipe(encoded_endpoints) as stdin:
        return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=out, stderr=out, env=env)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a run."""
    run_dir = prepare(options)
    endpoints = choose_endpoints("127.0.0.1", 0)
    process = start(run_dir, endpoints, options.profile)
    raise_file_limit()  # after the start: the coordinator does it itself

    bench = Bench(options, endpoints, psutil.Process(process.pid))

    began = time.monotonic()
    cpu = time.process_time()
    try:
        bench.serve()
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        if bench.ending is not None:
            process.wait(30)
    finally:
        process.kill()
        bench.context.destroy(linger=0)

    if bench.ending is None or bench.ending.error or len(bench.marks) < 5:
        raise SystemExit(
            f"no measurement: {bench.ending}, {bench.count} landed; see {run_dir}/coordinator.log; waits: "
            f"{bench.status.waits[:5] if bench.status else None}"
        )

    (low, t0, loop0, other0, _), *_, (high, t1, loop1, other1, _) = bench.marks
    turn_durations = json.loads((run_dir / TURNS).read_text())
    rate = (high - low) / (t1 - t0)
    size = sum(len(bench.payload(turn, 0)) for turn in range(options.turns))
    return {
        "rate": rate,
        "bytes": rate * size,
        "loop": 1000 * (loop1 - loop0) / (high - low),
        "other": 1000 * (other1 - other0) / (high - low),
        "memory": [memory for *_, memory in bench.marks],
        "conserved": read_summary(run_dir)["conserved"],
        "share": share,
        "turns": len(turn_durations["wall"]),
        "wall": quantiles(turn_durations["wall"]),
        "cpu": quantiles(turn_durations["cpu"]),
    }


def quantiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--servers", type=int, default=64, help="0: each worker has an engine of its own")
    parser.add_argument("--slots", type=int, default=20, help="of a worker")
    parser.add_argument("--episodes", type=int, default=40_000)
    parser.add_argument("--turns", type=int, default=1, help="of an episode")
    parser.add_argument("--tokens", type=int, default=256, help="of a turn, half of them the model's")
    parser.add_argument("--life", type=float, default=2.5, help="mean seconds of an episode")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--on-stale", default="mask", choices=["mask", "hold", "drop"])
    parser.add_argument("--group-policy", default="complete", choices=["complete", "partial"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds")
    parser.add_argument("--profile", default="", metavar="FILE")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "load")
    options = parser.parse_args(argv)

    options.run_dir = options.run_dir.resolve()
    return options


def main() -> None:
    options = arguments()
    figures = measure(options)
    quantiles_ms = [" / ".join(f"{1000 * value:.1f}" for value in figures[kind]) for kind in ("wall", "cpu")]
    header = ["workers × servers", "in flight", "episodes", "episodes/s", "MiB/s"]
    header += ["CPU s per 1,000: loop + others", "turns of the loop"]
    header += ["turn p50 / p99 / p99.9 / max, ms", "the same, CPU", "MiB", "peers' share of a core"]
    size = f"{options.workers} × {options.servers}"
    line = [size, f"{options.workers * options.slots:,}", f"{options.episodes:,}", f"{figures['rate']:.0f}"]
    line += [f"{figures['bytes'] / 2**20:.1f}", f"{figures['loop']:.2f} + {figures['other']:.2f}"]
    line += [f"{figures['turns']:,}", *quantiles_ms]
    line += [" / ".join(f"{value / 2**20:.0f}" for value in figures["memory"]), f"{figures['share']:.2f}"]
    print(table(header, [line]))

    if not figures["conserved"]:
        raise SystemExit("the run's audit disagrees: an episode was lost or counted twice")


if __name__ == "__main__":
    main()
