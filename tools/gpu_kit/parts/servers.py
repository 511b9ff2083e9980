"""Runs a real SGLang server with a small random model, by the product's own classes, for several parts.

SGLang may be in an environment of its own: ASYNCRL_SGLANG_PYTHON="PYTHON [LAUNCHER]", on a CPU with
tools/sglang_cpu/launch.py; or in the file that `make gpu-kit-sglang` writes, in this folder or beside it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch
from msgspec import structs
from torch.distributed.tensor import DTensor

from asyncrl.config import parse
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.process import ServerProcess
from asyncrl.engines.sglang.server import Attached, attach, loader
from asyncrl.keeper.keeper import first
from asyncrl.trainer.model import adapter_shards, load_policy, score
from asyncrl.types import PolicyVersion
from asyncrl.weights.collective import Sender
from asyncrl.weights.delta import VersionWriter
from parts.common import Context, Finding, exact_float32, failure
from tests.fakes.training import stored
from tests.fakes.weights import snapshot_of

Work = Callable[[], AsyncIterator[Finding]]
PYTHON = "ASYNCRL_SGLANG_PYTHON"
BUNDLE = "sglang.tar.xz"
NOT_THERE = f"not run: no package sglang here, no {PYTHON}, and no {BUNDLE} (make gpu-kit-sglang) on a GPU"
NOT_ITS_SPEED = f"without CUDA graphs; with {BUNDLE} without SGLang's kernels, too"
CLOSEST, NOISES = 1e-4, 2.0  # nats; in bfloat16, times what its rounding makes of the trainer's own log-probs
STREAMS, TOKENS, BEGUN = 4, 200, 40  # of each stream; in all of them, when they are paused or updated
CROWD, SHORT = 64, 64  # requests at once, for speed; tokens of each
RANK, ATTACHMENT = 8, "kit"  # of adapters; with the version it names them on the server
LEAST_S = 45.0  # that a second server must have
# SGLang's kernels for GPUs need not know float32: then its own choice in bfloat16 is looked at.
ATTEMPTS = {"float32": {"attention-backend": "torch_native"}, "bfloat16": {}}


def server_command(context: Context) -> list[str] | None:
    """[]: asyncrl's own, with this Python; else its first three words run another one."""
    if given := shlex.split(os.environ.get(PYTHON, "")):
        # Packages of this Python are not for that one.
        module = ["-m", "sglang.launch_server"] if len(given) == 1 else []
        return ["env", "--unset=PYTHONPATH", *given, *module]
    places = (context.kit / BUNDLE, context.kit.parent / BUNDLE)
    bundle = next((place for place in places if place.exists()), None)
    if bundle is not None and not context.small:
        own = unpacked_bundle(bundle, context.work.parent / "sglang")
        return ["env", f"PYTHONPATH={own / 'site'}", sys.executable, str(own / "launch_gpu.py")]
    return None if importlib.util.find_spec("sglang") is None else []


def unpacked_bundle(bundle: Path, folder: Path) -> Path:
    """Unpack the bundle into the folder, once for all parts, and write its bytecode by all cores: its
    processes would compile it one file after another."""
    if folder.exists():
        return folder
    half = folder.with_name(f"{folder.name}.{os.getpid()}")
    with tarfile.open(bundle) as packed:
        packed.extractall(half, filter="data")
    half.rename(folder)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(folder / "site")])
    return folder


def visit_unpack(context: Context) -> Iterator[Finding]:
    """Unpack SGLang for the parts that come later."""
    began = time.monotonic()
    command = server_command(context)
    value = NOT_THERE if command is None else f"{time.monotonic() - began:.0f} s"
    yield Finding("SGLang unpacked", value, ok=command is not None)


def has_saver(context: Context, command: list[str]) -> bool:
    """Return whether the server can give memory back; on a CPU tools/sglang_cpu/launch.py does that."""
    python = command[:3] or [sys.executable]
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_memory_saver') is None)"
    return context.small or subprocess.run([*python, "-c", find]).returncode == 0


class Subject:
    """Holds the trainer's policy and a server that gets its weights. `rank`: of adapters; then the server
    gets only these. `shifts`: the server must be able to sleep."""

    def __init__(
        self,
        context: Context,
        world: Any,
        dtype: str,
        command: list[str],
        rank: int = 0,
        shifts: bool = False,
    ) -> None:
        self.context, self.world, self.step = context, world, 0
        self.process: Any = None
        self.loader: Any = None
        self.clients: list[SGLangClient] = []
        torch.manual_seed(0)
        self.ids = tuple(torch.randint(10, 300, (64,)).tolist())
        path = str(context.random_model("qwen3-0.6b", dtype=dtype, num_hidden_layers=4))
        self.config = configuration(context, path, command, dtype, rank, shifts)
        self.policy = load_policy(self.config.model, self.world)
        self.what = "adapters, " if rank else ""
        self.published_at = context.work / f"published-{dtype}-{rank}"
        exact = structs.replace(self.config.model, dtype="float32")
        self.exact = None if dtype == "float32" else load_policy(exact, self.world)

    async def examined(self, works: Mapping[str, Work]) -> AsyncIterator[Finding]:
        """The server as it was started, then these steps. Raises what keeps it from starting."""
        try:
            yield await self.start()
            yield await self.probe(f"{self.what}probe, as started")
            for name, work in works.items():
                try:
                    async for finding in work():
                        yield finding
                except Exception as error:
                    yield failure(name, error)
        finally:
            await self.close()

    def score(self, policy: Any) -> tuple[float, ...]:
        with torch.no_grad(), exact_float32():
            return score(policy, self.ids, self.world.device)

    async def start(self) -> Finding:
        """Until the server is ready, as its keeper waits for it."""
        began = time.monotonic()
        process = self.process = await ServerProcess.start(self.config, 0, "127.0.0.1", self.context.work)

        async def ended() -> Any:
            raise RuntimeError(f"the server ended with {await process.ended()}; its output is in parts.log")

        server = await first(attach(self.config, process.url, fresh=True), ended())
        self.loader = await self.hold(server)
        process.ready()
        what = f"{server.description}, {self.config.model.dtype}"
        return Finding("start", f"{what}: ready after {time.monotonic() - began:.0f} s")

    async def hold(self, server: Attached) -> Any:
        return loader(self.config, 0, server, ATTACHMENT)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        if self.loader is not None:
            await self.loader.close()
        if self.process is not None:
            await self.process.stop()

    async def probe(self, what: str, seconds: float = 0.0) -> Finding:
        """The largest difference of a log-prob between server and trainer."""
        own, limit = self.score(self.policy), CLOSEST
        if self.exact is not None:
            limit += NOISES * gap(own, self.score(self.exact))
        found = gap(await self.loader.score(self.ids), own)
        took = f"; {seconds:.2f} s" if seconds else ""
        return Finding(what, f"{found:.2g} nats{took}", f"{limit:.2g}", found <= limit)

    def next_version(self) -> Any:
        """A quite different one: its snapshot, as a trainer publishes it."""
        self.step += 1
        torch.manual_seed(self.step)
        adapters = self.policy.adapters
        changed = adapter_shards(self.policy).values() if adapters else self.policy.lm.parameters()
        with torch.no_grad():
            for parameter in changed:
                own: Any = cast(DTensor, parameter).to_local()
                own += 0.05 * (1.0 if adapters else own.std(correction=0)) * torch.randn_like(own)
            if self.exact is not None:
                self.exact.lm.load_state_dict(self.policy.lm.state_dict())
        tensors = adapters_of(self.policy) if adapters else stored(self.policy)
        return snapshot_of(tensors, PolicyVersion(1, self.step))

    def published(self) -> Any:
        specs = self.policy.adapters.specs if self.policy.adapters else None
        return VersionWriter(self.published_at, 256 << 20, adapters=specs).write(self.next_version())

    async def by_disk(self) -> AsyncIterator[Finding]:
        """While streams go on. Those of adapters keep the version that they name to their end."""
        ref = self.published()
        await self.loader.load(ref)
        client = self.client(ref)
        tasks = await self.begun(client)
        ref, began = self.published(), time.perf_counter()
        await self.loader.load(ref)
        confirmed = await self.loader.label()
        seconds, opened = time.perf_counter() - began, sum(not task.done() for task in tasks)
        told = f"{seconds:.2f} s, {opened} of {STREAMS} streams under way"
        yield Finding(f"{self.what}files to confirmed version", told, ref.label, confirmed == ref.label)
        yield await self.probe(f"{self.what}update by disk")
        whole = sum(len(one.ids) == TOKENS for one in await asyncio.gather(*tasks))
        yield Finding(f"{self.what}streams beside it", f"{whole} of {STREAMS}", "all", whole == STREAMS)
        await client.close()

    async def speed(self) -> AsyncIterator[Finding]:
        """Of one request and of many, whose prompts the server has seen: its own work, and the client's."""
        ref = self.published()
        await self.loader.load(ref)
        client, prompts, told = self.client(ref), torch.randint(10, 300, (CROWD, 32)).tolist(), []
        for count in (CROWD, CROWD, 1):  # the first time, kernels are compiled
            began, before = time.perf_counter(), client.use.tokens
            asked = (Request(str(ids), tuple(ids), Sampling(SHORT, ())) for ids in prompts[:count])
            await asyncio.gather(*map(client.generate, asked))
            speed = (client.use.tokens - before) / (time.perf_counter() - began)
            told.append(f"{speed:,.0f} tokens/s at {count}")
        yield Finding("speed", "; ".join(told[1:]), note=NOT_ITS_SPEED)
        await client.close()

    def client(self, ref: Any) -> SGLangClient:
        """As workers have it, told of the version."""
        vocabulary = self.policy.lm.config.vocab_size
        client = SGLangClient(self.loader.api, self.config, vocabulary, salt=ATTACHMENT)
        client.mark(ref.version)
        self.clients.append(client)
        return client

    def streams(self, client: SGLangClient) -> list[asyncio.Task[Any]]:
        """The same ones each time, greedy."""
        requests = [Request(str(k), self.ids[k : k + 32], Sampling(TOKENS, (), 0.0)) for k in range(STREAMS)]
        return [asyncio.create_task(client.generate(request)) for request in requests]

    async def begun(self, client: SGLangClient) -> list[asyncio.Task[Any]]:
        """Streams that have some tokens."""
        before, tasks = client.use.tokens, self.streams(client)
        while client.use.tokens < before + BEGUN and not any(map(asyncio.Task.done, tasks)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return tasks

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


def each(findings: AsyncIterator[Finding]) -> Iterator[Finding]:
    """Each as soon as it is known."""
    with asyncio.Runner() as runner:
        while True:
            try:
                yield runner.run(anext(findings))
            except StopAsyncIteration:
                return


def gap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def adapters_of(policy: Any) -> dict[str, torch.Tensor]:
    shards = adapter_shards(policy)
    return {piece.name: shards[piece.parameter].full_tensor() for piece in policy.adapters.published}


def configuration(
    context: Context, path: str, command: list[str], dtype: str, rank: int, shifts: bool
) -> Any:
    arguments: dict[str, Any] = {"max-total-tokens": 8192, "context-length": 2048}
    if not shifts or context.small:
        arguments |= ATTEMPTS[dtype]
    if not context.small:  # the trainer's policy is on the same GPU
        arguments |= {"disable-cuda-graph": not shifts, "sampling-backend": "pytorch"}
        arguments |= {"mem-fraction-static": 0.3}
    engine: dict[str, Any] = {"name": "sglang", "server_command": command, "server_args": arguments}
    if shifts:
        engine |= {"colocated": 1}
    run = {"name": "sglang", "run_dir": str(context.work), "data": {"train": "none"}, "engine": engine}
    run |= {"model": {"path": path, "dtype": dtype, "lora_rank": rank}}
    run |= {"weights": {"mode": "retract", "deadline": 30.0, "adapters": rank > 0}}
    return parse(run | {"rollout": {"max_tokens": 1024, "max_new_tokens": 512}})
