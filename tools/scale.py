"""Predicts what a run of 64, 512 and 4,096 GPUs asks of its one coordinator. Nothing here runs on a GPU.

    python tools/scale.py                                # the tables of docs/guides/scale.md
    python tools/scale.py --gpus 128 --turns 30 --sampled 1000 --context 2000
    python tools/scale.py --gpus 128 --models 8B --whole # simulate 128 GPUs whole, to check the cells
    python tools/scale.py --heartbeat                    # measure LISTED_SERVER_S

The rates of GPUs and networks are assumptions, which the options change. The coordinator's costs are
measurements of tools/bench/load.py, see `MEASURED_LOADS`. The planner of `asyncrl plan` simulates a cell of
64 GPUs with the real buffer and flow control. A run of N GPUs is taken to be N/64 such cells that share one
coordinator, one weight version and one batch of N/64 times the size. Only the seconds of a push depend on N.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np

from asyncrl.algorithms.recipe import with_group_policy
from asyncrl.config import BufferConfig, RunConfig, parse
from asyncrl.coordinator.engines import EngineHandler
from asyncrl.planning.devices import batch_seconds
from asyncrl.planning.forecast import Forecast, Rates, predict, workload
from asyncrl.planning.simulator import Recorded, RecordedTurn
from asyncrl.store.segments import SEGMENT_BYTES
from asyncrl.types import Generation, StopReason, Turn, VersionSpan
from asyncrl.wire.messages.worker import EngineUse, WorkerHeartbeat

CELL_GPUS = 64  # GPUs of a simulated cell
STEPS = 40  # simulated steps, of which the first third and the last two are left out
MACHINE_GPUS = 8
PIECE_BYTES = 1 << 20  # piece of a version on the chain of machines
HEARTBEATS_PER_SECOND = 2.0  # of each worker, supervisor and rank
FSYNCS_PER_SEGMENT = 2  # the full segment, and the directory with the name of the next one
FIRST_TOKEN_ID = 1000  # ids of the encoded turns, as in tools/bench/load.py
GIGA = 1e9


class Load(msgspec.Struct, frozen=True):
    """A measured load of the coordinator: CPU seconds of its loop and of encryption for 1,000 episodes."""

    turns: int
    tokens: int  # of a turn, half of them sampled
    loop_s: float
    encryption_s: float


# tools/bench/load.py with 512 workers and 64 servers on 2 CPU cores. The first load is the median of four
# runs on 2026-11-30, beside other work; the others are of 2026-11-23.
MEASURED_LOADS = (
    Load(turns=8, tokens=1084, loop_s=2.36, encryption_s=0.88),
    Load(turns=8, tokens=32, loop_s=1.59, encryption_s=0.48),
    Load(turns=1, tokens=256, loop_s=0.43, encryption_s=0.13),
)
# CPU seconds of the loop for a server that a worker's heartbeat lists: `--heartbeat`.
LISTED_SERVER_S = 0.3e-6


class Model(msgspec.Struct, frozen=True):
    """Sizes of a model. `active`: parameters that compute a token; `train_use`: part of the FLOPs."""

    name: str
    parameters: float
    active: float
    layers: int
    kv_heads: int
    head_size: int
    tp: int
    train_use: float

    @property
    def version_bytes(self) -> float:
        """Bytes of a version in bfloat16."""
        return 2 * self.parameters


MODELS = {
    "8B": Model("8B", 8.19e9, 8.19e9, layers=36, kv_heads=8, head_size=128, tp=1, train_use=0.35),
    "30B-A3B": Model("30B-A3B", 30.5e9, 3.35e9, layers=48, kv_heads=4, head_size=128, tp=2, train_use=0.2),
}


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed of episodes, GPUs and networks. Rates in bytes/s and FLOP/s."""

    turns: int = 8
    sampled: int = 542
    context: int = 542
    sigma: float = 0.5
    tool_s: float = 1.0
    slots: int = 64
    worker_slots: int = 128
    group_size: int = 8
    batch: int = 8
    max_staleness: int = 16
    target_staleness: int = 4
    flops: float = 989e12
    bandwidth: float = 3.35e12
    decode_use: float = 0.6
    load_rate: float = 2e9
    chain_rate: float = 278e6
    machine_rate: float = 50e9
    delta: float = 68.7

    @property
    def tokens(self) -> int:
        """Tokens of an episode."""
        return self.turns * (self.sampled + self.context)

    @property
    def records(self) -> int:
        """Records of an episode: its turns, the replies between them, and its end."""
        return 2 * self.turns

    @property
    def payload_bytes(self) -> int:
        """Bytes of an episode's turns."""
        return self.turns * turn_bytes(self.sampled, self.context)


OPTION_HELP = {
    "turns": "turns per episode",
    "sampled": "mean number of sampled tokens per turn",
    "context": "tokens per turn that are not sampled",
    "sigma": "sigma of the log-normal lengths and waits",
    "tool_s": "mean time between two turns, in seconds",
    "slots": "episodes in flight per engine GPU",
    "worker_slots": "rollout.slots of a worker",
    "group_size": "buffer.episodes_per_group",
    "batch": "episodes per batch for each GPU in the run",
    "max_staleness": "buffer.max_staleness",
    "target_staleness": "buffer.target_staleness; `auto` reaches 4 here after 40 steps",
    "flops": "FLOP/s per GPU",
    "bandwidth": "memory bandwidth of a GPU, in bytes/s",
    "decode_use": "fraction of both that decoding uses",
    "load_rate": "rate at which a server loads a version, or a sender broadcasts a version, in bytes/s",
    "chain_rate": "rate of one encrypted connection between machines, in bytes/s",
    "machine_rate": "network bandwidth of a machine, in bytes/s",
    "delta": "size of a version, divided by the size of a delta",
}


class CoordinatorCost(msgspec.Struct, frozen=True):
    """Seconds of one core for an episode, for each of its records, and for each byte of its turns."""

    episode_s: float
    record_s: float
    byte_s: float

    def seconds(self, records: int, payload_bytes: float) -> float:
        """Return the seconds for an episode."""
        return self.episode_s + self.record_s * records + self.byte_s * payload_bytes


@cache
def turn_bytes(sampled: int, context: int) -> int:
    """Return the bytes of an encoded turn, as in tools/bench/load.py."""
    ids = tuple(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + sampled))
    generation = Generation(ids, (-0.25,) * sampled, (VersionSpan(0, sampled, 1, 1),), StopReason.STOP)
    context_ids = tuple(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + context))
    return len(msgspec.msgpack.encode(Turn(0, context_ids, generation)))


def fit_cost(loads: Sequence[Load], seconds: Sequence[float]) -> CoordinatorCost:
    """Solve for the three costs of three loads; `seconds`: for 1,000 episodes of each load."""
    rows = [
        [1.0, 2 * load.turns, load.turns * turn_bytes(load.tokens // 2, load.tokens // 2)] for load in loads
    ]
    solution = np.linalg.solve(np.array(rows), np.array(seconds) / 1000)
    return CoordinatorCost(*(max(0.0, float(value)) for value in solution))


def measure_listed_server(servers: int = 2560, repeats: int = 20) -> float:
    """Measure the CPU seconds in which the coordinator decodes a listed server, and compares its counters
    with those of the heartbeat before. Nothing has changed, as for most servers between two heartbeats."""
    uses = tuple(EngineUse(f"engine {index}", 1000, 100_000, 50_000, 300_000) for index in range(servers))
    encoded = msgspec.msgpack.encode(WorkerHeartbeat(0, (), 0.0, 0.0, 0, engines=uses))
    decoder = msgspec.msgpack.Decoder(WorkerHeartbeat)
    handler = EngineHandler.__new__(EngineHandler)  # counts only what has changed, so it needs no state

    began = time.thread_time()
    for _ in range(repeats):
        handler.add_use(uses, decoder.decode(encoded).engines)
    return (time.thread_time() - began) / repeats / servers


# -- the cell, which the planner simulates -----------------------------------------------------------------


def recorded_groups(assumptions: Assumptions, group_count: int = 100) -> Recorded:
    """Draw groups of episodes with log-normal lengths and waits of the assumed means."""
    generator = np.random.default_rng(0)
    shape = (group_count, assumptions.group_size, assumptions.turns)
    spread = generator.lognormal(-(assumptions.sigma**2) / 2, assumptions.sigma, (2, *shape))
    return tuple(
        tuple(
            tuple(
                RecordedTurn(max(1.0, assumptions.sampled * length), assumptions.tool_s * wait)
                for length, wait in zip(lengths, waits, strict=True)
            )
            for lengths, waits in zip(group_lengths, group_waits, strict=True)
        )
        for group_lengths, group_waits in zip(*spread, strict=True)
    )


def rates(assumptions: Assumptions, model: Model, publish_s: float) -> Rates:
    """Return the rates of the assumed GPUs: decoding reads weights and KV cache, training computes 6 FLOPs
    per active parameter and token. Prompts take no time."""
    memory = assumptions.decode_use * assumptions.bandwidth * model.tp
    compute = assumptions.decode_use * assumptions.flops * model.tp
    kv_bytes = 2 * 2 * model.layers * model.kv_heads * model.head_size * assumptions.tokens / 2
    return Rates(
        recorded=recorded_groups(assumptions),
        base=model.version_bytes / memory,
        slope=kv_bytes / memory + 2 * model.active / compute,
        assumed=True,
        episode_s=6 * model.active * assumptions.tokens / (model.train_use * assumptions.flops),
        commit_s=0.5,
        publish_s=publish_s,
        group_tokens=assumptions.tokens * assumptions.group_size,
        filtered=0.0,
    )


def configuration(assumptions: Assumptions, model: Model, gpus: int, engines: int) -> RunConfig:
    """Return the configuration of a run on `gpus` GPUs, `engines` * tp of them for the engines."""
    slots = engines * model.tp * assumptions.slots
    workers = max(1, math.ceil(slots / assumptions.worker_slots))
    max_tokens = 2 * assumptions.tokens
    return with_group_policy(
        parse(
            {
                "name": "scale",
                "model": {"path": "scale"},
                "data": {"train": "none"},
                "total_steps": 1000,
                "engine": {"name": "sglang", "servers": engines, "tp": model.tp},
                "rollout": {
                    "workers": workers,
                    "slots": max(1, slots // workers),
                    "max_tokens": max_tokens,
                    "max_new_tokens": min(max_tokens, 4 * assumptions.sampled),
                },
                "trainer": {
                    "ranks": gpus - engines * model.tp,
                    "micro_batch_tokens": 4 * max_tokens,
                },
                "buffer": {
                    "groups_per_batch": max(1, gpus * assumptions.batch // assumptions.group_size),
                    "episodes_per_group": assumptions.group_size,
                    "max_staleness": assumptions.max_staleness,
                    "target_staleness": assumptions.target_staleness,
                    "max_bytes": 1 << 50,
                },
            }
        )
    )


def best_split(assumptions: Assumptions, model: Model, gpus: int) -> int:
    """Return the number of engines with which neither side limits the other, by the planner's arithmetic."""

    def slower_side(engines: int) -> float:
        config = configuration(assumptions, model, gpus, engines)
        return max(batch_seconds(workload(config, rates(assumptions, model, 0.0))))

    return min(range(1, (gpus - 1) // model.tp + 1), key=slower_side)


# -- the run -----------------------------------------------------------------------------------------------


class WeightWays(msgspec.Struct, frozen=True):
    """Seconds until the last server has loaded a version, by the way it takes.

    rolling: from files, one server after another (`weights.rolling`).
    files: from files that all machines see, all servers at once.
    chain, chain_delta: files over the chain of machines, whole and as a delta.
    broadcast: from all ranks at once (`weights.transport=collective`).

    What the ways need: `shared_rate`, bytes/s of a file system that all machines read; for the broadcast
    `sender_threads` of each rank, and at most `sender_bytes` of main memory on a machine of ranks.
    """

    rolling: float
    files: float
    chain: float
    chain_delta: float
    broadcast: float
    shared_rate: float
    sender_threads: int
    sender_bytes: float


class Run(msgspec.Struct, frozen=True):
    """A predicted run."""

    gpus: int
    engines: int
    ranks: int
    workers: int
    in_flight: int
    forecast: Forecast
    episodes_per_s: float
    loop_cores: float  # for episodes
    heartbeat_cores: float  # for the lists of servers in the workers' heartbeats
    encryption_cores: float
    records_per_s: float
    heartbeats_per_s: float
    bytes_per_s: float
    fsyncs_per_s: float
    connections: int
    buffer_bytes: float
    ways: WeightWays


def weight_ways(assumptions: Assumptions, model: Model, engines: int, ranks: int) -> WeightWays:
    """Return the seconds of each way.

    Files are written at the rate at which one server loads them. On the chain each machine passes pieces on
    as they arrive. A sender collects the shards of all ranks while it broadcasts; ranks of one machine share
    its network, and serve the shards that the others collect.
    """
    size = model.version_bytes
    load_s = size / assumptions.load_rate
    server_machines = math.ceil(engines * model.tp / MACHINE_GPUS)

    link = min(assumptions.chain_rate, assumptions.machine_rate)
    hops_s = (server_machines - 1) * PIECE_BYTES / link

    senders = min(ranks, engines)
    rounds = math.ceil(engines / senders)
    senders_per_machine = min(MACHINE_GPUS, senders)
    sent_bytes = senders_per_machine * size * (1 + senders / ranks)
    round_s = max(load_s, sent_bytes / assumptions.machine_rate)

    return WeightWays(
        rolling=load_s + engines * load_s,
        files=2 * load_s,
        chain=load_s + size / link + hops_s + load_s,
        chain_delta=load_s + size / assumptions.delta / link + hops_s + 2 * load_s,
        broadcast=rounds * round_s,
        shared_rate=server_machines * assumptions.load_rate,
        sender_threads=senders - 1,
        sender_bytes=min(MACHINE_GPUS, ranks) * size / ranks * (senders + 1),
    )


def predict_run(assumptions: Assumptions, model: Model, gpus: int, whole: bool = False) -> Run:
    """Predict a run from the simulation of a cell, or with `whole` from a simulation of all GPUs."""
    cell_gpus = gpus if whole else min(gpus, CELL_GPUS)
    cells = gpus / cell_gpus
    cell_engines = best_split(assumptions, model, cell_gpus)
    engines = round(cell_engines * cells)
    ranks = gpus - engines * model.tp

    ways = weight_ways(assumptions, model, engines, ranks)
    cell = configuration(assumptions, model, cell_gpus, cell_engines)
    forecast = predict(cell, rates(assumptions, model, publish_s=ways.broadcast), steps=STEPS)
    episodes_per_s = cells * cell.buffer.batch_size / forecast.step_s

    loop_cost = fit_cost(MEASURED_LOADS, [load.loop_s for load in MEASURED_LOADS])
    encryption_cost = fit_cost(MEASURED_LOADS, [load.encryption_s for load in MEASURED_LOADS])
    records = assumptions.records
    payload_bytes = assumptions.payload_bytes

    in_flight = round(cells * cell.rollout.slots * cell.rollout.workers)
    workers = math.ceil(in_flight / assumptions.worker_slots)
    bytes_per_s = episodes_per_s * assumptions.payload_bytes
    return Run(
        gpus=gpus,
        engines=engines,
        ranks=ranks,
        workers=workers,
        in_flight=in_flight,
        forecast=forecast,
        episodes_per_s=episodes_per_s,
        loop_cores=episodes_per_s * loop_cost.seconds(records, payload_bytes),
        heartbeat_cores=HEARTBEATS_PER_SECOND * workers * engines * LISTED_SERVER_S,
        encryption_cores=episodes_per_s * encryption_cost.seconds(records, payload_bytes),
        records_per_s=episodes_per_s * assumptions.records,
        heartbeats_per_s=HEARTBEATS_PER_SECOND * (workers + engines + ranks),
        bytes_per_s=bytes_per_s,
        fsyncs_per_s=FSYNCS_PER_SEGMENT * bytes_per_s / SEGMENT_BYTES,
        connections=2 * workers + engines + 2 * ranks + math.ceil(engines * model.tp / MACHINE_GPUS),
        buffer_bytes=cells * cell.buffer.max_live_groups * cell.group_bytes,
        ways=ways,
    )


def capacity(assumptions: Assumptions) -> float:
    """Return the episodes per second at which the coordinator's loop takes one whole core."""
    cost = fit_cost(MEASURED_LOADS, [load.loop_s for load in MEASURED_LOADS])
    return 1 / cost.seconds(assumptions.records, assumptions.payload_bytes)


def limit_gpus(run: Run) -> float:
    """Return the GPUs at which the coordinator's loop takes one whole core.

    Episodes grow with the GPUs, the servers that heartbeats list with their square.
    """
    linear = run.loop_cores / run.gpus
    quadratic = run.heartbeat_cores / run.gpus**2
    return 2 / (linear + math.sqrt(linear**2 + 4 * quadratic))


def limit_rolling_servers(assumptions: Assumptions, model: Model, step_s: float) -> float:
    """Return how many servers can be updated one after another, so that none falls behind further than a turn
    may start (with buffer.target_staleness=auto)."""
    steps_behind = BufferConfig(max_staleness=assumptions.max_staleness).usual_staleness
    return steps_behind * step_s * assumptions.load_rate / model.version_bytes


# -- the tables --------------------------------------------------------------------------------------------


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def duration(seconds: float, step_s: float) -> str:
    return f"{seconds:,.0f} s ({seconds / step_s:.1f})"


def print_runs(named_runs: Sequence[tuple[str, Run]]) -> None:
    """Print the three tables."""
    header = ["model", "GPUs", "engines + ranks", "in flight", "s/step", "lag", "episodes/s", "MB/s"]
    header += ["loop, cores", "heartbeats, cores", "encryption, cores"]
    rows = [
        [
            *(name, f"{run.gpus:,}", f"{run.engines:,} + {run.ranks:,}", f"{run.in_flight:,}"),
            *(f"{run.forecast.step_s:.0f}", f"{run.forecast.lag:.1f}", f"{run.episodes_per_s:,.0f}"),
            *(f"{run.bytes_per_s / 1e6:,.1f}", f"{run.loop_cores:.2f}", f"{run.heartbeat_cores:.2f}"),
            f"{run.encryption_cores:.2f}",
        ]
        for name, run in named_runs
    ]
    print_table(header, rows)

    header = ["model", "GPUs", "records/s", "heartbeats/s", "fsyncs/s", "GB/hour", "workers", "connections"]
    header += ["buffer.max_bytes, GB"]
    rows = [
        [
            *(name, f"{run.gpus:,}", f"{run.records_per_s:,.0f}", f"{run.heartbeats_per_s:,.0f}"),
            *(f"{run.fsyncs_per_s:.2f}", f"{run.bytes_per_s * 3600 / GIGA:,.0f}", f"{run.workers:,}"),
            *(f"{run.connections:,}", f"{run.buffer_bytes / GIGA:.0f}"),
        ]
        for name, run in named_runs
    ]
    print_table(header, rows)

    header = ["model", "GPUs", "servers", "rolling", "files", "chain", "chain, deltas", "broadcast"]
    header += ["files: shared GB/s", "broadcast: threads a rank", "GB a machine"]
    rows = [
        [
            *(name, f"{run.gpus:,}", f"{run.engines:,}"),
            *(
                duration(getattr(run.ways, way), run.forecast.step_s)
                for way in ("rolling", "files", "chain", "chain_delta", "broadcast")
            ),
            *(f"{run.ways.shared_rate / GIGA:,.0f}", f"{run.ways.sender_threads:,}"),
            f"{run.ways.sender_bytes / GIGA:,.0f}",
        ]
        for name, run in named_runs
    ]
    print_table(header, rows)


def arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Assumptions]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--heartbeat", action="store_true", help="only measure a heartbeat's cost")
    parser.add_argument("--whole", action="store_true", help="simulate all GPUs, not a cell")
    for field in msgspec.structs.fields(Assumptions):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(
            option, type=type(field.default), default=field.default, help=OPTION_HELP[field.name]
        )

    options = parser.parse_args(argv)
    names = [field.name for field in msgspec.structs.fields(Assumptions)]
    return options, Assumptions(**{name: getattr(options, name) for name in names})


def main() -> None:
    options, assumptions = arguments()
    if options.heartbeat:
        print(f"{1e6 * measure_listed_server():.2f} µs for each server that a heartbeat lists")
        return

    capacity_text = f"{capacity(assumptions):.0f} episodes/s"
    size = f"{assumptions.turns} turns and {assumptions.payload_bytes / 1024:.0f} KiB"
    print(f"one core of the coordinator's loop: {capacity_text} of {size}\n")

    named_runs = []
    for name in options.models:
        for gpus in options.gpus:
            named_runs.append((name, predict_run(assumptions, MODELS[name], gpus, options.whole)))

    print_runs(named_runs)
    for name, run in named_runs:
        if run.gpus != max(options.gpus):
            continue
        servers = limit_rolling_servers(assumptions, MODELS[name], run.forecast.step_s)
        print(f"{name}: one loop carries {limit_gpus(run):,.0f} GPUs; weights.rolling {servers:.0f} servers")


if __name__ == "__main__":
    main()
