"""Does trainer.offload_optimizer take the same step, how much memory of the GPU does it free, and how much
longer does a step take?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from asyncrl.config import RunConfig
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import shards
from asyncrl.trainer.world import World
from parts.common import Context, Finding, failure, release, synchronize
from parts.training import Episode, config_of, distance, full_rows, gradients, mixed_rows, model_of, one_rank

SECONDS = 120
GOAL = "the same gradients and weights; memory of the GPU is freed"
OPTIONAL = True

LR = 1e-4
SAME = 1e-6  # of gradients, as a share of their norm
NOISE = 3.0  # or times as much as two plain runs differ: attention's backward on a GPU adds in any order
STEP = 1e-2  # of the weights after a step with the same gradients, as a share of the learning rate
REPEATS = 3
GB = 1e9


class Measured(NamedTuple):
    """A learner's gradients, by how much they differ when computed again, its weights after one step with the
    plain learner's gradients, and what it takes of the GPU."""

    gradients: dict[str, Tensor]
    noise: float
    weights: dict[str, Tensor]
    held: int
    peak: int
    seconds: float


def run(context: Context) -> Iterator[Finding]:
    rows, length = (4, 64) if context.small else (4, 2048)
    path = model_of(context, "qwen3-0.6b")
    episodes: list[Episode] = []
    found = dict[bool, Measured]()
    with one_rank(context) as world:
        for offload in (False, True):
            keys = {"lr": LR, "offload_optimizer": offload}
            config = config_of(path, context.kind, "bfloat16", rows, length, **keys)
            try:
                given = found[False].gradients if offload else None
                found[offload] = _measured(config, world, episodes, given, context)
            except Exception as error:
                yield failure(f"offload_optimizer={offload}", error)
                return
            finally:
                release(context)
    plain, offloaded = found[False], found[True]
    off = distance(offloaded.gradients, plain.gradients)
    limit = max(SAME, NOISE * plain.noise)
    again = f"; computed again without it by {plain.noise:.1e}"
    yield Finding("gradients", f"differ by {off:.1e} of their norm{again}", f"{limit:.0e}", off <= limit)
    gap = max(float((offloaded.weights[n] - w).abs().max()) for n, w in plain.weights.items()) / LR
    yield Finding(
        "weights after a step", f"differ by {gap:.1e} of the learning rate", f"{STEP:.0e}", gap <= STEP
    )
    yield Finding(
        "memory of the GPU",
        f"{plain.held / GB:.2f} GB between steps, {plain.peak / GB:.2f} at most; offloaded "
        f"{offloaded.held / GB:.2f} and {offloaded.peak / GB:.2f}",
        "less",
        context.judged(offloaded.held < plain.held / 2 and offloaded.peak < plain.peak),
        "CPU: there is none" if context.small else "torch.cuda.memory_allocated, max_memory_allocated",
    )
    yield Finding(
        "seconds of a step",
        f"{plain.seconds:.3g} s, offloaded {offloaded.seconds:.3g} s (median of {REPEATS}; one micro-batch "
        f"of {rows} x {length} tokens)",
    )


def _measured(
    config: RunConfig,
    world: World,
    episodes: list[Episode],
    given: dict[str, Tensor] | None,
    context: Context,
) -> Measured:
    """`episodes` are made by the first learner. `given`: the gradients of its step; None: its own. (Adam's
    first step is as long for a gradient that is nothing but noise, of either sign.)"""
    before = _allocated(context)
    learner, length = Learner(config, world), config.rollout.max_tokens
    if not episodes:
        episodes += mixed_rows(learner, config.trainer.micro_batch_tokens // length, length)
    found = gradients(learner, episodes)
    noise = distance(gradients(learner, episodes), found)
    taken, own = learner.optimizer.step, found if given is None else given

    def step() -> None:
        for name, parameter in learner.policy.named_parameters():
            grad: Any = parameter.grad
            grad.to_local().copy_(own[name])
        taken()

    with mock.patch.object(learner.optimizer, "step", step):
        learner.accumulate(episodes)
        learner.finish()
    weights = {name: w.full_tensor().to("cpu", copy=True) for name, w in shards(learner.policy).items()}
    rows, seconds = config.trainer.micro_batch_tokens // length, list[float]()
    for _ in range(1 + REPEATS):
        full = full_rows(rows, length, learner.step)
        synchronize(context)
        if not context.small:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        learner.accumulate(full)
        learner.finish()
        synchronize(context)
        seconds.append(time.perf_counter() - began)
    peak = 0 if context.small else torch.cuda.max_memory_allocated() - before
    return Measured(found, noise, weights, _allocated(context) - before, peak, median(seconds[1:]))


def _allocated(context: Context) -> int:
    return 0 if context.small else torch.cuda.memory_allocated()
