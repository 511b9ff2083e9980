"""Copies of the weights in host memory: written by the trainer, read in the background by the publisher.

A buffer that is being read, on any rank, is never written to: ranks exchange the indices of busy buffers, and
claim the same free buffer. Copies are numbered, and a reader names a copy by its number. The tensors of a
version lie in ranges on many ranks: a collector reads one bucket at a time, or has each rank write its own
range, so publishing never brings the whole model into one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Layout, Superseded
from asyncrl.weights.memory import allocate_memory
from asyncrl.weights.ranges import RangePart

CLAIM_SECONDS = 60.0  # for all ranks to agree on the next buffer

Tensors = dict[str, Tensor]
NO_ARRAY = np.empty(0, np.uint8)


class HeldCopy(Protocol):
    """A copy of the weights that is held for a reader: not written over."""

    def collect_parts(
        self, part: slice, file: str = "", base: Self | None = None
    ) -> list[Sequence[RangePart]]:
        """Return the parts of all ranks for the tensors of a part of the layout, in order: a rank's bytes,
        which the rank may have written into the safetensors `file` instead, or the changes since a `base`.
        The memory belongs to the copy and must not be changed. Raises WeightsError when a rank does not
        deliver."""
        ...

    def contiguous_bytes(self, part: slice) -> Tensor | None:
        """Return the bytes of a part of the layout in place, [n] of uint8, which must not be changed; None if
        the bytes are not contiguous, as with several ranks."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A version in host memory, at ranks that collect. `hold_copy` can be used several times, from any
    thread; raises Superseded when a newer version has replaced the copy."""

    version: PolicyVersion
    layout: Layout
    hold_copy: Callable[[], AbstractContextManager[HeldCopy]]

    @property
    def total_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.layout)


class BucketBuffers:
    """Memory for buckets from several ranks: two buffers in turn, one filled while the other is sent. The
    first bucket allocates both buffers. `page_locked`: a GPU copies directly from the buffers."""

    def __init__(self, page_locked: bool) -> None:
        self._page_locked = page_locked
        self._buffers = list[Tensor]()
        self._fill_count = 0

    def fill_next(self, range_parts: Iterable[RangePart], largest_bucket: int) -> Tensor:
        """Return the bytes of some parts one behind the other, [n] of uint8, at most `largest_bucket`;
        overwrites the bucket before the last."""
        if not self._buffers or len(self._buffers[0]) < largest_bucket:
            self._buffers = [allocate_memory(largest_bucket, self._page_locked) for _ in range(2)]

        self._fill_count += 1
        arrays = [np.frombuffer(data, np.uint8) for range_part in range_parts for data in range_part.data]
        target = self._buffers[self._fill_count % 2][: sum(array.size for array in arrays)]
        np.concatenate(arrays or [NO_ARRAY], out=target.numpy())
        return target


def tensor_as_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a CPU tensor, without a copy if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


@dataclass
class Buffer:
    """One buffer. `copied`: number of the copy in the buffer; 0: no copy, or a copy being written."""

    memory: Tensor  # [n] of uint8, all tensors one after another
    copied: int = 0
    readers: int = 0
    event: torch.cuda.Event | None = None  # the copy is complete when this has happened


class Buffers:
    """Buffers of `size` bytes, `count` at first, used again and again; one more buffer only if all are being
    read at once. So there is at most one buffer more than readers, as launch/memory.py assumes."""

    def __init__(self, size: int, page_locked: bool, count: int = 2) -> None:
        self._size = size
        self._page_locked = page_locked
        self._buffers = [Buffer(allocate_memory(size, page_locked)) for _ in range(count)]
        self._changed = threading.Condition()
        self._claiming = False
        self.copy_count = 0

    def begin_claim(self) -> list[int]:
        """Return the indices of buffers that are being read. No reader begins until `claim_buffer`."""
        with self._changed:
            self._claiming = True
            return [index for index, buffer in enumerate(self._buffers) if buffer.readers]

    def claim_buffer(self, busy: Collection[int]) -> int:
        """Return the buffer to write next, the oldest that is not `busy`, which holds no copy from now on."""
        with self._changed:
            free_indices = [index for index in range(len(self._buffers)) if index not in busy]
            if not free_indices:  # the trainer does not wait
                self._buffers.append(Buffer(allocate_memory(self._size, self._page_locked)))
                free_indices = [len(self._buffers) - 1]

            oldest_index = min(free_indices, key=lambda index: self._buffers[index].copied)
            self._buffers[oldest_index].copied = 0
            self._claiming = False
            self._changed.notify_all()

            return oldest_index

    def copy_tensors(self, index: int, tensors: Iterable[tuple[Tensor, torch.dtype]]) -> None:
        """Copy tensors, cast to types with `size` bytes in all, into a claimed buffer. Tensors of larger
        types come first."""
        buffer = self._buffers[index]
        start = 0
        for tensor, dtype in tensors:
            size = tensor.numel() * dtype.itemsize
            target = buffer.memory[start : start + size].view(dtype)
            target.copy_(tensor.reshape(-1), non_blocking=True)
            start += size

        assert start == self._size, "the tensors do not have the size of the buffers"
        if self._page_locked:
            # Copies from a GPU are only enqueued, in front of the next change of the weights on the stream.
            # This has not been run, for lack of a GPU.
            buffer.event = torch.cuda.Event()
            buffer.event.record()

        with self._changed:
            self.copy_count += 1
            buffer.copied = self.copy_count
            self._changed.notify_all()

    @contextmanager
    def reading(self, index: int, copied: int, wait_seconds: float) -> Iterator[Tensor]:
        """Yield the memory of a copy that is made within `wait_seconds`. Raises Superseded without such a
        copy. 0: a reader that other ranks do not know of, which must not begin between `begin_claim` and
        `claim_buffer`."""
        with self._changed:
            if not wait_seconds and not self._changed.wait_for(lambda: not self._claiming, CLAIM_SECONDS):
                raise Superseded(
                    "ranks have not agreed on what to write next; nothing may be read until they have"
                )
            if not self._changed.wait_for(
                lambda: index < len(self._buffers) and self._buffers[index].copied == copied, wait_seconds
            ):
                raise Superseded(f"copy {copied} of the weights is not, or is no longer, in host memory")
            buffer = self._buffers[index]
            buffer.readers += 1

        try:
            if buffer.event is not None:
                buffer.event.synchronize()
            yield buffer.memory
        finally:
            with self._changed:
                buffer.readers -= 1
