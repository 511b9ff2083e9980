"""Does a real SGLang server compute the trainer's log-probs after each kind of update, and do streams
survive the release of its memory?

One server with a small random model, started and loaded by the product's own classes. SGLang may be in an
environment of its own: ASYNCRL_SGLANG_PYTHON="PYTHON [LAUNCHER]", on a CPU with
tools/sglang_cpu/launch.py."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from asyncrl.config import ModelConfig, parse
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.process import ServerProcess, base_gpu
from asyncrl.engines.sglang.server import attach, loader
from asyncrl.keeper.keeper import first
from asyncrl.trainer.model import load_policy, score
from asyncrl.trainer.world import join, leave
from asyncrl.types import PolicyVersion
from asyncrl.weights.collective import Sender
from asyncrl.weights.delta import VersionWriter
from parts.common import Context, Finding, exact_float32, failure
from tests.fakes.training import stored
from tests.fakes.weights import snapshot_of

SECONDS = 120
SMALL_SECONDS = 180.0
GOAL = "1e-4; streams stay open"
OPTIONAL = True

PYTHON = "ASYNCRL_SGLANG_PYTHON"
NOT_THERE = f"not run: no package sglang here, and no {PYTHON}"
CLOSEST, NOISES = 1e-4, 2.0  # nats; in bfloat16, times what its rounding makes of the trainer's own log-probs
STREAMS, TOKENS, BEFORE_PAUSE = 4, 200, 40  # of each stream; in all of them, when they are paused
LEAST_S = 45.0  # that a second server must have
# SGLang's kernels for GPUs need not know float32: then its own choice in bfloat16 is looked at.
ATTEMPTS = {"float32": {"attention-backend": "torch_native"}, "bfloat16": {}}


def run(context: Context) -> Iterator[Finding]:
    if (command := server_command()) is None:
        yield Finding("server", NOT_THERE)
        return
    with asyncio.Runner() as runner:
        findings = examine(context, command)
        while True:  # each finding as soon as it is known
            try:
                yield runner.run(anext(findings))
            except StopAsyncIteration:
                return


def server_command() -> list[str] | None:
    """[]: asyncrl's own, with this Python."""
    if not (given := shlex.split(os.environ.get(PYTHON, ""))):
        return None if importlib.util.find_spec("sglang") is None else []
    # Another environment: what is installed for this one is not for it.
    return ["env", "-u", "PYTHONPATH", *given, *(["-m", "sglang.launch_server"] if len(given) == 1 else [])]


def has_saver(context: Context, command: list[str]) -> bool:
    """Whether the server can give memory back."""
    python = command[:4] if command else [sys.executable]
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_memory_saver') is None)"
    return not context.small and subprocess.run([*python, "-c", find]).returncode == 0


async def examine(context: Context, command: list[str]) -> AsyncIterator[Finding]:
    """Start, probe, update, release and resume; an error in one of them is a finding."""
    world = join(0, 1, device=context.device.type)
    for dtype in ATTEMPTS:
        subject = Subject(context, world, dtype, command)
        try:
            yield await subject.start()
            yield await subject.probe("probe, as started")
            works = {
                "disk": subject.by_disk(),
                "release, resume": subject.released(),
                "collective": subject.by_broadcast(),
            }
            for name, work in works.items():
                try:
                    async for finding in work:
                        yield finding
                except Exception as error:
                    yield failure(name, error)
            break
        except Exception as error:
            last = dtype == "bfloat16" or context.small or context.left() < LEAST_S
            yield replace(failure(f"start, {dtype}", error), ok=False if last else None)
            if last:
                break
        finally:
            await subject.close()
    leave()


class Subject:
    """The trainer's policy and a server that is to follow it."""

    def __init__(self, context: Context, world: Any, dtype: str, command: list[str]) -> None:
        self.context, self.world, self.step = context, world, 0
        self.process: Any = None
        self.loader: Any = None
        self.saver = has_saver(context, command)
        torch.manual_seed(0)
        self.ids = tuple(torch.randint(10, 300, (64,)).tolist())
        path = str(context.random_model("qwen3-0.6b", dtype=dtype, num_hidden_layers=4))
        self.config = configuration(context, path, command, dtype, self.saver)
        self.policy = load_policy(ModelConfig(path=path, dtype=dtype), self.world)
        self.limit = CLOSEST
        if dtype != "float32":
            exact = load_policy(ModelConfig(path=path, dtype="float32"), self.world)
            self.limit += NOISES * gap(self.score(self.policy), self.score(exact))

    def score(self, policy: Any) -> tuple[float, ...]:
        with torch.no_grad(), exact_float32():
            return score(policy, self.ids, self.world.device)

    async def start(self) -> Finding:
        """Until the server is ready, as its keeper waits for it."""
        began = time.monotonic()
        process = self.process = await ServerProcess.start(self.config, 0, "127.0.0.1", self.context.work)

        async def ended() -> Any:
            raise RuntimeError(f"the server ended with {await process.ended()}; its output is in parts.log")

        server = await first(attach(self.config, process.url, patient=True), ended())
        self.loader = loader(self.config, 0, server)
        process.ready()
        what = f"{server.description}, {self.config.model.dtype}"
        return Finding("start", f"{what}: ready after {time.monotonic() - began:.0f} s")

    async def close(self) -> None:
        if self.loader is not None:
            await self.loader.close()
        if self.process is not None:
            await self.process.stop()

    async def probe(self, what: str, seconds: float = 0.0) -> Finding:
        """The largest difference of a log-prob between server and trainer."""
        found = gap(await self.loader.score(self.ids), self.score(self.policy))
        took = f"; {seconds:.2f} s" if seconds else ""
        return Finding(what, f"{found:.2g} nats{took}", f"{self.limit:.2g}", found <= self.limit)

    def next_version(self) -> Any:
        """A quite different one: its snapshot, as a trainer publishes it."""
        self.step += 1
        torch.manual_seed(self.step)
        with torch.no_grad():
            for parameter in self.policy.lm.parameters():
                own: Any = cast(DTensor, parameter).to_local()
                own += 0.05 * own.std(correction=0) * torch.randn_like(own)
        return snapshot_of(stored(self.policy), PolicyVersion(1, self.step))

    def published(self) -> Any:
        return VersionWriter(self.context.work / "published", 256 << 20).write(self.next_version())

    async def by_disk(self) -> AsyncIterator[Finding]:
        yield await self.loaded(self.published(), "update by disk")

    async def by_broadcast(self) -> AsyncIterator[Finding]:
        gloo = torch.cuda.device_count() < 2  # NCCL refuses two ranks on one GPU
        device = torch.device("cpu") if gloo else self.context.device
        with closing(Sender("127.0.0.1", 256 << 20, 30.0, device)) as sender:
            name = f"update by collective ({'gloo' if gloo else 'nccl'})"
            yield await self.loaded(sender.offer(self.next_version()), name)

    async def loaded(self, ref: Any, name: str) -> Finding:
        began = time.perf_counter()
        await self.loader.load(ref)
        return await self.probe(name, time.perf_counter() - began)

    async def released(self) -> AsyncIterator[Finding]:
        """Streams are paused, all memory is released and comes back with the same weights, and they go on."""
        ref, api = self.published(), self.loader.api
        await self.loader.load(ref)
        client = SGLangClient(api, self.config, self.policy.lm.config.vocab_size)
        client.mark(ref.version)

        requests = [Request(str(k), self.ids[k : k + 32], Sampling(TOKENS, (), 0.0)) for k in range(STREAMS)]

        def streams() -> list[asyncio.Task[Any]]:
            return [asyncio.create_task(client.generate(request)) for request in requests]

        expected = await asyncio.gather(*streams())
        before, tasks = client.use.tokens, streams()
        while client.use.tokens < before + BEFORE_PAUSE and not any(map(asyncio.Task.done, tasks)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await api.pause("retract")
        await asyncio.sleep(0.3)  # for what is on its way
        at, free = client.use.tokens - before, self.free()
        await api._command("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, 30.0)
        await asyncio.sleep(0.3)
        freed, still = (self.free() - free) / 2**30, client.use.tokens - before
        opened = sum(not task.done() for task in tasks)
        await api._command("/resume_memory_occupation", {"tags": ["weights"]}, 30.0)
        await api.update_from_disk(str(ref.path), ref.label)
        await api._command("/resume_memory_occupation", {"tags": ["kv_cache"]}, 30.0)
        await api.resume()
        value = f"{opened} of {STREAMS} streams open; {at} tokens before, {still} afterwards"
        yield Finding("released after pause(retract)", value, "all open", opened == STREAMS and at == still)
        why = "" if self.saver else "a CPU's server frees nothing, nor one without torch_memory_saver"
        yield Finding("memory freed", f"{freed:.2f} GiB", note=why, ok=freed > 0 if self.saver else None)
        found = await asyncio.gather(*tasks)
        same = sum(a.ids == b.ids for a, b in zip(found, expected, strict=True))
        exact = same == STREAMS if self.limit == CLOSEST else None  # of bfloat16 rounding may decide
        yield Finding("streams go on token-exact", f"{same} of {STREAMS}, {TOKENS} tokens each", "all", exact)
        yield await self.probe("probe, after it")
        await client.close()

    def free(self) -> int:
        """Bytes of the server's GPU."""
        count = torch.cuda.device_count()
        return torch.cuda.mem_get_info(base_gpu(self.config, 0, count))[0] if count else 0


def gap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def configuration(context: Context, path: str, command: list[str], dtype: str, saver: bool) -> Any:
    arguments: dict[str, Any] = {"max-total-tokens": 8192, "context-length": 2048, **ATTEMPTS[dtype]}
    if not context.small:  # the trainer's policy is on the same GPU
        arguments |= {"disable-cuda-graph": True, "sampling-backend": "pytorch"}
        arguments |= {"mem-fraction-static": 0.3, "enable-memory-saver": saver}
    engine = {"name": "sglang", "server_command": command, "server_args": arguments}
    run = {"name": "sglang", "run_dir": str(context.work), "data": {"train": "none"}, "engine": engine}
    run |= {"model": {"path": path, "dtype": dtype}, "weights": {"mode": "retract", "deadline": 30.0}}
    return parse(run | {"rollout": {"max_tokens": 1024, "max_new_tokens": 512}})
