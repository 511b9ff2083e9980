"""Sharded weights in host memory: each rank copies its own part, and some collect the parts later.

    foreground, all ranks:  claim (a buffer that nobody reads) ──► copy ──► training goes on
    background, to files:   rank 0 ──(buffer, copy, tensors, file)──► other ranks ──checksums──► rank 0
    background, else:       collector ──(buffer, copy, tensors)──► other ranks ──bytes──► collector

A version is a map of byte ranges: a rank has one of each tensor. To files each rank of rank 0's machine
writes its own; for a delta each rank tells what has changed in its own since the copy published before. Rank
0 announces the version when all have. For broadcasts there is a collector for each server, if there are
ranks enough. A rank has a thread for each collector.

Collecting has a gloo group of its own: training's collectives neither wait for it nor meet it in another
order. As all ranks copy together, the n-th copy is of the same version on each; so a collector names it.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.types import PolicyVersion
from asyncrl.weights import codec
from asyncrl.weights.manifest import ITEM_BYTES, Layout, TensorSpec, WeightsError
from asyncrl.weights.names import FilePiece
from asyncrl.weights.ranges import NOTHING, RangeShare, share, starts
from asyncrl.weights.snapshot import Buffers, Snapshot

log = logging.getLogger("asyncrl.weights")

Shards = Mapping[str, DTensor]  # parameters as FSDP2 shards them, along the first dimension
PATIENCE = 1e7  # seconds for a collector to ask for something: one that ends is noticed at once
ASK_BYTES = 4608  # of an Ask: a path takes most of them
# tags: two collectors ask each other
_QUESTION = 1
_ANSWER = 2


class Ask(msgspec.Struct, frozen=True):
    """Asks a rank for its bytes of the tensors [start, stop). `copy`: index of the buffer, and number of the
    copy; `base`: of an earlier one, to tell what has changed. `file`: to be written there, if it is on this
    `machine` and in sight. Without tensors it is the last one."""

    copy: tuple[int, int] = (0, 0)
    start: int = 0
    stop: int = 0
    base: tuple[int, int] | None = None
    file: str = ""
    machine: str = ""


class HostShards:
    """Serves one rank's end, made by all ranks together. On one rank there is neither group nor thread, and
    what is read is the buffer itself. `pieces`: what the shards, by name and in their order, are read as.
    `deadline`: seconds in which a rank must deliver a bucket. `collectors`: the first ones of the ranks.
    `buffers`: what each rank has whole, in the dtype in which it is sent; rank 0 gives it. `deltas`: the copy
    published last is read until the next one is written."""

    def __init__(
        self,
        shards: Shards,
        pieces: Sequence[FilePiece],
        dtype: torch.dtype,
        deadline: float,
        collectors: int = 1,
        buffers: Mapping[str, Tensor] = {},
        deltas: bool = False,
    ) -> None:
        self.layout = layout_of(pieces, dtype, buffers)
        self._dtype = dtype
        self._deadline = deadline
        self.places = dict(starts(self.layout))
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
        held = {piece.name: _held(piece, shards[piece.parameter]) * dtype.itemsize for piece in pieces}
        held |= {name: 0 if self.rank else buffer.nbytes for name, buffer in buffers.items()}
        self._sizes = self._exchange([held[spec.name] for spec in self.layout])
        own = self._sizes[self.rank]
        lower = self._sizes[: self.rank]
        self._at = list(accumulate(own, initial=0))  # where tensors begin in a buffer
        self._before = [sum(of_tensor) for of_tensor in zip([0] * len(own), *lower, strict=True)]
        pinned = any(shard.device.type == "cuda" for shard in shards.values())
        self._buffers = Buffers(self._at[-1], pinned, 2 + deltas)
        self.received = 0  # bytes, by this collector
        self._wire = threading.Lock()  # one bucket is collected at a time
        self._collects = self.ranks > 1 and self.rank < collectors
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name="weight-shards", daemon=True)
            for rank in range(min(collectors, self.ranks))
            if rank != self.rank
        ]
        for thread in self._threads:
            thread.start()

    # -- foreground ------------------------------------------------------------------------------------

    def claim(self, gather: Callable[[list[int]], list[list[int]]]) -> int:
        """The buffer that all ranks copy into next. A collective: `gather` gives the lists of all ranks."""
        return self._buffers.claim({index for busy in gather(self._buffers.begin_claim()) for index in busy})

    def copy(self, index: int, shards: Shards, buffers: Mapping[str, Tensor] = {}) -> None:
        """Copy this rank's shards, cast to the exported type, and on rank 0 the buffers. With adapters a
        collective, as reading a shard merges them."""
        kept = [buffers[spec.name] for spec in self.layout if spec.name in buffers and not self.rank]
        typed = [(one, one.dtype) for one in kept]
        larger = [one for one in typed if one[1].itemsize > self._dtype.itemsize]
        mine = ((_local(shard), self._dtype) for shard in shards.values())
        self._buffers.copy(index, chain(larger, mine, typed[len(larger) :]))

    def snapshot(self, index: int, version: PolicyVersion, seconds: float) -> Snapshot:
        """Return a collector: the copy just made as a version."""
        return Snapshot(version, self.layout, seconds, partial(self._pinned, (index, self._buffers.copies)))

    def close(self, timeout: float) -> None:
        """On all ranks: collectors end the threads of the others, and each waits for its own; `timeout`
        seconds at most."""
        end = time.monotonic() + timeout
        if self._collects and self._wire.acquire(timeout=timeout):
            try:
                self._ask(Ask(), max(0.001, end - time.monotonic()))
            except RuntimeError as error:
                log.info("a rank was gone before its thread was ended: %s", error)
            finally:
                self._wire.release()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    # -- a collector -----------------------------------------------------------------------------------

    @contextmanager
    def _pinned(self, copy: tuple[int, int]) -> Iterator[Copied]:
        with self._buffers.reading(*copy, wait=0) as memory:
            yield Copied(self, copy, memory)

    def shares(self, memory: Tensor, base: Tensor | None, ask: Ask) -> list[Sequence[RangeShare]]:
        """Collects what all ranks have of each of the tensors; `memory`, `base`: of this rank."""
        if self.ranks == 1:
            return [(one,) for one in self._shares(memory, base, ask)]
        failed = WeightsError.instead_of(RuntimeError, text="a trainer rank did not deliver its shards")
        with self._wire, failed:
            self._ask(ask, self._deadline)
            of_ranks = [
                self._shares(memory, base, ask) if rank == self.rank else self._receive(rank)
                for rank in range(self.ranks)
            ]
        return list(zip(*of_ranks, strict=True))

    def _ask(self, ask: Ask, timeout: float) -> None:
        request = torch.frombuffer(bytearray(msgspec.json.encode(ask).ljust(ASK_BYTES)), dtype=torch.uint8)
        for rank in range(self.ranks):
            if rank != self.rank:
                _wait(dist.isend(request, rank, group=self._group, tag=_QUESTION), timeout)

    def _receive(self, rank: int) -> list[RangeShare]:
        size = torch.empty(1, dtype=torch.int64)
        _wait(dist.irecv(size, rank, group=self._group, tag=_ANSWER), self._deadline)
        data = torch.empty(int(size), dtype=torch.uint8)
        _wait(dist.irecv(data, rank, group=self._group, tag=_ANSWER), self._deadline)
        self.received += data.numel()
        return msgspec.msgpack.decode(data.numpy().data, type=list[RangeShare])

    # -- the other ranks -------------------------------------------------------------------------------

    def _serve(self, collector: int) -> None:
        """Give what it asks for, until it needs nothing more."""
        request = torch.empty(ASK_BYTES, dtype=torch.uint8)
        try:
            while True:
                _wait(dist.irecv(request, collector, group=self._group, tag=_QUESTION), PATIENCE)
                ask = msgspec.json.decode(request.numpy().tobytes(), type=Ask)
                if ask.start == ask.stop:
                    return
                self._give(collector, ask)
        except Exception as error:  # one rank cannot go on: the supervisor restarts all
            log.exception("rank %d delivers no more weights: %s", self.rank, error)

    def _give(self, collector: int, ask: Ask) -> None:
        with ExitStack() as reading:
            memory, base = (
                copy and reading.enter_context(self._buffers.reading(*copy, wait=self._deadline))
                for copy in (ask.copy, ask.base)
            )
            assert memory is not None, "every question names a copy"
            data = bytearray()
            msgspec.msgpack.Encoder().encode_into(self._shares(memory, base, ask), data)
        for one in (torch.tensor([len(data)]), torch.frombuffer(data, dtype=torch.uint8)):
            _wait(dist.isend(one, collector, group=self._group, tag=_ANSWER), self._deadline)

    # -- both ------------------------------------------------------------------------------------------

    def _shares(self, memory: Tensor, base: Tensor | None, ask: Ask) -> list[RangeShare]:
        """Give this rank's bytes, written into a file if it sees that, or what has changed in them."""
        part = slice(ask.start, ask.stop)
        sizes = self._sizes[self.rank][part]
        file = Path(ask.file)
        sees = bool(ask.file) and ask.machine == socket.gethostname() and file.is_file()
        old = [None] * len(sizes) if base is None else self.own_bytes(base, part).split(sizes)
        new = self.own_bytes(memory, part).split(sizes)
        found = []
        for spec, own, before, start in zip(self.layout[part], new, old, self._before[part], strict=True):
            data = own.numpy().data
            if before is not None and len(data):
                data = memoryview(codec.encode(before.numpy(), own.numpy(), ITEM_BYTES[spec.dtype]))
            elif sees and len(data):
                sees = _written(file, self.places[spec.name] + start, data)
            found.append(share(spec, own.numpy(), start, NOTHING if sees else data))
        return found

    def own_bytes(self, memory: Tensor, part: slice) -> Tensor:
        """This rank's bytes of a part of the layout, [n] of uint8."""
        return memory[self._at[part.start] : self._at[part.stop]]

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        """Return the sizes of all ranks' shards, by rank."""
        if self.ranks == 1:
            return [mine]
        everyone = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(everyone, torch.tensor(mine), group=self._group)
        return [sizes.tolist() for sizes in everyone]


@dataclass(frozen=True)
class Copied:
    """A `Pinned` copy of all ranks. `copy`: index of the buffer, and number; `memory`: of this rank."""

    host: HostShards
    copy: tuple[int, int]
    memory: Tensor

    def shares(self, part: slice, file: str = "", base: Copied | None = None) -> list[Sequence[RangeShare]]:
        earlier, memory = (base.copy, base.memory) if base else (None, None)
        ask = Ask(self.copy, part.start, part.stop, earlier, file, socket.gethostname())
        return self.host.shares(self.memory, memory, ask)

    def contiguous_bytes(self, part: slice) -> Tensor | None:
        return self.host.own_bytes(self.memory, part) if self.host.ranks == 1 else None


def _written(file: Path, start: int, data: memoryview) -> bool:
    """False: rank 0 tries it itself, and finds the error."""
    with suppress(OSError), file.open("r+b") as opened:
        opened.seek(start)
        opened.write(data)
        return True
    return False


def layout_of(pieces: Sequence[FilePiece], dtype: torch.dtype, buffers: Mapping[str, Tensor] = {}) -> Layout:
    """The whole tensors, as they are exported. In files and in buckets each must start at a multiple of
    its item size, so large items come first."""
    kinds = [(piece.name, piece.shape, dtype) for piece in pieces]
    kinds += [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()]
    specs = (TensorSpec(name, shape, str(kind).removeprefix("torch.")) for name, shape, kind in kinds)
    return tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))


def _held(piece: FilePiece, shard: DTensor) -> int:
    """Counts the numbers of a piece that lie on this rank."""
    count = _local(shard).numel()
    (chunk,) = shard.__create_chunk_list__()
    start = chunk.offsets[0] * math.prod(shard.shape[1:])
    return max(0, min(start + count, piece.offset + piece.numel) - max(start, piece.offset))


def _wait(work: dist.Work | None, timeout: float) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait(timedelta(seconds=timeout))


def _local(shard: DTensor) -> Tensor:
    """This rank's part, empty where there are more ranks than rows; of replicas the first one has them."""
    assert shard.placements == (Shard(0),), f"not sharded along the first dimension: {shard.placements}"
    mesh = shard.device_mesh  # the ranks of one replica, of which the first has the lowest
    mine = shard.to_local().detach()
    return mine if mesh.get_rank() < mesh.size() else mine[:0]
