"""Engines and trainer apart, by shifts on the same devices, or elastic: simulated, for 1 to 16 devices; and
what a published table of another trainer says of its own parts.

    python tools/bench/sharing.py                # three workloads; prints a table for docs/planning.md
    python tools/bench/sharing.py --published    # g, t and s that give verl's three figures

Costs of the parts, in seconds of one device: g and t of a batch's sampling and training, s of two changes of
the devices. Those of `SmolLM2` are CPU seconds of docs/log.md, those of `demo` a guess of their size; `tail`
has answers with a long tail, `tools` calls with one. What s is depends on the machine, so there are several.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from common import table
from flow_control import TAILS, drawn
from msgspec.structs import replace

from asyncrl.config import BufferConfig
from asyncrl.planning.devices import compare
from asyncrl.planning.forecast import simulate
from asyncrl.planning.simulator import Recorded, Workload

HEADER = [
    "workload",
    "s",
    "devices",
    "apart",
    "s/step",
    "lag",
    "by shifts: s/step",
    "lag",
    "elastic, at best",
    "saves",
]
SHIFTS = (0.02, 0.1, 0.3)  # s, as a share of g + t
PUBLISHED = {"sync": 22.79, "colocate_async": 14.72, "separate_async": 14.10}  # hours
# of verl 0.9's table: Qwen3.5-35B-A3B
STEPS = 150
GPUS = 32
GROUPS = BufferConfig(groups_per_batch=16, episodes_per_group=8, group_policy="complete", max_staleness=1)


def batch(recorded: Recorded, buffer: BufferConfig) -> float:
    tokens = [sum(turn.tokens for turn in episode) for group in recorded for episode in group]
    return buffer.batch_size * sum(tokens) / len(tokens)


def on(work: Workload, g: float, t: float, engines: int, ranks: int) -> Workload:
    """A workload whose batches take one engine g seconds, and one rank t."""
    rate = batch(work.recorded, work.buffer) / g
    return replace(work, rate=engines * rate, train=t / ranks, ranks=ranks, publish=0.0)


def workloads() -> dict[str, tuple[Workload, float, float]]:
    """(parts, g, t), by name. No episode alone is faster than a token in 1/`speed` seconds."""
    demo = BufferConfig(groups_per_batch=4, episodes_per_group=8, max_staleness=16, group_policy="partial")
    short = Workload(drawn(8, 3, (9.0, 0.3)), demo, speed=600.0)
    tail = TAILS["answers"]
    tools = replace(TAILS["real"], slots=256)
    return {
        "demo": (short, 0.35, 0.20),
        "SmolLM2": (replace(short, speed=30.0, recorded=drawn(8, 2, (22.0, 0.3))), 13.1, 12.8),
        "tail": (tail, batch(tail.recorded, tail.buffer) / tail.rate, tail.train),
        "tools": (tools, 0.22, 0.085),
    }


def lines() -> Iterator[list[str]]:
    for name, (work, g, t) in workloads().items():
        for part in SHIFTS:
            s = part * (g + t)
            for devices in (1, 2, 4, 8, 16):
                found = compare(partial(on, work, g, t), devices, s)
                apart = found.apart
                shifts = found.shifts
                assert shifts is not None
                left = ["-"] * 3
                if apart is not None:
                    told = apart.forecast
                    left = [f"{apart.engines}+{apart.ranks}", f"{told.step_s:.3g}", f"{told.lag:.2f}"]
                told = shifts.forecast
                right = [f"{told.step_s:.3g}", f"{told.lag:.2f}"]
                best = [f"{found.elastic:.3g}", f"{found.gain:.0%}"] if apart else ["-", "-"]
                yield [name, f"{s:.3g}", str(devices), *left, *right, *best]


# -- a published table -----------------------------------------------------------------------------


def published() -> Iterator[list[str]]:
    """For ratios g : t, what gives the three figures, where nodes of 8 GPUs are divided as well as can be:
    g + t follows from the figure of devices apart, s from that of shifts, and what the synchronous run takes
    beyond is a wait for its longest episodes. Simulated beside it, with the speed that gives this wait."""
    sync, shifts, apart = (3600 * hours / STEPS for hours in PUBLISHED.values())
    for ratio in (1.0, 1.5, 2.0, 3.0):
        g = ratio / (1 + ratio)
        t = 1 / (1 + ratio)
        loss, ranks = min((max(g * GPUS / (GPUS - k), t * GPUS / k), k) for k in (8, 16, 24))
        both = apart / loss  # (g + t) / N
        told = [f"{ratio:g}", f"{GPUS - ranks}+{ranks}", *(f"{x * both:.0f}" for x in (g, t))]
        s = shifts - both
        yield [
            *told,
            f"{s:.0f}",
            f"{sync - shifts:.0f}",
            *simulated(g * both * GPUS, t * both * GPUS, s, ranks, sync),
        ]


def simulated(g: float, t: float, s: float, ranks: int, sync: float) -> list[str]:
    recorded = drawn(8, 1, (2000.0, 1.0), cap=16384.0)

    def seconds(token: float, ranks: int, bound: int) -> float:
        work = Workload(
            recorded, replace(GROUPS, max_staleness=bound), slots=1024, limit=1e9, speed=1 / token
        )
        work = on(work, g, t, GPUS - ranks or GPUS, ranks)
        return simulate(replace(work, shift=s if ranks == GPUS else None), 24).step_s

    # seconds of a token of one episode alone
    low = 1e-3
    high = 0.1
    for _ in range(10):
        token = (low + high) / 2
        low, high = (token, high) if seconds(token, GPUS, 0) < sync else (low, token)
    return [
        f"{x:.0f}"
        for x in (1e3 * token, seconds(token, GPUS, 0), seconds(token, GPUS, 4), seconds(token, ranks, 4))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--published", action="store_true")
    args = parser.parse_args()
    if args.published:
        header = [
            "g : t",
            "split",
            "g / N",
            "t / N",
            "s",
            "wait",
            "ms a token alone",
            "sync",
            "shifts",
            "apart",
        ]
        print(table(header, list(published())))
    else:
        print(table(HEADER, list(lines())))


if __name__ == "__main__":
    main()
