"""Do an engine and a trainer take turns on one GPU (`engine.colocated`)? What each holds is given up, and
both go on as if it had not been.

In one process, in float32: a rank rests after a step, an engine falls asleep in the midst of turns, the rank
wakes, publishes and rests, and the engine wakes with its version. Then the demo by shifts. Last, where there
is one (see the part `sglang`), an SGLang server with torch_memory_saver: its keeper has it sleep and wake
several times in the midst of streams. Memory is torch's, and what the driver counts as used (as nvidia-smi
does); on a CPU it is resident memory."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash
from torch.utils._pytree import tree_leaves

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.server import Attached
from asyncrl.engines.torch.engine import build
from asyncrl.keeper.versions import ServerVersions
from asyncrl.observe.timeline import Timeline, files, union
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import score, shards
from asyncrl.trainer.resting import Resting
from asyncrl.trainer.world import World
from asyncrl.types import Generation, PolicyVersion
from asyncrl.weights.manifest import Probe
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Sleep
from asyncrl.wire.sockets import Endpoints
from parts.common import Context, Finding, exact_float32, failure, release, synchronize
from parts.runs import mean_of, step_rows, summary
from parts.servers import (
    ATTACHMENT,
    BUNDLE,
    CLOSEST,
    LEAST_S,
    NOISES,
    NOT_THERE,
    STREAMS,
    TOKENS,
    Subject,
    each,
    gap,
    has_saver,
    server_command,
)
from parts.training import config_of, mixed_rows, model_of, one_rank
from tests.fakes.weights import publish

SECONDS = 360
SMALL_SECONDS = 360
GOAL = "memory is freed; weights exact, log-probs within 1e-4; the demo's sides never compute at once"

FREED, FLOAT32, DEMO = 0.95, 1e-4, 1e-3
CLOCKS = 0.02  # seconds by which the stamps of two processes differ
SESSIONS, MB, SHIFTS = 16, 1e6, 3
NO_GRAPHS = f"by CUDA graphs; on a CPU, and with {BUNDLE}, there are none"
SHOWN = ("steps", "seconds", "tokens_per_s", "trajectories_multi_version", "success_before", "success_after")


def run(context: Context) -> Iterator[Finding]:
    try:
        with one_rank(context) as world, exact_float32():
            yield from asyncio.run(take_turns(context, world))
    except Exception as error:
        yield failure("engine and rank", error)
    release(context)
    yield from demo(context)
    yield from server(context)


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
    found = summary(run_dir)
    trained, decoded = spans(run_dir, "trainer", "train", "step"), spans(run_dir, "rollout", "decode")
    both = sum(max(0.0, min(b, d) - max(a, c) - CLOCKS) for a, b in trained for c, d in decoded)
    yield Finding("both sides at once", f"{both:.2f} s", "0", both == 0 < len(trained) * len(decoded))
    yield Finding("conserved", str(found["flow"]), "✓", found["conserved"])
    gap = found["logprob_diff_max_same_version"]
    yield Finding("log-probs, trainer against engine", f"{gap:.1e}", f"{DEMO:g}", gap <= DEMO)
    told = ", ".join(f"{key} {found[key]:.3g}" for key in SHOWN)
    for key in ("shift/sleep_s", "shift/wake_s"):
        told += f", {key} {mean_of(step_rows(run_dir), key):.2f}"
    yield Finding("run", told)


def spans(run_dir: Path, role: str, *names: str) -> Sequence[tuple[float, float]]:
    lines = (line for file in files(run_dir) if file.role == role for line in file.added())
    return union((line.start, line.end) for line in lines if line.name in names)


# -- an SGLang server --------------------------------------------------------------------------------------


def server(context: Context) -> Iterator[Finding]:
    if (command := server_command(context)) is None:
        yield Finding("server", NOT_THERE)
    elif not has_saver(context, command):
        yield Finding("server", "not run: its environment has no torch_memory_saver (pip install it there)")
    elif context.left() < LEAST_S:
        yield Finding("server", "not run: no time left")
    else:
        with one_rank(context) as world:
            subject = Shifting(context, world, "float32" if context.small else "bfloat16", command)
            try:
                yield from each(subject.examined({"shifts of the server": subject.shifts}))
            except Exception as error:
                yield failure("server", error)


class Shifting(Subject):
    """A server that its keeper's `ServerVersions` loads and puts to sleep, as the coordinator says."""

    def __init__(self, context: Context, world: World, dtype: str, command: list[str]) -> None:
        super().__init__(context, world, dtype, command, shifts=True)
        self.empty = self.used()

    async def hold(self, server: Attached) -> Any:
        """It falls asleep at once; what its weights and KV cache take is known from its sizes."""
        sizes = self.policy.lm.config
        size = 2 if self.config.model.dtype == "bfloat16" else 4
        cache = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
        held = cache * (server.info.max_total_num_tokens or 0) + sum(
            map(torch.numel, self.policy.parameters())
        )
        self.held = size * held / MB
        self.versions = ServerVersions(
            self.config, Endpoints("", ""), 0, Timeline(self.context.work / "keeper")
        )
        await self.versions.begin(server, ATTACHMENT)
        return self.versions._server

    async def probe(self, what: str, seconds: float = 0.0) -> Finding:
        """In place of the one that it is asked as it was started: it sleeps."""
        return Finding(
            "server, asleep from its start", str(self.versions.asleep), "True", self.versions.asleep
        )

    def used(self) -> float:
        """In MB; on a CPU by all processes below this one."""
        if not self.context.small:
            free, total = torch.cuda.mem_get_info()
            return (total - free) / MB
        return sum(one.memory_info().rss for one in psutil.Process().children(recursive=True)) / MB

    async def told(self, message: Sleep | LoadWeights) -> float:
        """Seconds until its keeper has done it. RuntimeError if it could not."""
        began = time.perf_counter()
        self.versions.take(message)
        if (answer := await self.versions.next()).error:
            raise RuntimeError(answer.error)
        if isinstance(answer, Loaded):
            self.gaps.append(answer.probe_gap)
        return time.perf_counter() - began

    async def decoded(self, client: SGLangClient) -> Generation:
        """One greedy turn of a server whose cache is empty: by the CUDA graphs, where it has some."""
        asked = Request("decoded", self.ids[::-1][:20], Sampling(64, (), 0.0))
        return await client.generate(asked)

    async def shifts(self) -> AsyncIterator[Finding]:
        self.gaps, asleep, awake, freed, left = list[float](), list[float](), list[float](), [], []
        ref, silent, opened, exact, gaps = self.published(), 0, 0, 0, list[float]()
        own = self.score(self.policy)
        noise = 0.0 if self.exact is None else gap(own, self.score(self.exact))
        load = LoadWeights(ref, "train", Probe(self.ids, own, noise))
        await self.told(load)
        client = self.client(ref)
        first = await self.decoded(client)
        expected = await asyncio.gather(*self.streams(client))
        for number in range(SHIFTS):
            tasks, before = await self.begun(client), self.used()
            client.sleeps(True)
            asleep.append(await self.told(Sleep(number)))
            await asyncio.sleep(0.3)  # for what is on its way
            tokens = client.use.tokens
            left.append(self.used())
            freed.append(before - left[-1])
            await asyncio.sleep(0.3)
            opened += sum(not task.done() for task in tasks)
            silent += client.use.tokens == tokens
            awake.append(await self.told(load))
            client.sleeps(False)
            made = await asyncio.gather(*tasks)
            exact += sum(a.ids == b.ids for a, b in zip(made, expected, strict=True))
            again = await self.decoded(client)
            gaps.append(gap(again.logprobs, first.logprobs) if again.ids == first.ids else math.inf)
        told = f"{min(freed):.0f} of {self.held:.0f} MB of weights and KV cache"
        told += f"; {max(left) - self.empty:.0f} MB stay"
        ok = self.context.judged(min(freed) >= FREED * self.held)
        yield Finding("server asleep, at least", told, f"{FREED:.0%} freed", ok)
        count, ok = SHIFTS * STREAMS, opened == SHIFTS * STREAMS and silent == SHIFTS
        yield Finding("its streams", f"{opened} of {count} open; silent in {silent} of {SHIFTS}", "all", ok)
        same = exact == count if self.exact is None else None  # of bfloat16 rounding may decide
        yield Finding("its streams, token-exact", f"{exact} of {count}, {TOKENS} tokens each", "all", same)
        told, ok = f"{max(gaps):.1e} nats, {len(first.ids)} tokens", max(gaps) <= FLOAT32
        yield Finding("decoding after waking, as before", told, f"{FLOAT32:g}", ok, NO_GRAPHS)
        limit = CLOSEST + NOISES * noise
        told, ok = f"{max(self.gaps):.2g} nats", max(self.gaps) <= limit
        yield Finding("its log-probs after waking, and the trainer's", told, f"{limit:.2g}", ok)
        for name, seconds in (("server, sleep", asleep), ("server, wake", awake)):
            yield Finding(f"{name}, s", ", ".join(f"{one:.2f}" for one in seconds))
