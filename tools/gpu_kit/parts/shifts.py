"""Do an engine and a trainer take turns on one GPU (`engine.colocated`)? What each holds is given up, and
both go on as if it had not been.

In one process, in float32: a rank rests after a step, an engine falls asleep in the midst of turns, the rank
wakes, publishes and rests, and the engine wakes with its version. Then the demo by shifts. Memory is torch's,
and what the driver counts as used (as nvidia-smi does); on a CPU it is resident memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import psutil
import torch
import xxhash
from torch.utils._pytree import tree_leaves

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import build
from asyncrl.observe.timeline import Timeline, files, union
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import score, shards
from asyncrl.trainer.resting import Resting
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from parts.common import Context, Finding, exact_float32, failure, release, synchronize
from parts.training import config_of, mixed_rows, model_of, one_rank
from tests.fakes.weights import publish

SECONDS = 240
SMALL_SECONDS = 240
GOAL = "memory is freed; weights exact, log-probs within 1e-4; the demo's sides never compute at once"

FREED, FLOAT32, DEMO = 0.95, 1e-4, 1e-3
CLOCKS = 0.02  # seconds by which the stamps of two processes differ
SESSIONS, MB = 16, 1e6
SHOWN = ("steps", "seconds", "tokens_per_s", "trajectories_multi_version", "success_before", "success_after")


def run(context: Context) -> Iterator[Finding]:
    try:
        with one_rank(context) as world, exact_float32():
            yield from asyncio.run(take_turns(context, world))
    except Exception as error:
        yield failure("engine and rank", error)
    release(context)
    yield from demo(context)


async def take_turns(context: Context, world: World) -> list[Finding]:
    rows, length = (4, 64) if context.small else (8, 1024)
    path, took = model_of(context, "qwen3-0.6b"), list[str]()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        synchronize(context)
        took.append(f"{name} {time.perf_counter() - began:.2f}")

    def alone(name: str) -> None:
        """In place of a meeting of ranks."""

    empty = used(context)
    learner = Learner(config_of(path, context.kind, "float32", rows, length), world)
    learner.accumulate(mixed_rows(learner, rows, length))
    learner.finish()
    resting, before = Resting(learner, Timeline(context.work / "timeline"), context.work), digest(learner)
    full = used(context)
    with timed("the first rest, which pins memory"):
        resting.rest(alone)
    found, empty = [freed("rank at rest", empty, full, context)], used(context)
    engine = build(str(path), "float32", SESSIONS + 1, length, device=str(context.device))
    asked = [Request(f"{n}", tuple(range(n, n + 20)), Sampling(length // 2, ()), n) for n in range(SESSIONS)]
    turns = [asyncio.create_task(engine.generate(request)) for request in asked]
    await asyncio.sleep(0)
    await engine.generate(Request("gate", (1, 2), Sampling(8, ())))  # by then all are under way
    full = used(context)
    with timed("sleep"):
        await engine.sleep()
    found.append(freed("engine asleep", empty, full, context))
    with timed("wake of the rank"):
        resting.wake()
    same = digest(learner) == before
    found.append(Finding("weights and moments of the rank", str(same), "as before", same))
    tensors = {name: shard.to_local().to("cpu", copy=True) for name, shard in shards(learner.policy).items()}
    ref = publish(tensors, context.work / "published", PolicyVersion(0, 1))
    with timed("rest"):
        resting.rest(alone)
    with timed("load"):
        await engine.load(ref)
    made = await asyncio.gather(*turns)
    await engine.close()
    resting.wake()
    gaps = list[float]()
    for request, turn in zip(asked, made, strict=True):
        own = score(learner.policy, request.ids + turn.ids, context.device)[-len(turn.ids) :]
        new = slice(turn.spans[-1].start, None)
        gaps += [abs(a - b) for a, b in zip(own[new], turn.logprobs[new], strict=True)]
    versions = {tuple((span.version, span.kv_version) for span in turn.spans) for turn in made}
    wanted = {((0, 0), (1, 1))}
    found.append(Finding("versions within turns", str(versions), str(wanted), versions == wanted))
    told, ok = f"at most {max(gaps):.1e}, of {len(gaps)} tokens", max(gaps) <= FLOAT32
    found.append(Finding("log-probs after waking, engine and rank", told, f"{FLOAT32:g}", ok))
    return [*found, Finding("seconds", ", ".join(took))]


def used(context: Context) -> dict[str, float]:
    """In MB."""
    synchronize(context)
    if context.small:
        return {"resident": psutil.Process().memory_info().rss / MB}
    free, total = torch.cuda.mem_get_info()
    own = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return {name: size / MB for name, size in (own | {"used": total - free}).items()}


def freed(name: str, empty: dict[str, float], full: dict[str, float], context: Context) -> Finding:
    """Of what was taken between the first two, what is free by now."""
    now = used(context)
    told = [f"{kind} {full[kind] - empty[kind]:.0f} → {now[kind] - empty[kind]:.0f} MB" for kind in now]
    ok = all(full[kind] - now[kind] >= FREED * (full[kind] - empty[kind]) for kind in now)
    return Finding(name, ", ".join(told), f"{FREED:.0%} freed", context.judged(ok))


def digest(learner: Learner) -> list[str]:
    tensors = [*learner.policy.parameters(), *tree_leaves([*learner.optimizer.state.values()])]
    own = [getattr(one, "_local_tensor", one).detach() for one in tensors if isinstance(one, torch.Tensor)]
    return [xxhash.xxh3_64_hexdigest(one.to("cpu", copy=True).numpy()) for one in own]


def demo(context: Context) -> Iterator[Finding]:
    data, steps = context.kit / "examples/multiturn/calculator/data", 8 if context.small else 40
    line = [sys.executable, "-m", "asyncrl.cli", "train", "experiment=calculator", "name=demo"]
    line += [f"data.{split}={data / split}.jsonl" for split in ("train", "test")]
    line += ["engine.colocated=1", f"model.device={context.kind}", f"total_steps={steps}"]
    code = subprocess.run(line, cwd=context.work, timeout=max(1.0, context.left() - 5)).returncode
    yield Finding("the demo, exit code", str(code), "0", code == 0)
    if not code:
        yield from shown(context.work / "runs" / "demo")


def shown(run_dir: Path) -> Iterator[Finding]:
    found = json.loads((run_dir / "summary.json").read_text())
    trained, decoded = spans(run_dir, "trainer", "train", "step"), spans(run_dir, "rollout", "decode")
    both = sum(max(0.0, min(b, d) - max(a, c) - CLOCKS) for a, b in trained for c, d in decoded)
    yield Finding("both sides at once", f"{both:.2f} s", "0", both == 0 < len(trained) * len(decoded))
    yield Finding("conserved", str(found["flow"]), "✓", found["conserved"])
    gap = found["logprob_diff_max_same_version"]
    yield Finding("log-probs, trainer against engine", f"{gap:.1e}", f"{DEMO:g}", gap <= DEMO)
    told = ", ".join(f"{key} {found[key]:.3g}" for key in SHOWN)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for key in ("shift/sleep_s", "shift/wake_s"):
        told += f", {key} {mean(row[key] for row in rows if 'timing_s/step' in row):.2f}"
    yield Finding("run", told)


def spans(run_dir: Path, role: str, *names: str) -> Sequence[tuple[float, float]]:
    lines = (line for file in files(run_dir) if file.role == role for line in file.added())
    return union((line.start, line.end) for line in lines if line.name in names)
