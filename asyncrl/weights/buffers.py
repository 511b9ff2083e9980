"""Host memory for copies of one process's weights: written by the trainer, read in the background.

A buffer that is being read, on any rank, is never written to: ranks tell each other which these are, and
claim the same one. Copies are numbered, and a reader names the one it wants.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.weights.manifest import Superseded

CLAIM_SECONDS = 60.0  # for all ranks to agree on the next buffer


@dataclass
class Buffer:
    """`copied`: number of the copy it holds; 0: none, or one being written."""

    memory: Tensor  # [n], all tensors one after another
    copied: int = 0
    readers: int = 0
    event: torch.cuda.Event | None = None  # the copy is complete when this has happened


class Buffers:
    """Two buffers of `size` numbers, used again and again; one more only if all are being read at once. So
    there is at most one more than readers, which launch/estimates.py counts on."""

    def __init__(self, size: int, dtype: torch.dtype, pinned: bool) -> None:
        self._size, self._dtype, self._pinned = size, dtype, pinned
        self._buffers = [self._buffer(), self._buffer()]
        self._changed = threading.Condition()
        self._claiming = False
        self.copies = 0

    def busy(self) -> list[int]:
        """Those that are being read. Nobody begins to read one until `claim`."""
        with self._changed:
            self._claiming = True
            return [index for index, buffer in enumerate(self._buffers) if buffer.readers]

    def claim(self, busy: Collection[int]) -> int:
        """The buffer to write next, the oldest that is not `busy`; it holds nothing from now on."""
        with self._changed:
            free = [index for index in range(len(self._buffers)) if index not in busy]
            if not free:  # the trainer does not wait
                self._buffers.append(self._buffer())
                free = [len(self._buffers) - 1]
            oldest = min(free, key=lambda index: self._buffers[index].copied)
            self._buffers[oldest].copied = 0
            self._claiming = False
            self._changed.notify_all()
            return oldest

    def copy(self, index: int, tensors: Iterable[Tensor]) -> None:
        """Copy and cast the tensors, of `size` numbers in all, into a buffer that was claimed."""
        buffer = self._buffers[index]
        with self._changed:
            buffer.copied = 0
        start = 0
        for tensor in tensors:
            size = tensor.numel()
            buffer.memory[start : start + size].copy_(tensor.reshape(-1), non_blocking=True)
            start += size
        assert start == self._size, "other tensors than the buffers are for"
        if self._pinned:
            # From a GPU all this is only enqueued, in front of the next change of the weights on the stream.
            # Not run so far, for lack of a GPU.
            buffer.event = torch.cuda.Event()
            buffer.event.record()
        with self._changed:
            self.copies += 1
            buffer.copied = self.copies
            self._changed.notify_all()

    @contextmanager
    def reading(self, index: int, copied: int, wait: float) -> Iterator[Tensor]:
        """The memory of a copy that is made within `wait` seconds. Raises Superseded if it is not there. 0: a
        reader that other ranks have not heard of, which must not begin between `busy` and `claim`."""

        def there() -> bool:
            return index < len(self._buffers) and self._buffers[index].copied == copied

        with self._changed:
            if not wait and not self._changed.wait_for(lambda: not self._claiming, CLAIM_SECONDS):
                raise Superseded("ranks have not agreed on what to write next: nothing may be read so long")
            if not self._changed.wait_for(there, wait):
                raise Superseded(f"copy {copied} of the weights is not in host memory (any more)")
            buffer = self._buffers[index]
            buffer.readers += 1
        try:
            if buffer.event is not None:
                buffer.event.synchronize()
            yield buffer.memory
        finally:
            with self._changed:
                buffer.readers -= 1

    def _buffer(self) -> Buffer:
        return Buffer(torch.empty(self._size, dtype=self._dtype, pin_memory=self._pinned))
