"""Memory that the allocator keeps after a step."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim() -> None:
    """Give freed memory back to the system. Nothing where the C library is not glibc.

    Micro-batches of different lengths leave a heap of holes, which only grows by glibc's own rules. Measured
    (tools/bench/heap.py at fa7553b: 135M parameters, bfloat16, one CPU thread; peak and held between steps in
    GB, CPU seconds a step), at micro_batch_tokens 2048 and 8192:

        glibc as it is                 6.1  5.7  25.7     11.3  10.4  31.2
        trimmed after each step        5.6  2.3  26.4     10.5   2.1  30.3
        MALLOC_MMAP_THRESHOLD_=1 MiB   5.0  2.8  33.9      8.9   2.5  40.5
        32 MiB, 64 MiB                 6.1, 7.0  5.6, 6.6  26.5, 25.5 (at 2048)

    A lower threshold saves more at the peak, but maps and clears every tensor anew: a third of the time.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
