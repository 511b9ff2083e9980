"""LoRA adapters on a real server against merged weights: what a push takes and holds up, how far the server
is from the trainer, what episodes of many turns cost, and what 200 versions leave.

    python tools/bench/adapters.py push  [--model DIR] [--rank 16] [--dtype float32]
    python tools/bench/adapters.py rates [--model DIR] [--dtype float32] [--streams 8] [--rounds 2]
    python tools/bench/adapters.py turns [--model DIR] [--episodes 32] [--turns 8] [--every 2.0]
    python tools/bench/adapters.py many  [--model DIR] [--versions 200]

Each starts a server on this machine's CPU (tools/sglang_cpu), or one after another. Versions have random
adapters. "push": from files that are written to the version being confirmed by the server. "gap": the
difference of log-probs from transformers with the adapters apart, as the trainer computes. "rates": turns of
64 tokens under way all the time, and windows of time with pushes between those without; a ratio is of one
window to the mean of both beside it, which other work on the machine disturbs about as much; a server of
adapters and one of merged weights take turns, a round each. "turns": `newest`
takes the newest version at each turn, `keep` goes on with its own until that is outdated; `in place` are
merged weights. Lag is of tokens, in versions, when their turn ends. "many": memory of all processes of the
server (PSS).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import ROOT, SINGLE_THREAD, table
from transformers import AutoModelForCausalLM

from asyncrl.config import RunConfig
from asyncrl.engines.base import EngineLost, Request, Sampling
from asyncrl.engines.sglang.adapters import AdapterLoader, is_outdated
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.loader import ServerLoader
from asyncrl.types import NO_VERSION, PolicyVersion
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.disk import payload_path, prune
from asyncrl.weights.manifest import WeightsRef
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.fakes.weights import BUCKET_BYTES, snapshot_of

SMOLLM = ROOT / ".models/smollm2-135m-instruct"
DEMO = ROOT / "examples/multiturn/calculator/model"
MB = 1 << 20
TOKENS = 1024
SIZE = 0.002  # standard deviation of B: a weight changes by about its rounding in bfloat16
# tokens of an episode: before the first turn, of a tool, of a turn
PROMPT = 64
REPLY = 16
ANSWER = 32
EVERY = (2.0, 10.0)  # seconds between pushes
MARGIN = 200  # ids at the beginning of the vocabulary that are not used: control tokens


class Versions:
    """Versions of random adapters, published alone or merged into the model's weights."""

    def __init__(self, model: Path, rank: int, dtype: str, directory: Path) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.vocabulary = int(self.lm.config.vocab_size)
        self.adapters = Adapters(self.lm, {"": (rank, 2.0 * rank)})
        self._apart = VersionWriter(directory / "apart", BUCKET_BYTES, adapters=self.adapters.specs)
        self._merged = VersionWriter(directory / "merged", BUCKET_BYTES)

    @torch.no_grad()
    def publish(self, step: int, apart: bool, keep: int = 3) -> WeightsRef:
        torch.manual_seed(step)
        parameters = dict(self.lm.named_parameters())
        for piece in self.adapters.published:
            parameter = parameters[piece.parameter]
            parameter.normal_(std=SIZE if piece.name.endswith("B.weight") else parameter.shape[1] ** -0.5)

        tensors = {piece.name: parameters[piece.parameter] for piece in self.adapters.published}
        if not apart:
            adapted = {piece.parameter for piece in self.adapters.published}
            tensors = {name: parameters[name] for name in parameters.keys() - adapted}
            for name in tensors:
                if names := self.adapters.adapter_names(name):
                    change = self.adapters.weight_change(
                        name, *(parameters[parameter_name] for parameter_name in names)
                    )
                    tensors[name] = tensors[name] + change

        writer = self._apart if apart else self._merged
        ref = writer.write_version(snapshot_of(tensors, PolicyVersion(1, step)))
        prune(writer.directory, keep)

        return ref

    @torch.no_grad()
    def logprobs(self, ids: tuple[int, ...]) -> list[float]:
        row = torch.tensor([ids])
        scores = self.lm(row).logits[0, :-1].float().log_softmax(-1)
        row_logprobs: list[float] = scores.gather(1, row[0, 1:, None])[:, 0].tolist()
        return row_logprobs


@dataclass
class Bench:
    """Starts a server with adapters, or with merged weights, and measures what versions cost."""

    server: SGLangServer
    versions: Versions
    loader: AdapterLoader | ServerLoader
    apart: bool
    config: RunConfig
    client: SGLangClient
    newest: PolicyVersion = NO_VERSION
    clients: list[SGLangClient] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def started(
        cls, versions: Versions, model: Path, rank: int, dtype: str, apart: bool, directory: Path
    ) -> AsyncIterator[Bench]:
        config = sglang_config(TOKENS, lora_rank=rank, model=str(model))
        modules = sorted({layer.rpartition(".")[2] for layer in versions.adapters.specs[""].layers})
        lora = ["--enable-lora", f"--max-lora-rank={rank}", "--lora-target-modules", *modules]
        lora.append(f"--max-loras-per-batch={config.adapters_held}")

        arguments = (f"--dtype={dtype}", "--max-total-tokens=32768", *(lora if apart else ()))
        server = SGLangServer(model, directory / f"server-{apart}.log", *arguments)

        api = ServerApi(server.url)
        if apart:
            loader: AdapterLoader | ServerLoader = AdapterLoader(
                api, config, directory / "cache", "bench", has_base=True
            )
        else:
            config = sglang_config(TOKENS, model=str(model))
            loader = loader_of(api, config.weights, directory / "cache")

        client = SGLangClient(ServerApi(server.url), config, versions.vocabulary, salt="bench")
        bench = cls(server, versions, loader, apart, config, client)
        try:
            yield bench
        finally:
            for client in (bench.client, *bench.clients):
                await client.close()
            await loader.close()
            server.kill()

    @property
    def seconds(self) -> float:
        """Return the processor seconds that the server has used."""
        return sum(sum(process.cpu_times()[:2]) for process in self.server.processes())

    def connect(self) -> SGLangClient:
        vocabulary = self.versions.vocabulary
        self.clients.append(SGLangClient(ServerApi(self.server.url), self.config, vocabulary, salt="bench"))
        return self.clients[-1]

    async def load(self, ref: WeightsRef) -> None:
        await self.loader.load(ref)
        self.newest = ref.version
        self.client.mark_version(ref.version)

    async def sample(self, client: SGLangClient, ids: tuple[int, ...], tokens: int, name: str) -> list[int]:
        """Sample a turn as a pool does: a request that the server ends is sent again with the tokens so
        far."""
        sampled_ids: list[int] = []
        while len(sampled_ids) < tokens:
            sampling = Sampling(tokens - len(sampled_ids), ())
            try:
                part = await client.generate(Request(name, (*ids, *sampled_ids), sampling))
            except EngineLost as lost:
                part = lost.partial
            sampled_ids += part.ids

        return sampled_ids


def prompt(versions: Versions, size: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(MARGIN, versions.vocabulary, (size,), generator=generator).tolist())


# -- push --------------------------------------------------------------------------------------------------


async def push(bench: Bench) -> list[str]:
    versions = bench.versions
    steps = iter(range(1, 10_000))
    ref = versions.publish(0, bench.apart)
    await bench.load(ref)

    ids = prompt(versions, 513, 1)
    pairs = zip(await bench.loader.score(ids), versions.logprobs(ids), strict=True)
    gaps = [abs(a - b) for a, b in pairs]
    size = os.path.getsize(payload_path(Path(ref.path)))  # noqa: ASYNC240
    writes = []
    loads = []
    used = bench.seconds

    for _ in range(5):
        start = time.perf_counter()
        ref = await asyncio.to_thread(versions.publish, next(steps), bench.apart)
        writes.append(time.perf_counter() - start)
        start = time.perf_counter()
        await bench.load(ref)
        loads.append(time.perf_counter() - start)

    return [
        "adapters" if bench.apart else "merged",
        f"{size / MB:.1f}",
        f"{statistics.median(writes):.2f}",
        f"{statistics.median(loads):.3f}",
        f"{(bench.seconds - used) / len(loads):.3f}",
        f"{statistics.mean(gaps):.1e}, {max(gaps):.1e}",
    ]


# -- rates -------------------------------------------------------------------------------------------------


async def rates(bench: Bench, streams: int, seconds: float, first: int) -> list[tuple[float, ...]]:
    """Measure windows of time one after another: seconds between the pushes of a window (0: none), tokens
    per second, and tokens per second of the server's processors. `first`: the oldest version to publish,
    newer than the versions of earlier rounds."""
    versions = bench.versions
    steps = iter(range(first + 1, first + 1000))
    windows: list[tuple[float, ...]] = []
    await bench.load(versions.publish(first, bench.apart))

    async def stream(index: int) -> None:
        for turn in range(10_000):
            ids = prompt(versions, 16, streams * turn + index)
            await bench.sample(bench.client, ids, 64, f"{index}")

    running = [asyncio.create_task(stream(index)) for index in range(streams)]
    for every in (0.0, EVERY[0], 0.0, EVERY[1], 0.0, EVERY[0], 0.0, EVERY[1], 0.0):
        pushes = round(seconds / every) if every else 0
        count = pushes if bench.apart else min(pushes, 2)  # a name of an adapter is never used again
        refs = [
            await asyncio.to_thread(versions.publish, next(steps), bench.apart, count) for _ in range(count)
        ]
        await asyncio.sleep(2.0)

        tokens = bench.client.use.tokens
        start = time.perf_counter()
        used = bench.seconds

        for at in range(pushes):
            await bench.load(refs[at % count])
            await asyncio.sleep(start + (at + 1) * every - time.perf_counter())

        await asyncio.sleep(start + (seconds if every else seconds / 2) - time.perf_counter())
        tokens = bench.client.use.tokens - tokens
        windows.append((every, tokens / (time.perf_counter() - start), tokens / (bench.seconds - used)))

    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return windows


def compared(rounds: dict[bool, list[list[tuple[float, ...]]]]) -> list[list[str]]:
    """Return the table's lines, from the windows of each round with adapters and with merged weights."""
    lines = []
    for way, rounds_of_way in zip(("adapters", "merged"), (rounds[True], rounds[False]), strict=True):
        for every in (0.0, *EVERY):
            chosen_windows = [
                (windows, at)
                for windows in rounds_of_way
                for at, window in enumerate(windows)
                if window[0] == every
            ]

            line = [way, f"{every:g}" if every else "none"]
            for kind in (1, 2):
                line.append(f"{statistics.median(windows[at][kind] for windows, at in chosen_windows):.1f}")
                beside = [
                    windows[at][kind] / statistics.mean((windows[at - 1][kind], windows[at + 1][kind]))
                    for windows, at in chosen_windows
                    if every
                ]
                line.append(spread(beside) if beside else "")

            lines.append(line)

    line = ["adapters / merged", "none"]
    for kind in (1, 2):
        means = [
            [
                statistics.mean(window[kind] for window in windows if not window[0])
                for windows in rounds[apart]
            ]
            for apart in (True, False)
        ]
        line += [
            "",
            spread([adapter_mean / merged_mean for adapter_mean, merged_mean in zip(*means, strict=True)]),
        ]

    return [*lines, line]


def spread(ratios: list[float]) -> str:
    """Median, and the least and the most."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# -- turns -------------------------------------------------------------------------------------------------


async def turns(bench: Bench, way: str, episodes: int, count: int, every: float, at: int) -> list[str]:
    """Play episodes of many turns beside pushes.

    `at`: the first step of the versions and a seed, so that the server's cache has nothing of these prompts.
    """
    versions = bench.versions
    lags = list[int]()
    await bench.load(versions.publish(at, bench.apart))

    async def episode(index: int) -> None:
        client = bench.connect()
        acked = bench.newest
        client.mark_version(acked)

        ids = prompt(versions, PROMPT, 1000 * at + index)
        for turn in range(count):
            if way != "keep" or is_outdated(acked, bench.newest, bench.config):
                acked = bench.newest
                client.mark_version(acked)
            sampled = await bench.sample(client, ids, ANSWER, f"{index}")
            lags.extend([bench.newest.step - acked.step] * len(sampled))
            ids += tuple(sampled) + prompt(versions, REPLY, turn)

    async def updates() -> None:
        for step in range(at + 1, at + 10_000):
            await asyncio.sleep(every)
            await bench.load(await asyncio.to_thread(versions.publish, step, bench.apart))

    start = time.perf_counter()
    updating = asyncio.create_task(updates())
    first = len(bench.clients)
    await asyncio.gather(*(episode(index) for index in range(episodes)))

    seconds = time.perf_counter() - start
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    uses = [client.use for client in bench.clients[first:]]
    prompts = sum(use.prompt_tokens for use in uses)
    cached = sum(use.cached_tokens for use in uses)
    return [
        way,
        f"{bench.newest.step - at}",
        f"{prompts - cached}",
        f"{cached / prompts:.2f}",
        f"{statistics.mean(lags):.2f}, {max(lags)}",
        f"{seconds:.1f}",
    ]


# -- many --------------------------------------------------------------------------------------------------


async def load_many_versions(bench: Bench, count: int) -> list[list[str]]:
    lines = []
    for step in range(count + 1):
        await bench.load(bench.versions.publish(step, bench.apart))
        await bench.sample(bench.client, prompt(bench.versions, 16, step), 8, "one")
        if step in (20, 50, 100, 150, 200, 400, count):
            used = sum(process.memory_full_info().pss for process in bench.server.processes())
            listed = len(await bench.loader.api.adapters())
            lines.append([f"{step}", f"{used / MB:.0f}", f"{listed}"])

    return lines


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("push", "rates", "turns", "many"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--versions", type=int, default=200)
    args = parser.parse_args()

    torch.set_num_threads(1)
    os.environ |= SINGLE_THREAD

    model = args.model or (SMOLLM if args.part in ("push", "rates") else DEMO)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-adapters-") as name:
        directory = Path(name)
        versions = Versions(model, args.rank, args.dtype, directory)

        def started(apart: bool) -> AbstractAsyncContextManager[Bench]:
            return Bench.started(versions, model, args.rank, args.dtype, apart, directory)

        lines = []
        if args.part == "push":
            header = ["way", "MB", "write s", "load s", "server CPU s", "gap mean, max"]
            for apart in (True, False):
                async with started(apart) as bench:
                    lines.append(await push(bench))
        elif args.part == "rates":
            header = ["way", "push every s", "tokens/s", "ratio", "tokens/CPU s", "ratio"]
            rounds: dict[bool, list[list[tuple[float, ...]]]] = {True: [], False: []}
            for at, apart in enumerate((True, False) * args.rounds):
                async with started(apart) as bench:
                    rounds[apart].append(await rates(bench, args.streams, args.seconds, 1000 * at))
                print(apart, rounds[apart][-1], file=sys.stderr, flush=True)
            lines = compared(rounds)
        elif args.part == "turns":
            header = ["way", "updates", "prompt tokens computed", "cache hits", "lag mean, max", "s"]
            counts = args.episodes, args.turns, args.every
            async with started(True) as bench:
                for at, way in enumerate(("newest", "keep", "newest", "keep")):
                    lines.append(await turns(bench, way, *counts, at=1000 * at))
            async with started(False) as bench:
                for at in range(2):
                    lines.append(await turns(bench, "in place", *counts, at=1000 * at))
        else:
            header = ["versions", "PSS MB", "adapters listed"]
            async with started(True) as bench:
                lines = await load_many_versions(bench, args.versions)

        print(table(header, lines))


if __name__ == "__main__":
    asyncio.run(main())
