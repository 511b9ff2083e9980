"""The part of an SGLang server that receives weights through a process group: real processes that make the
torch calls which SGLang 0.5.23 makes, on the thread that would otherwise sample.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _new_process_group_helper, _world, default_pg_timeout

from asyncrl.errors import EngineError
from asyncrl.weights.manifest import TensorEntry, TensorSpec, WeightsError
from asyncrl.weights.ranges import tensor_entry
from asyncrl.weights.snapshot import tensor_as_bytes
from tests.fakes.forked import FORKED


def described(name: str, tensor: Tensor) -> TensorEntry:
    spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return tensor_entry(spec, tensor_as_bytes(tensor))


class GroupRank:
    """The part of a rank that runs in its own process.

    Methods are called by name; a raised exception is the answer.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.groups: dict[str, Any] = {}
        self.weights: dict[str, Tensor] = {}
        self.label = "default"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def init_group(self, address: str, port: int, offset: int, world: int, name: str, backend: str) -> None:
        """As `init_custom_process_group` in sglang/srt/utils/common.py: with no timeout but torch's own."""
        rendezvous = dist.rendezvous(
            f"tcp://{address}:{port}", offset + self.rank, world, timeout=default_pg_timeout
        )
        store, rank, world = next(rendezvous)
        store.set_timeout(default_pg_timeout)

        group, _ = _new_process_group_helper(
            world,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=default_pg_timeout,
            device_id=None,
        )

        _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self.groups[name] = group

    def update_from_group(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], name: str, label: str | None
    ) -> None:
        """As `FlattenedTensorBucket.empty` and what follows in sglang/srt/model_executor."""
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        starts = [0, *itertools.accumulate(sizes)]
        assert not any(start % kind.itemsize for start, kind in zip(starts, kinds, strict=False)), "unaligned"

        data = torch.empty(starts[-1], dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.groups[name])
        for tensor, start, size, kind, shape in zip(names, starts, sizes, kinds, shapes, strict=False):
            self.weights[tensor] = data[start : start + size].view(kind).reshape(shape)
        self.label = label or self.label

    def destroy_group(self, name: str) -> None:
        dist.destroy_process_group(self.groups.pop(name))

    def look(self) -> tuple[str, dict[str, TensorEntry]]:
        return self.label, {name: described(name, tensor) for name, tensor in self.weights.items()}


def _run(connection: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    serving = GroupRank(rank)
    while True:
        call, name, arguments = connection.recv()
        try:
            result: Any = getattr(serving, name)(*arguments)
        except Exception as error:
            result = WeightsError(f"{type(error).__name__}: {error}")
        connection.send((call, result))


class ServerRank:
    """The other end of a rank's process, which can be an argument of a new process.

    Answers without a waiting caller are dropped.
    """

    def __init__(self, rank: int) -> None:
        self._connection, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=_run, args=(theirs, rank), daemon=True)
        self.process.start()
        theirs.close()
        self._calls = itertools.count()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"process": None}

    def call(self, seconds: float, name: str, *arguments: object) -> Any:
        number = next(self._calls)
        try:
            self._connection.send((number, name, arguments))
            while self._connection.poll(seconds):
                answered, result = self._connection.recv()
                if answered == number:
                    break
            else:
                raise EngineError(f"no answer to {name} within {seconds:g} s")
        except (OSError, EOFError) as error:
            raise EngineError(f"the server died: {error!r}") from error

        if isinstance(result, Exception):
            raise result
        return result


class FakeServer:
    """A server of so many ranks, or of ranks that another process has started.

    `calls`: the calls by name. `before(name)` is called before each.
    """

    def __init__(self, ranks: int = 1, started: Sequence[ServerRank] = ()) -> None:
        self.url = "http://127.0.0.1:9"
        self.ranks = list(started) or [ServerRank(rank) for rank in range(ranks)]
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        self.labels: list[str | None] = []

    async def init_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,
        backend: str,
        seconds: float,
    ) -> None:
        await self._all(seconds, "init_group", address, port, rank_offset, world_size, name, backend)

    async def update_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        label: str | None,
        seconds: float,
    ) -> None:
        self.labels.append(label)
        await self._all(seconds, "update_from_group", names, dtypes, shapes, group, label)

    async def begin_update(self) -> None:
        """Open a session of updates, which no rank needs."""

    async def end_update(self, seconds: float = 0.0) -> None:
        """Close the session."""

    async def destroy_group(self, name: str, seconds: float) -> None:
        await self._all(seconds, "destroy_group", name)

    def look(self, rank: int = 0) -> tuple[str, dict[str, TensorEntry]]:
        """The label of a rank's weights, and what they are. EngineError while it waits for somebody."""
        return self.ranks[rank].call(30.0, "look")

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            os.kill(rank.process.pid or 0, number)

    def end(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()

    async def _all(self, seconds: float, name: str, *arguments: object) -> None:
        self.calls.append(name)
        self.before(name)
        calls = (asyncio.to_thread(rank.call, seconds, name, *arguments) for rank in self.ranks)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
