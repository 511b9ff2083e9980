"""Memory of tensors that is given up for a while, and given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress

import torch


class Released:
    """Storages that were given up. Whoever holds their tensors, as recordings of steps do, keeps them."""

    def __init__(self) -> None:
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give up what these tensors have; tied ones have it together."""
        for tensor in tensors:
            if not tensor.untyped_storage().resizable():  # it lies in a file, or in another process's memory
                tensor.data = torch.empty_like(tensor)
            storage = tensor.untyped_storage()
            if size := storage.nbytes():
                storage.resize_(0)
                self._sizes.append((storage, size))

    def allocate(self) -> None:
        """Take as much memory again, with anything in it."""
        for storage, size in self._sizes:
            storage.resize_(size)
        self._sizes.clear()


def trim_heap() -> None:
    """Give freed memory back to the system. Nothing where the C library is not glibc.

    Micro-batches of different lengths leave a heap of holes, which only grows by glibc's own rules: 10.4 GB
    between steps of a model of 135M parameters, 2.1 GB when it is trimmed. A lower MALLOC_MMAP_THRESHOLD_
    would save as much, but map and clear every tensor anew: a third of the time (docs/log.md).
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
