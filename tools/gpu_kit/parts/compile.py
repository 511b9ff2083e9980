"""Does `trainer.compile` compile once for all lengths, and what does it gain?

Steps of the trainer with a model in the size of Qwen3 0.6B, packed rows, once without and once with
`trainer.compile`; both compute attention with torch's flex attention, which is compiled in any case.
Graphs are counted after the first batch, and after batches with other numbers and lengths of rows.
Seconds: the median of three steps, after the first one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from asyncrl.errors import ConfigError
from asyncrl.trainer.layers import compiled_graphs
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World, join, leave
from parts.common import Context, Finding, failure, release, synchronize
from parts.steps import episodes, make_learner, train

SECONDS = 120
GOAL = "no graph after the first batch"
OPTIONAL = True

REPEATS = 3
# Lengths of the rows of a batch: they differ in number, none is a multiple of another.
BATCHES = ([1000, 700, 900, 650], [2047], [333, 1501, 411, 129, 97], [1025, 1280])
TIMED = [2000, 1900, 2100, 2192]


class Measured(NamedTuple):
    first: float
    seconds: float
    graphs: list[int]
    memory: float


def run(context: Context) -> Iterator[Finding]:
    world = join(0, 1, device=context.kind)
    found: dict[bool, Measured] = {}
    try:
        for compiled in (True, False):
            try:
                found[compiled] = measure(context, world, compiled)
            except ConfigError as error:  # no compiler
                yield Finding("trainer.compile", "not tried", note=str(error))
            except Exception as error:
                yield failure(f"compile={compiled}", error)
            release(context)
            if compiled and compiled in found:
                yield counted(found[compiled])
        yield from told(context, found)
    finally:
        leave()


def measure(context: Context, world: World, compiled: bool) -> Measured:
    scale = 20 if context.small else 1
    timed = [n // scale for n in TIMED]
    learner = make_learner(context, world, "qwen3-0.6b", sum(timed), compile=compiled)
    first, *graphs = step(learner, timed, context), compiled_graphs()
    for lengths in BATCHES:
        step(learner, [max(n // scale, 4) for n in lengths], context)
        graphs.append(compiled_graphs())
    if not context.small:
        torch.cuda.reset_peak_memory_stats()
    taken = [step(learner, timed, context) for _ in range(REPEATS)]
    memory = 0.0 if context.small else torch.cuda.max_memory_allocated() / (1 << 30)
    return Measured(first, statistics.median(taken), graphs, memory)


def step(learner: Learner, lengths: Sequence[int], context: Context) -> float:
    given = episodes(learner, lengths)
    synchronize(context)
    began = time.perf_counter()
    train(learner, given)
    synchronize(context)
    return time.perf_counter() - began


def counted(found: Measured) -> Finding:
    first, last = found.graphs[0], found.graphs[-1]
    value = f"{first} graphs after the first batch, {last} after {len(BATCHES)} of other lengths"
    return Finding("graphs", value, GOAL, first == last, f"after each: {found.graphs}")


def told(context: Context, found: dict[bool, Measured]) -> Iterator[Finding]:
    tokens = sum(n // (20 if context.small else 1) for n in TIMED)
    for compiled, one in found.items():
        memory = "" if context.small else f"; {one.memory:.1f} GiB allocated at most"
        value = f"{1e3 * one.seconds:.0f} ms a step; {tokens / one.seconds:,.0f} tokens/s{memory}"
        note = f"median of {REPEATS}; the first step took {one.first:.1f} s"
        yield Finding("compiled" if compiled else "not compiled", value, note=note)
    if len(found) == 2:
        yield Finding("gain", f"{found[False].seconds / found[True].seconds:.2f} times as fast")
