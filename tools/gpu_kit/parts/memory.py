"""Is the memory estimate of the dry run right, and does a trainer survive running out of memory?"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from asyncrl.config import RunConfig
from asyncrl.coordinator.failures import MicroBudget
from asyncrl.errors import lacks_memory, one_line
from asyncrl.trainer import learner as learning
from asyncrl.trainer.footprint import Footprint, footprint
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from asyncrl.wire.messages.trainer import GaveUp
from parts.common import NOT_JUDGED, Context, Finding, attempt, exact_float32, failure, release
from parts.training import (
    Episode,
    config_of,
    distance,
    full_rows,
    gradients,
    mixed_rows,
    model_of,
    one_rank,
)
from tests.fakes.traced import LiveBytes, traced

SECONDS = 180
GOAL = "the estimate within 15% of the peak; after running out of memory the gradients are the same"
SMALL_SECONDS = 240

NEAR = 0.15
SAME = 1e-5  # of gradients in float32: the order of sums differs
CASE_S = 9.0  # a case is not begun with less time
COMPILE_S = 45.0
GB = 1e9


class Case(NamedTuple):
    """What is trained, and how many rows a micro-batch has. `packing` as in trainer.packing."""

    model: str
    rows: tuple[int, ...]
    recomputed: str = "none"
    lora_rank: int = 0
    packing: str = "padded"

    @property
    def title(self) -> str:
        extra = (f"LoRA {self.lora_rank}" if self.lora_rank else "", f"recomputed {self.recomputed}")
        return ", ".join(filter(None, (self.model, *extra, self.packing)))


FIRST = Case("qwen3-0.6b", (2, 8))
OTHERS = (
    Case("qwen3-0.6b", (4, 16), "full"),
    Case("qwen3-0.6b", (2, 8), lora_rank=32),
    Case("qwen3-1.7b", (2, 4)),
    Case("qwen3-1.7b", (4, 16), "full"),
    Case("qwen3-1.7b", (2, 8), lora_rank=32),
)
PACKED = Case("qwen3-0.6b", (2, 8), packing="packed")  # compiles flex attention


def run(context: Context) -> Iterator[Finding]:
    length = 128 if context.small else 2048
    with ProcessPoolExecutor(1 if context.small else 6, multiprocessing.get_context("spawn")) as pool:
        told = dict[Case, list[Future[Footprint]]]()
        for case in (FIRST, *OTHERS, PACKED):
            path = model_of(context, case.model)
            told[case] = [pool.submit(traced, config(path, context, case, n, length)) for n in case.rows]
        with one_rank(context) as world:
            yield from _compare(context, world, FIRST, told[FIRST], length)
            yield from _survive(context, world)
            for case in (*OTHERS, PACKED):
                needed = COMPILE_S if case.packing == "packed" and not context.small else CASE_S
                if context.left() < needed:
                    yield Finding(case.title, "not measured: no time was left")
                    continue
                yield from _compare(context, world, case, told[case], length)
        pool.shutdown(cancel_futures=True)


def config(path: Path, context: Context, case: Case, rows: int, length: int) -> RunConfig:
    keys = {"activation_checkpointing": case.recomputed, "packing": case.packing}
    return config_of(path, context.kind, "bfloat16", rows, length, case.lora_rank, **keys)


# -- the estimate --------------------------------------------------------------------------------------


def _compare(
    context: Context, world: World, case: Case, told: list[Future[Footprint]], length: int
) -> Iterator[Finding]:
    try:
        yield from _sizes(context, world, case, told, length)
    except Exception as error:
        yield failure(case.title, error)
    finally:
        release(context)


def _sizes(
    context: Context, world: World, case: Case, told: list[Future[Footprint]], length: int
) -> Iterator[Finding]:
    """One learner, which is given micro-batches of each size."""
    path = model_of(context, case.model)
    configs = [config(path, context, case, rows, length) for rows in case.rows]
    with _counting(context) as count:
        learner = Learner(configs[0], world)
        for own, future in zip(configs, told, strict=True):
            name = f"{case.title}, {own.trainer.micro_batch_tokens} tokens"
            yield from attempt(name, partial(_one, name, learner, own, count, future), context)


def _one(name: str, learner: Learner, config: RunConfig, count: Any, told: Future[Footprint]) -> Finding:
    """A step of two micro-batches: the second one finds gradients, as most do."""
    learner.budget, length = config.trainer.micro_batch_tokens, config.rollout.max_tokens
    episodes = full_rows(learner.budget // length, length, learner.step)
    learner.accumulate(episodes)
    count.reset()
    learner.accumulate(episodes)
    learner.finish()
    found, estimate, counted = count.peak(), footprint(config), told.result(60)
    off = estimate.total / found - 1
    return Finding(
        name,
        f"estimated {estimate.total / GB:.2f} GB, measured {found / GB:.2f} GB: {off:+.1%}",
        f"within {NEAR:.0%}",
        abs(off) <= NEAR,
        f"weights {estimate.weights / GB:.2f}, optimizer {estimate.optimizer / GB:.2f}, gradients "
        f"{estimate.gradients / GB:.2f}, a micro-batch {estimate.work / GB:.2f} GB; the trainer's code on "
        f"tensors without memory says {counted.total / GB:.2f} GB, {counted.total / found - 1:+.1%}; "
        f"{count.what}; rows were {learner.packing}",
    )


class _Allocated:
    """Bytes that torch's allocator has given out beside those of before."""

    what = "torch.cuda.max_memory_allocated"

    def __init__(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):  # so that the workspaces of cuBLAS do not count
            one = torch.ones(8, 8, device="cuda", dtype=dtype, requires_grad=True)
            (one @ one).sum().backward()
        del one
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


class _Living:
    """On a CPU, whose allocator tells nothing: bytes of all tensors that live."""

    what = "on a CPU: bytes of living tensors, not an allocator's"

    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def reset(self) -> None:
        self._live.peak = self._live.now

    def peak(self) -> int:
        return self._live.peak


@contextmanager
def _counting(context: Context) -> Iterator[_Allocated | _Living]:
    if not context.small:
        yield _Allocated()
        return
    with LiveBytes() as live:
        yield _Living(live)


# -- too little memory ---------------------------------------------------------------------------------


def _survive(context: Context, world: World) -> Iterator[Finding]:
    """In float32. A rank that lacks memory ends, and a new one repeats the batch with the budget that the
    coordinator halves: so does this."""
    rows, length = (4, 64) if context.small else (8, 1024)
    own = config_of(model_of(context, FIRST.model), context.kind, "float32", rows, length)
    try:
        with exact_float32():
            episodes, wanted, limit = _expected(own, world, 2 * rows, context)
            release(context)
            ways: dict[str, Any] = {"injected": _Injected()}
            if not context.small:
                ways["real"] = _Limited(limit)
            for way, lack in ways.items():
                name = f"out of memory, {way}"
                work = partial(_halved, name, own, world, episodes, wanted, lack, context)
                yield from attempt(name, work, context)
    except Exception as error:
        yield failure("out of memory", error)
    if context.small:
        yield Finding("out of memory, real", NOT_JUDGED, note="torch sets no limit for a CPU")


def _expected(
    config: RunConfig, world: World, count: int, context: Context
) -> tuple[list[Episode], dict[str, Tensor], int]:
    """Episodes, their gradients where there is memory enough, and a number of bytes in which the half of a
    micro-batch fits, but not all of it."""
    learner = Learner(config, world)
    episodes, held = mixed_rows(learner, count, config.rollout.max_tokens), _allocated(context)
    if not context.small:
        torch.cuda.reset_peak_memory_stats()
    wanted = gradients(learner, episodes)
    peak = 0 if context.small else torch.cuda.max_memory_allocated()
    return episodes, wanted, int(held + 0.75 * (peak - held))


def _allocated(context: Context) -> int:
    return 0 if context.small else torch.cuda.memory_allocated()


def _halved(
    name: str,
    config: RunConfig,
    world: World,
    episodes: list[Episode],
    wanted: dict[str, Tensor],
    lack: Any,
    context: Context,
) -> Finding:
    """Repeat the batch until it fits; at least once it must not."""
    store: Any = SimpleNamespace(put_meta=lambda name, value: None)
    budget = MicroBudget(config.trainer.micro_batch_tokens, config.trainer.micro_batch_tokens)
    tried = [budget.tokens]
    with lack:
        while (told := _batch(config, world, budget.tokens, episodes, lack)) and isinstance(told, GaveUp):
            release(context)  # a new process begins with none
            budget.halve(told, store)
            tried.append(budget.tokens)
    off = distance(told, wanted)
    way = " → ".join(map(str, tried))
    return Finding(
        name,
        f"micro-batches of {way} tokens; gradients differ by {off:.1e} of their norm",
        f"at least one halving; {SAME:.0e}",
        len(tried) > 1 and off <= SAME,
    )


def _batch(
    config: RunConfig, world: World, budget: int, episodes: list[Episode], lack: Any
) -> GaveUp | dict[str, Tensor]:
    """What a rank of the trainer does: gradients, or what it tells the coordinator."""
    learner = Learner(config, world)
    learner.budget = budget
    try:
        with lack.once():
            return gradients(learner, episodes)
    except Exception as error:
        if not lacks_memory(error) or not any(learner.size):
            raise
        return GaveUp(0, 0, 1, "memory", one_line(error), *learner.size)


class _Injected:
    """The backward of the second micro-batch fails, once."""

    def __init__(self) -> None:
        self._left = 2

    def __enter__(self) -> None: ...

    def __exit__(self, *about: object) -> None: ...

    def once(self) -> AbstractContextManager[object]:
        return mock.patch.object(learning, "evaluate", self._evaluate) if self._left > 0 else nullcontext()

    def _evaluate(self, *given: Any) -> Any:
        from asyncrl.trainer.objective import evaluate

        found, self._left = evaluate(*given), self._left - 1
        if not self._left:
            found.loss.register_hook(_lack)
        return found


def _lack(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (injected)")


class _Limited:
    """torch's allocator has so many bytes."""

    def __init__(self, size: int) -> None:
        self._share = size / torch.cuda.get_device_properties(0).total_memory

    def __enter__(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._share)

    def __exit__(self, *about: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)

    def once(self) -> AbstractContextManager[None]:
        return nullcontext()
