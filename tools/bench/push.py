"""What it takes to get a version into a real server: through files, by broadcast, and through memory that the
server opens, by size of bucket.

    python tools/bench/push.py [--hidden 640] [--layers 10] [--repeats 5] [--buckets 1 4 16 64 256]
    python tools/bench/push.py --url http://127.0.0.1:30000 --model DIR --device cuda:0   # has not been run

Starts a server on this machine's CPU with tools/sglang_cpu and a random Qwen2 (182 MB in float32 with the
defaults), and pushes versions that differ in every number, in turn. "all" is from the snapshot in the
trainer's memory to the server's answer that it has the version: for files, which are in shared memory, that
is writing, verifying and loading them. "paused" is the part of it in which the server samples nothing.
"first": the server has yet to join the group. Medians of repeats, with the range of "all".

With `--url` the server is one that you have started with the model in DIR, on this machine, and with another
GPU for broadcasts (NCCL): `python -m sglang.launch_server --model-path DIR`. `--device` is the trainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path

import torch
from common import SINGLE_THREAD, table
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.receiver import Receiver
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.collective import Sender
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import TensorSpec
from asyncrl.weights.snapshot import Snapshot, Tensors
from tests.fakes.sglang_process import SGLangServer
from tests.fakes.weights import PinnedTensors

DEADLINE = 120.0
MB = 1 << 20
ARGUMENTS = ("--max-total-tokens", "65536", "--weight-version", "e0-v0", "--skip-tokenizer-init")
Push = Callable[[Snapshot], Awaitable[None]]


class Bench:
    """A server, and snapshots of two models that take turns as ever newer versions."""

    def __init__(self, server: ServerApi, model: Path, device: torch.device, repeats: int) -> None:
        self.server = server
        self.device = device
        self.repeats = repeats
        tensors: Tensors = {}
        for file in sorted(model.glob("*.safetensors")):
            tensors |= load_file(file)
        self._models = [tensors, {name: tensor * 1.01 for name, tensor in tensors.items()}]
        self._layout = tuple(
            TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
        )

        self._version = 0
        self._paused = 0.0

    def snapshot(self) -> Snapshot:
        self._version += 1
        tensors = self._models[self._version % 2]
        pinned = PinnedTensors(self._layout, tensors)
        version = PolicyVersion(0, self._version)
        return Snapshot(version, self._layout, lambda: nullcontext(pinned))

    @property
    def megabytes(self) -> float:
        return sum(spec.nbytes for spec in self._layout) / MB

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        start = time.perf_counter()
        await self.server.pause("in_place")
        try:
            yield
        finally:
            await self.server.resume()
            self._paused = time.perf_counter() - start

    async def once(self, push: Push) -> tuple[float, float]:
        """(all, paused), in seconds."""
        snapshot = self.snapshot()
        start = time.perf_counter()
        await push(snapshot)
        seconds = time.perf_counter() - start
        assert await self.server.weight_label() == snapshot.version.label
        return seconds, self._paused

    async def line(self, name: str, push: Push) -> list[str]:
        """A line of the table."""
        return self.row(name, [await self.once(push) for _ in range(self.repeats)])

    def row(self, name: str, runs: list[tuple[float, float]]) -> list[str]:
        every, paused = zip(*runs, strict=True)
        seconds = statistics.median(every)
        return [
            name,
            f"{seconds:.2f} ({min(every):.2f} to {max(every):.2f})",
            f"{statistics.median(paused):.2f}",
            f"{self.megabytes / seconds:.0f}",
        ]

    async def through_files(self, bucket_bytes: int) -> list[list[str]]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            files = VersionWriter(Path(directory), bucket_bytes)

            async def push(snapshot: Snapshot) -> None:
                ref = await asyncio.to_thread(files.write_version, snapshot)
                await asyncio.to_thread(disk.verify_version, ref)
                async with self.paused():
                    await self.server.update_from_disk(ref.path, ref.label)
                disk.prune(Path(directory), 1)

            await self.once(push)  # warms up
            return [await self.line("files", push)]

    async def broadcast(self, bucket_bytes: int) -> list[list[str]]:
        info = await self.server.server_info()
        receiver = Receiver(self.server, 0, info.tp_size)
        with closing(Sender("127.0.0.1", bucket_bytes, DEADLINE, self.device)) as sender:

            async def push(snapshot: Snapshot) -> None:
                pushing = receiver.push(sender.offer_snapshot(snapshot), DEADLINE)
                async with pushing as ready, self.paused():
                    await ready.load_buckets()

            name = f"broadcast, {bucket_bytes // MB} MB"
            joins = self.row(f"{name}, first", [await self.once(push)])
            again = await self.line(name, push)
            await receiver.close()

        return [joins, again]


async def compare(url: str, model: Path, device: torch.device, repeats: int, buckets: list[int]) -> None:
    server = ServerApi(url)
    bench = Bench(server, model, device, repeats)
    lines = await bench.through_files(256 * MB)
    for megabytes in buckets:
        lines += await bench.broadcast(megabytes * MB)
    await server.close()
    header = ["way", "all, s", "paused, s", "MB/s"]
    print(f"{bench.megabytes:.0f} MB, median of {repeats} pushes\n\n{table(header, lines)}")


def save_model(directory: Path, hidden: int, layers: int) -> None:
    """Save a model with random weights. Servers work on ids, so the model needs no tokenizer."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )

    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="MB")
    parser.add_argument("--url")
    parser.add_argument("--model", type=Path, help="with --url")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    settings = args.device, args.repeats, args.buckets
    if args.url:
        asyncio.run(compare(args.url, args.model, *settings))
        return

    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), args.hidden, args.layers)
        os.environ |= SINGLE_THREAD
        server = SGLangServer(Path(directory), Path(directory, "server.log"), *ARGUMENTS)
        try:
            asyncio.run(compare(server.url, Path(directory), *settings))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
