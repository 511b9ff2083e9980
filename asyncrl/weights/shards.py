"""Sharded weights in host memory: each rank copies its own part, and some collect the parts later.

    foreground, all ranks:  claim (a buffer that nobody reads) ──► copy (no collective) ──► training goes on
    background:             collector ──(buffer, copy, tensors)──► other ranks ──bytes──► collector

Rank 0 collects what is written to files; for broadcasts there is a collector for each server, if there are
ranks enough. A rank has a thread for each collector.

Where versions are published as deltas, ranks deliver only what has changed since the copy that rank 0 has
collected last: between machines that is a small part of the weights.

Collecting has a gloo group of its own: training's collectives neither wait for it nor meet it in another
order. As all ranks copy together, the n-th copy is of the same version on each; so a collector names it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.types import PolicyVersion
from asyncrl.weights import codec
from asyncrl.weights.buffers import Buffers
from asyncrl.weights.manifest import ITEM_BYTES, Layout, Superseded, TensorSpec, WeightsError
from asyncrl.weights.names import FilePiece
from asyncrl.weights.snapshot import Read, Snapshot, Tensors, as_bytes
from asyncrl.weights.tensorfile import Earlier

log = logging.getLogger("asyncrl.weights")

Shards = Mapping[str, DTensor]  # parameters as FSDP2 shards them, along the first dimension
SIGNS = 4  # of life from a collector, which may ask for nothing for long, in the time of a bucket
_END, _ALIVE = torch.tensor([-1, 0, 0, 0, 0]), torch.tensor([-2, 0, 0, 0, 0])
_QUESTION, _ANSWER = 1, 2  # tags: two collectors ask each other
_pieces = msgspec.msgpack.Decoder(list[bytes])


class HostShards:
    """One rank's end, made by all ranks together. On one rank there is neither group nor thread, and what is
    read is the buffer itself. `pieces`: what the shards, by name and in their order, are read as. `deadline`:
    seconds in which a rank must deliver a bucket. `collectors`: the first ones of the ranks. `changes`: rank
    0, the only one of them, may ask for what has changed since an earlier copy; ranks keep one more copy of
    their shards for that. `buffers`: what each rank has whole, in the dtype in which it is sent: collectors
    give their own ones of each version."""

    def __init__(
        self,
        shards: Shards,
        pieces: Sequence[FilePiece],
        dtype: torch.dtype,
        deadline: float,
        changes: bool = False,
        collectors: int = 1,
        buffers: Mapping[str, Tensor] = {},
    ) -> None:
        self._sharded, self.layout = layout_of(pieces, dtype), layout_of(pieces, dtype, buffers)
        self._first = self.layout.index(self._sharded[0])
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._dtype, self._deadline = dtype, deadline
        self._group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
        self._sizes = self._exchange([_held(piece, shards[piece.parameter]) for piece in pieces])
        pinned = any(shard.device.type == "cuda" for shard in shards.values())
        self._buffers = Buffers(sum(self._sizes[self.rank]), dtype, pinned)
        self.received = 0  # bytes, by this collector
        self._changes = changes and self.ranks > 1
        self._sent = torch.empty(
            sum(self._sizes[self.rank]) if self._changes and self.rank else 0, dtype=dtype
        )
        self._sent_of = [0] * len(self._sharded)  # number of the copy that each piece of it is of
        self._wire = threading.Lock()  # one bucket is collected at a time
        self._collects = self.ranks > 1 and self.rank < collectors
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name="weight-shards", daemon=True)
            for rank in range(min(collectors, self.ranks))
            if rank != self.rank
        ]
        self._ending = threading.Event()
        if self._collects:
            threading.Thread(target=self._keep_alive, name="weight-signs", daemon=True).start()
        for thread in self._threads:
            thread.start()

    # -- foreground ------------------------------------------------------------------------------------

    def claim(self, gather: Callable[[list[int]], list[list[int]]]) -> int:
        """The buffer that all ranks copy into next. A collective: `gather` gives the lists of all ranks."""
        return self._buffers.claim({index for busy in gather(self._buffers.busy()) for index in busy})

    def copy(self, index: int, shards: Shards) -> None:
        """Copy this rank's shards, cast to the exported type. Not a collective."""
        self._buffers.copy(index, (_local(shard) for shard in shards.values()))

    def snapshot(
        self, index: int, version: PolicyVersion, seconds: float, buffers: Mapping[str, Tensor] = {}
    ) -> Snapshot:
        """A collector: the copy just made, and its own copies of the buffers, as a version."""
        copied = self._buffers.copies

        @contextmanager
        def pin(earlier: Earlier | None = None) -> Iterator[Read]:
            def read(part: slice) -> Tensors:
                start, stop = (
                    min(max(at - self._first, 0), len(self._sharded)) for at in (part.start, part.stop)
                )
                found = dict(buffers)
                if start < stop:
                    found |= self._collect(memory, index, copied, slice(start, stop), earlier)
                return {spec.name: found[spec.name] for spec in self.layout[part]}

            with self._buffers.reading(index, copied, wait=0) as memory:
                yield read

        return Snapshot(version, self.layout, seconds, pin, copied if self._changes else 0)

    def close(self, timeout: float) -> None:
        """On all ranks: collectors end the threads of the others, and each waits for its own; `timeout`
        seconds at most."""
        end = time.monotonic() + timeout
        self._ending.set()
        if self._collects and self._wire.acquire(timeout=timeout):
            try:
                self._ask(_END, max(0.001, end - time.monotonic()))
            except RuntimeError as error:
                log.info("a rank was gone before its thread was ended: %s", error)
            finally:
                self._wire.release()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    # -- a collector -----------------------------------------------------------------------------------

    def _collect(
        self, memory: Tensor, index: int, copied: int, part: slice, earlier: Earlier | None
    ) -> Tensors:
        """The whole tensors of a part of what is sharded."""
        since = earlier.copied if earlier is not None else 0
        mine = self._mine(memory, part).split(self._sizes[self.rank][part])
        pieces: list[Sequence[Tensor]] = [mine]
        if self.ranks > 1:
            with self._wire:
                try:
                    self._ask(torch.tensor([index, copied, part.start, part.stop, since]), self._deadline)
                    pieces = [
                        mine if rank == self.rank else self._receive(rank, part, earlier)
                        for rank in range(self.ranks)
                    ]
                except RuntimeError as error:
                    raise WeightsError(f"a trainer rank did not deliver its shards ({error})") from error
        return {
            spec.name: (torch.cat(of_ranks) if self.ranks > 1 else of_ranks[0]).view(spec.shape)
            for spec, *of_ranks in zip(self._sharded[part], *pieces, strict=True)
        }

    def _keep_alive(self) -> None:
        """Tell the others that this rank is there: who hears nothing waits for it no longer."""
        with suppress(RuntimeError):  # a rank is gone, which `_collect` finds out, too
            while not self._ending.wait(self._deadline / SIGNS):
                with self._wire:
                    if not self._ending.is_set():
                        self._ask(_ALIVE, self._deadline)

    def _ask(self, request: Tensor, timeout: float) -> None:
        for rank in range(self.ranks):
            if rank != self.rank:
                _wait(dist.isend(request, rank, group=self._group, tag=_QUESTION), timeout)

    def _receive(self, rank: int, part: slice, earlier: Earlier | None) -> Sequence[Tensor]:
        """A rank's pieces of the tensors of a part."""
        if earlier is not None:
            size = torch.empty(1, dtype=torch.int64)
            _wait(dist.irecv(size, rank, group=self._group, tag=_ANSWER), self._deadline)
            if size >= 0:
                data = torch.empty(int(size), dtype=torch.uint8)
                _wait(dist.irecv(data, rank, group=self._group, tag=_ANSWER), self._deadline)
                self.received += data.numel()
                return self._changed(rank, part, earlier, _pieces.decode(data.numpy().data))
        sizes = self._sizes[rank][part]
        data = torch.empty(sum(sizes), dtype=self._dtype)
        if data.numel():
            _wait(dist.irecv(data.view(torch.uint8), rank, group=self._group, tag=_ANSWER), self._deadline)
        self.received += data.nbytes
        return data.split(sizes)

    def _changed(self, rank: int, part: slice, earlier: Earlier, pieces: list[bytes]) -> list[Tensor]:
        """A rank's pieces of an earlier copy, brought up to date. Raises WeightsError."""
        found = []
        for tensor, piece in zip(range(part.start, part.stop), pieces, strict=True):
            start = sum(sizes[tensor] for sizes in self._sizes[:rank]) * self._dtype.itemsize
            stop = start + self._sizes[rank][tensor] * self._dtype.itemsize
            data = earlier.arrays[self._sharded[tensor].name][start:stop].copy()
            codec.apply(data, piece, self._dtype.itemsize)
            found.append(torch.from_numpy(data).view(self._dtype))
        return found

    # -- the other ranks -------------------------------------------------------------------------------

    def _serve(self, collector: int) -> None:
        """Send what it asks for, until it needs nothing more."""
        request = torch.empty_like(_END)
        try:
            while True:
                limit = (1 + self.ranks) * self._deadline  # it may be waiting for buckets of the others
                _wait(dist.irecv(request, collector, group=self._group, tag=_QUESTION), limit)
                if torch.equal(request, _END):
                    return
                if torch.equal(request, _ALIVE):
                    continue
                index, copied, start, stop, since = request.tolist()
                with self._buffers.reading(index, copied, wait=self._deadline) as memory:
                    data, part = self._mine(memory, slice(start, stop)), slice(start, stop)
                    self._deliver(collector, data, part, since)
                    if self._changes:
                        self._mine(self._sent, part).copy_(data)
                        self._sent_of[part] = [copied] * (stop - start)
        except (RuntimeError, Superseded) as error:  # one rank cannot go on: the supervisor restarts all
            log.error("rank %d delivers no more weights: %s", self.rank, error)

    def _deliver(self, collector: int, data: Tensor, part: slice, since: int) -> None:
        """Send what has changed since a copy, if that is the one that was sent last; else all, after a -1."""
        if since:
            changes = self._encoded(data, part) if set(self._sent_of[part]) == {since} else None
            size = -1 if changes is None else changes.numel()
            self._send(collector, torch.tensor([size]))
            data = data if changes is None else changes
        if data.numel():
            self._send(collector, data.view(torch.uint8))

    def _send(self, collector: int, data: Tensor) -> None:
        _wait(dist.isend(data, collector, group=self._group, tag=_ANSWER), self._deadline)

    def _encoded(self, data: Tensor, part: slice) -> Tensor:
        sizes = self._sizes[self.rank][part]
        pairs = zip(self._mine(self._sent, part).split(sizes), data.split(sizes), strict=True)
        item = self._dtype.itemsize
        pieces = [codec.encode(as_bytes(old), as_bytes(new), item) for old, new in pairs]
        return torch.frombuffer(bytearray(msgspec.msgpack.encode(pieces)), dtype=torch.uint8)

    # -- both ------------------------------------------------------------------------------------------

    def _mine(self, memory: Tensor, part: slice) -> Tensor:
        """This rank's piece of a part of what is sharded."""
        sizes = self._sizes[self.rank]
        start = sum(sizes[: part.start])
        return memory[start : start + sum(sizes[part])]

    def _exchange(self, mine: list[int]) -> list[list[int]]:
        """The sizes of all ranks' shards, by rank."""
        if self.ranks == 1:
            return [mine]
        everyone = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(everyone, torch.tensor(mine), group=self._group)
        return [sizes.tolist() for sizes in everyone]


def layout_of(pieces: Sequence[FilePiece], dtype: torch.dtype, buffers: Mapping[str, Tensor] = {}) -> Layout:
    """The whole tensors, as they are exported: in files each must start at a multiple of its item size."""
    kinds = [(piece.name, piece.shape, dtype) for piece in pieces]
    kinds += [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()]
    specs = (TensorSpec(name, shape, str(kind).removeprefix("torch.")) for name, shape, kind in kinds)
    return tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))


def _held(piece: FilePiece, shard: DTensor) -> int:
    """How many numbers of a piece lie on this rank."""
    count = _local(shard).numel()
    (chunk,) = shard.__create_chunk_list__()
    start = chunk.offsets[0] * math.prod(shard.shape[1:])
    return max(0, min(start + count, piece.offset + piece.numel) - max(start, piece.offset))


def _wait(work: dist.Work | None, timeout: float) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait(timedelta(seconds=timeout))


def _local(shard: DTensor) -> Tensor:
    """This rank's part, empty where there are more ranks than rows; of replicas the first one has them."""
    mesh = shard.device_mesh
    expected = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    assert shard.placements == expected, f"not sharded along the first dimension: {shard.placements}"
    *replica, _ = mesh.get_coordinate() or ()
    mine = shard.to_local().detach()
    return mine[:0] if any(replica) else mine
