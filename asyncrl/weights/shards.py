"""Sharded weights in host memory: each rank copies its own part, and some collect the parts later.

    foreground, all ranks:  claim (a buffer that nobody reads) ──► copy ──► training goes on
    background, to files:   rank 0 ──(buffer, copy, tensors, file)──► other ranks ──checksums──► rank 0
    background, else:       collector ──(buffer, copy, tensors)──► other ranks ──bytes──► collector

A version is a map of byte ranges: a rank has one range of each tensor. To files, each rank of rank 0's
machine writes its own range; for a delta, each rank reports the changes in its range since the copy published
before. Rank 0 announces the version when all ranks have written. For broadcasts there is a collector for each
server, if there are enough ranks. A rank has a thread for each collector.

Collecting has its own gloo group: training's collectives neither wait for collecting nor mix with its
messages. As all ranks copy together, the n-th copy is of the same version on every rank, so a collector names
a copy by its number.
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
from asyncrl.weights.ranges import NO_BYTES, RangePart, make_range_part, tensor_offsets
from asyncrl.weights.snapshot import Buffers, Snapshot

log = logging.getLogger("asyncrl.weights")

Shards = Mapping[str, DTensor]  # parameters as FSDP2 shards them, along the first dimension
IDLE_SECONDS = 1e7  # deadline of a wait for a collector's next Ask; a collector's end is noticed at once
ASK_BYTES = 4608  # of an encoded Ask, most of which a path may take
# Tags of messages keep questions and answers apart: two collectors ask each other.
_QUESTION_TAG = 1
_ANSWER_TAG = 2


class Ask(msgspec.Struct, frozen=True):
    """Asks a rank for its bytes of the tensors [start, stop). `copy`: index of the buffer, and number of the
    copy; `base`: an earlier copy, if the changes are wanted. `file`: where to write the bytes, if the rank is
    on this `machine` and sees the file. An Ask without tensors is the last."""

    copy: tuple[int, int] = (0, 0)
    start: int = 0
    stop: int = 0
    base: tuple[int, int] | None = None
    file: str = ""
    machine: str = ""


class HostShards:
    """One rank's copies of the weights in host memory, made by all ranks together. With one rank there is
    neither group nor thread, and readers read the buffer itself. `pieces`: the tensors of files in the
    shards, in order. `deadline`: seconds in which a rank must deliver a bucket. `collectors`: how many ranks,
    the first, collect. `buffers`: tensors that each rank has whole, in the dtype of files; rank 0 provides
    them. `deltas`: the last published copy is read until the next copy is written."""

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
        self.layout = export_layout(pieces, dtype, buffers)
        self._dtype = dtype
        self._deadline = deadline
        self.file_offsets = dict(tensor_offsets(self.layout))
        self.rank = dist.get_rank()
        self.rank_count = dist.get_world_size()

        bytes_here = {
            piece.name: _count_held(piece, shards[piece.parameter]) * dtype.itemsize for piece in pieces
        }
        bytes_here |= {name: 0 if self.rank else buffer.nbytes for name, buffer in buffers.items()}
        own_sizes = [bytes_here[spec.name] for spec in self.layout]
        self._sizes_by_rank = [own_sizes]

        self._group: dist.ProcessGroup | None = None
        if self.rank_count > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
            all_sizes = [torch.zeros(len(own_sizes), dtype=torch.int64) for _ in range(self.rank_count)]
            dist.all_gather(all_sizes, torch.tensor(own_sizes), group=self._group)
            self._sizes_by_rank = [sizes.tolist() for sizes in all_sizes]

        self._buffer_offsets = list(accumulate(own_sizes, initial=0))  # where tensors begin in a buffer

        self._offsets_in_tensor = [
            sum(tensor_sizes)
            for tensor_sizes in zip([0] * len(own_sizes), *self._sizes_by_rank[: self.rank], strict=True)
        ]
        page_locked = any(shard.device.type == "cuda" for shard in shards.values())
        self._buffers = Buffers(self._buffer_offsets[-1], page_locked, 2 + deltas)
        self.received_bytes = 0  # by this collector, for tests
        self._collect_lock = threading.Lock()  # one bucket is collected at a time
        self._is_collector = self.rank_count > 1 and self.rank < collectors

        self._threads = [
            threading.Thread(target=self._serve_collector, args=(rank,), name="weight-shards", daemon=True)
            for rank in range(min(collectors, self.rank_count))
            if rank != self.rank
        ]
        for thread in self._threads:
            thread.start()

    # -- foreground ------------------------------------------------------------------------------------

    def copy_version(
        self,
        version: PolicyVersion,
        shards: Shards,
        gather: Callable[[list[int]], list[list[int]]],
        buffers: Mapping[str, Tensor] = {},
    ) -> Snapshot:
        """Copy this rank's shards, cast to the exported type, and on rank 0 the buffers. Return the version,
        for collectors. A collective: `gather` returns the lists of all ranks, and adapters are merged when a
        shard is read."""
        # All ranks choose the same buffer, one that no rank is reading.
        busy_indices = {index for busy in gather(self._buffers.begin_claim()) for index in busy}
        buffer_index = self._buffers.claim_buffer(busy_indices)

        own_buffers = [buffers[spec.name] for spec in self.layout if spec.name in buffers and not self.rank]
        typed_buffers = [(buffer, buffer.dtype) for buffer in own_buffers]
        larger_buffers = [buffer for buffer in typed_buffers if buffer[1].itemsize > self._dtype.itemsize]
        own_shards = ((_local_part(shard), self._dtype) for shard in shards.values())
        self._buffers.copy_tensors(
            buffer_index, chain(larger_buffers, own_shards, typed_buffers[len(larger_buffers) :])
        )

        copy_id = (buffer_index, self._buffers.copy_count)
        return Snapshot(version, self.layout, partial(self._hold_copy, copy_id))

    def close(self, timeout: float) -> None:
        """End the threads, on all ranks: collectors end the threads of other ranks, and each rank waits for
        its own threads, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        if self._is_collector and self._collect_lock.acquire(timeout=timeout):
            try:
                self._send_ask(Ask(), max(0.001, deadline - time.monotonic()))
            except RuntimeError as error:
                log.info("a rank exited before its thread was stopped: %s", error)
            finally:
                self._collect_lock.release()

        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- a collector -----------------------------------------------------------------------------------

    @contextmanager
    def _hold_copy(self, copy: tuple[int, int]) -> Iterator[HeldShards]:
        with self._buffers.reading(*copy, wait_seconds=0) as memory:
            yield HeldShards(self, copy, memory)

    def collect_parts(self, memory: Tensor, base: Tensor | None, ask: Ask) -> list[Sequence[RangePart]]:
        """Collect the parts of all ranks for each tensor; `memory`, `base`: this rank's copies."""
        if self.rank_count == 1:
            return [(range_part,) for range_part in self._own_parts(memory, base, ask)]

        parts_by_rank = []
        rank_failure = WeightsError.instead_of(RuntimeError, text="a trainer rank did not deliver its shards")
        with self._collect_lock, rank_failure:
            self._send_ask(ask, self._deadline)
            for rank in range(self.rank_count):
                if rank == self.rank:
                    parts_by_rank.append(self._own_parts(memory, base, ask))
                    continue

                size = torch.empty(1, dtype=torch.int64)
                _wait_for(dist.irecv(size, rank, group=self._group, tag=_ANSWER_TAG), self._deadline)
                data = torch.empty(int(size), dtype=torch.uint8)
                _wait_for(dist.irecv(data, rank, group=self._group, tag=_ANSWER_TAG), self._deadline)
                self.received_bytes += data.numel()
                parts_by_rank.append(msgspec.msgpack.decode(data.numpy().data, type=list[RangePart]))

        return list(zip(*parts_by_rank, strict=True))

    def _send_ask(self, ask: Ask, timeout: float) -> None:
        request = torch.frombuffer(bytearray(msgspec.json.encode(ask).ljust(ASK_BYTES)), dtype=torch.uint8)
        for rank in range(self.rank_count):
            if rank != self.rank:
                _wait_for(dist.isend(request, rank, group=self._group, tag=_QUESTION_TAG), timeout)

    # -- the other ranks -------------------------------------------------------------------------------

    def _serve_collector(self, collector: int) -> None:
        """Answer a collector's questions, until the last."""
        request = torch.empty(ASK_BYTES, dtype=torch.uint8)
        try:
            while True:
                _wait_for(dist.irecv(request, collector, group=self._group, tag=_QUESTION_TAG), IDLE_SECONDS)
                ask = msgspec.json.decode(request.numpy().tobytes(), type=Ask)
                if ask.start == ask.stop:
                    return
                self._answer_ask(collector, ask)
        except Exception as error:  # one rank cannot go on: the supervisor restarts all
            log.exception("rank %d no longer delivers weights: %s", self.rank, error)

    def _answer_ask(self, collector: int, ask: Ask) -> None:
        with ExitStack() as copy_locks:
            copy_index, copy_number = ask.copy
            memory = copy_locks.enter_context(
                self._buffers.reading(copy_index, copy_number, wait_seconds=self._deadline)
            )
            base = None
            if ask.base is not None:
                base_index, base_number = ask.base
                base = copy_locks.enter_context(
                    self._buffers.reading(base_index, base_number, wait_seconds=self._deadline)
                )

            data = bytearray()
            msgspec.msgpack.Encoder().encode_into(self._own_parts(memory, base, ask), data)

        for message in (torch.tensor([len(data)]), torch.frombuffer(data, dtype=torch.uint8)):
            _wait_for(dist.isend(message, collector, group=self._group, tag=_ANSWER_TAG), self._deadline)

    # -- both ------------------------------------------------------------------------------------------

    def _own_parts(self, memory: Tensor, base: Tensor | None, ask: Ask) -> list[RangePart]:
        """Return this rank's bytes, written into the file if the rank sees the file, or the changes since
        `base`."""
        tensor_range = slice(ask.start, ask.stop)
        sizes = self._sizes_by_rank[self.rank][tensor_range]
        path = Path(ask.file)
        writes_file = bool(ask.file) and ask.machine == socket.gethostname() and path.is_file()
        old_tensors = [None] * len(sizes) if base is None else self.own_bytes(base, tensor_range).split(sizes)
        new_tensors = self.own_bytes(memory, tensor_range).split(sizes)

        range_parts = []
        for spec, tensor_bytes, old_bytes, start_byte in zip(
            self.layout[tensor_range],
            new_tensors,
            old_tensors,
            self._offsets_in_tensor[tensor_range],
            strict=True,
        ):
            data = tensor_bytes.numpy().data
            if old_bytes is not None and len(data):
                data = memoryview(
                    codec.encode_changes(old_bytes.numpy(), tensor_bytes.numpy(), ITEM_BYTES[spec.dtype])
                )
            elif writes_file and len(data):
                writes_file = False  # after an error, rank 0 writes the bytes, and reports the error
                with suppress(OSError):
                    with path.open("r+b") as file:
                        file.seek(self.file_offsets[spec.name] + start_byte)
                        file.write(data)
                    writes_file = True  # closing may fail, too

            range_parts.append(
                make_range_part(spec, tensor_bytes.numpy(), start_byte, NO_BYTES if writes_file else data)
            )

        return range_parts

    def own_bytes(self, memory: Tensor, part: slice) -> Tensor:
        """Return this rank's bytes of a part of the layout, [n] of uint8."""
        return memory[self._buffer_offsets[part.start] : self._buffer_offsets[part.stop]]


@dataclass(frozen=True)
class HeldShards:
    """A `HeldCopy` of all ranks. `copy`: index of the buffer, and number of the copy; `memory`: this rank's
    copy."""

    host: HostShards
    copy: tuple[int, int]
    memory: Tensor

    def collect_parts(
        self, tensor_range: slice, file: str = "", base: HeldShards | None = None
    ) -> list[Sequence[RangePart]]:
        base_id = base.copy if base else None
        base_memory = base.memory if base else None
        ask = Ask(self.copy, tensor_range.start, tensor_range.stop, base_id, file, socket.gethostname())
        return self.host.collect_parts(self.memory, base_memory, ask)

    def contiguous_bytes(self, part: slice) -> Tensor | None:
        return self.host.own_bytes(self.memory, part) if self.host.rank_count == 1 else None


def export_layout(
    pieces: Sequence[FilePiece], dtype: torch.dtype, buffers: Mapping[str, Tensor] = {}
) -> Layout:
    """Return the layout of the whole tensors in files and buckets. A tensor must start at a multiple of its
    item size, so large items come first."""
    described = [(piece.name, piece.shape, dtype) for piece in pieces]
    described += [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()]
    specs = (
        TensorSpec(name, shape, str(tensor_dtype).removeprefix("torch."))
        for name, shape, tensor_dtype in described
    )
    return tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))


def _count_held(piece: FilePiece, shard: DTensor) -> int:
    """Count the numbers of a piece that lie on this rank."""
    count = _local_part(shard).numel()
    (chunk,) = shard.__create_chunk_list__()
    start = chunk.offsets[0] * math.prod(shard.shape[1:])
    return max(0, min(start + count, piece.offset + piece.numel) - max(start, piece.offset))


def _wait_for(work: dist.Work | None, timeout: float) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait(timedelta(seconds=timeout))


def _local_part(shard: DTensor) -> Tensor:
    """Return this rank's part, empty where there are more ranks than rows, and on all replicas but the
    first."""
    assert shard.placements == (Shard(0),), f"not sharded along the first dimension: {shard.placements}"
    mesh = shard.device_mesh  # of one replica; the first replica has the lowest ranks
    local_tensor = shard.to_local().detach()
    return local_tensor if mesh.get_rank() < mesh.size() else local_tensor[:0]
