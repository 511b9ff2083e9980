"""How long does the trainer wait for a version that it publishes, and does the version reach other processes:
an engine's through files, and a server's through memory of the GPU?"""

from __future__ import annotations

import asyncio
import queue
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from asyncrl.config import RunConfig
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.publishing import Publishing
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from asyncrl.weights.snapshot import Snapshot
from parts.common import Context, Finding, attempt, exact_float32, failure, release, synchronize, timed
from parts.training import config_of, model_of, one_rank

SECONDS = 120
GOAL = "the trainer waits for at most 1.2 copies of the same bytes; what arrives is what was published"
SMALL_SECONDS = 180

COPIES = 1.2
CLOSE = 1e-4  # nats, in float32
REPEATS = 3
LONG = 45.0
GB = 1e9


def run(context: Context) -> Iterator[Finding]:
    large, small = model_of(context, "qwen3-1.7b"), model_of(context, "qwen3-0.6b")
    with (
        _child(_engine, str(small), context.kind) as engine,
        one_rank(context) as world,
    ):
        try:
            yield from _publish(_config(context, large, "bfloat16"), world, context)
        except Exception as error:
            yield failure("stall", error)
        release(context)
        with exact_float32():
            yield from _deliver(_config(context, small, "float32"), world, engine, context)


def _config(context: Context, path: Path, dtype: str) -> RunConfig:
    return config_of(path, context.kind, dtype, rows=1, length=128)


class _Published:
    """A rank's publishing, which announces to this process only. `snapshots`: the last one handed over."""

    def __init__(self, config: RunConfig, world: World, run_dir: Path) -> None:
        self.policy = load_policy(config.model, world)
        self.announced: queue.Queue[tuple[WeightsRef, float]] = queue.Queue()
        self.snapshots: list[Snapshot] = []
        self.place: Path | None = None
        nobody: Any = None
        with mock.patch.object(Publishing, "_announce", self._announce):
            self.publishing = Publishing(config, nobody, run_dir, world, self.policy)
        publisher: Any = self.publishing._publisher
        self._submit, publisher.submit = publisher.submit, self._keep

    def close(self) -> None:
        self.publishing.drain()
        if self.place is not None:  # in /dev/shm, perhaps
            shutil.rmtree(self.place, ignore_errors=True)

    def _keep(self, snapshot: Snapshot) -> None:
        self.snapshots = [snapshot]
        self._submit(snapshot)

    def _announce(self, ref: WeightsRef, snapshot_s: float, write_s: float) -> None:
        self.place = Path(ref.path).parent
        self.announced.put((ref, write_s))


# -- the trainer's wait --------------------------------------------------------------------------------


def _publish(config: RunConfig, world: World, context: Context) -> Iterator[Finding]:
    own = _Published(config, world, context.work / "stall")
    stalls, hosts, rates, beside = list[float](), list[float](), list[float](), list[float]()
    for step in range(1, 2 + REPEATS):
        waited, host = _timed_publish(own, 2 * step - 1, context)
        stalls.append(waited)
        hosts.append(host)
        if step > 1:  # while the one before is being written
            beside.append(_timed_publish(own, 2 * step, context)[0])
        while True:
            ref, write_s = own.announced.get(timeout=LONG)
            rates.append(own.snapshots[0].total_bytes / write_s)
            if ref.version.step == own.snapshots[0].version.step:
                break
    size = own.snapshots[0].total_bytes
    plain = _plain_copy(size, context)
    copies, busy = median(stalls[1:]) / plain, median(beside) / plain
    yield Finding(
        "stall",
        f"{median(stalls[1:]) * 1000:.3g} ms until the device is free again (the process waits "
        f"{median(hosts[1:]) * 1000:.3g} ms); one copy takes {plain * 1000:.3g} ms: {copies:.2f} copies; "
        f"{busy:.2f} while a version is being written",
        f"{COPIES} copies",
        context.judged(copies <= COPIES),
        f"a version of {size / GB:.3g} GB, medians of {REPEATS}; the copy is of as many bytes in one tensor, "
        "to pinned memory on a GPU; the snapshot also converts float32 to bfloat16",
    )
    yield Finding(
        "written",
        f"{median(rates) / GB:.2g} GB/s, checksums included (median of {len(rates)}), to {own.place}",
    )
    own.close()


def _timed_publish(own: _Published, step: int, context: Context) -> tuple[float, float]:
    """Seconds until the device is idle again, and until the call returns."""
    synchronize(context)
    began = time.perf_counter()
    own.publishing.publish(PolicyVersion(1, step))
    returned = time.perf_counter()
    synchronize(context)
    return time.perf_counter() - began, returned - began


def _plain_copy(size: int, context: Context) -> float:
    there = torch.empty(size, dtype=torch.uint8, device=context.device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not context.small)
    return timed(lambda: host.copy_(there, non_blocking=True), context, repeats=REPEATS).seconds


# -- other processes -----------------------------------------------------------------------------------


def _deliver(config: RunConfig, world: World, engine: Connection, context: Context) -> Iterator[Finding]:
    """A version with other weights than the files have."""
    try:
        own = _Published(config, world, context.work / "delivered")
        with torch.no_grad():
            for parameter in own.policy.parameters():
                parameter.mul_(1 + 1 / 64)
        own.publishing.publish(PolicyVersion(1, 1))
        ref, _ = own.announced.get(timeout=LONG)
    except Exception as error:
        yield failure("delivered", error)
        return
    yield from attempt("engine", lambda: _read_by_engine(own, ref, engine, context), context)
    own.close()


def _read_by_engine(own: _Published, ref: WeightsRef, engine: Connection, context: Context) -> Finding:
    probe = own.publishing.probe()
    engine.send((ref, probe.ids))
    before, after, seconds = _hear(engine)
    gap, moved = (max(abs(a - b) for a, b in zip(probe.logprobs, of, strict=True)) for of in (after, before))
    return Finding(
        "engine",
        f"log-probs differ from the trainer's by {gap:.1e} nats, by {moved:.1e} before it had the version; "
        f"read in {seconds:.2g} s ({own.snapshots[0].total_bytes / seconds / GB:.2g} GB/s)",
        f"{CLOSE:.0e} in float32",
        gap <= CLOSE < moved,
        f"the embedded engine in a process of its own; the trainer's own noise is {probe.noise:.1e}",
    )


def _engine(connection: Connection, path: str, kind: str) -> None:
    """The embedded engine, as a worker has it."""
    from asyncrl.engines.torch.engine import build

    async def serve() -> None:
        engine = build(path, "float32", slots=2, max_len=128, device=kind)
        ref, ids = await asyncio.to_thread(connection.recv)
        before = await engine.score(ids)
        began = time.perf_counter()
        await engine.load(ref)
        seconds = time.perf_counter() - began
        connection.send((before, await engine.score(ids), seconds))
        await engine.close()

    asyncio.run(serve())


@contextmanager
def _child(target: Any, *given: object) -> Iterator[Connection]:
    """A process that begins at once, for its imports take long, and is ended."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_in_child, args=(target, there, given), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _in_child(target: Any, connection: Connection, given: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    try:
        target(connection, *given)
    except Exception as error:
        connection.send(error)


def _hear(connection: Connection) -> Any:
    if not connection.poll(LONG):
        raise TimeoutError("the other process said nothing")
    found = connection.recv()
    if isinstance(found, Exception):
        raise found
    return found
