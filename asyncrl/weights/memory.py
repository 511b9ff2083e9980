"""Memory of tensors that is given up for a while, given back to the system, or page-locked for a GPU."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch

log = logging.getLogger("asyncrl.weights")


class ReleasedStorages:
    """Storages that were given up. References to the tensors, as in recordings of steps, stay valid."""

    def __init__(self) -> None:
        self._released_sizes: list[tuple[torch.UntypedStorage, int]] = []

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give up the memory of these tensors; tied tensors share their memory."""
        for tensor in tensors:
            if not tensor.untyped_storage().resizable():  # in a file, or in another process's memory
                tensor.data = torch.empty_like(tensor)
            storage = tensor.untyped_storage()
            if size := storage.nbytes():
                storage.resize_(0)
                self._released_sizes.append((storage, size))

    def allocate(self) -> None:
        """Take the same amount of memory again, with arbitrary content."""
        for storage, size in self._released_sizes:
            storage.resize_(size)
        self._released_sizes.clear()


def trim_heap() -> None:
    """Give freed memory back to the system. Does nothing where the C library is not glibc.

    Micro-batches of different lengths leave a heap of holes, which only grows by glibc's own rules: 10.4 GB
    between steps of a model of 135M parameters, 2.1 GB after trimming. A lower MALLOC_MMAP_THRESHOLD_ would
    save as much, but map and clear every tensor anew: a third of the time (docs/dev/log.md).
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def allocate_memory(size: int, page_locked: bool) -> torch.Tensor:
    """Return `size` bytes of main memory, [size] of uint8."""
    return allocate_page_locked(size) if page_locked else torch.empty(size, dtype=torch.uint8)


def allocate_page_locked(size: int) -> torch.Tensor:
    """Return `size` bytes of main memory, [size] of uint8, that a GPU copies to and from directly; a warning,
    and ordinary memory, where the system does not allow it. torch's own page-locked memory comes in powers of
    two. Raises MemoryError.

    The pages are unlocked when the last tensor there goes, before the pages are freed: else CUDA would take
    the next memory at this address for locked, and copy to and from the old pages. A numpy array owns the
    pages, and its finalizer runs before the pages are freed.
    """
    pages = np.empty(size, np.uint8)
    if not size:  # CUDA refuses 0 bytes
        return torch.from_numpy(pages)

    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(pages.ctypes.data, size, 0)) == 0:
        unlock_finalizer = weakref.finalize(pages, runtime.cudaHostUnregister, pages.ctypes.data)
        unlock_finalizer.atexit = False  # CUDA may have ended, and the process gives everything back
    else:
        log.warning(
            "%.2f GB of main memory cannot be pinned, so copies to and from a GPU are slower", size / 1e9
        )
        _clear_cuda_error()

    return torch.from_numpy(pages)


def _clear_cuda_error() -> None:
    """Take back CUDA's last error, which torch would raise after its next kernel, and cannot take back."""
    cuda_major = (torch.version.cuda or "").partition(".")[0]
    with suppress(OSError):  # a torch that has the library within itself
        ctypes.CDLL(f"libcudart.so.{cuda_major}").cudaGetLastError()
