"""Which worker gets the next episode."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W")


class FreeSlots(Generic[W]):
    """The free slots of the workers in one turn of the loop.

    Args:
        workers: each with the number of its free slots, and the policy versions that it can sample with,
            ascending: those of all servers, or that of its own engine.

    The cost of a `take` grows with the logarithm of the number of workers, and with the number of different
    newest versions.
    """

    def __init__(self, workers: Iterable[tuple[W, int, Sequence[int]]]) -> None:
        self._heaps: defaultdict[int, list[tuple[int, int, W, Sequence[int]]]] = defaultdict(list)
        for number, (worker, free, versions) in enumerate(workers):
            if free > 0 and versions:
                self._heaps[versions[-1]].append((-free, number, worker, versions))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def __bool__(self) -> bool:
        return any(self._heaps.values())

    def take(self, needed: int) -> tuple[W, int] | None:
        """Take a slot of the worker with the most free ones that has a version not older than `needed`.
        Returns the worker and the oldest such version that it has; None: there is none."""
        fit = [heap for newest, heap in self._heaps.items() if newest >= needed and heap]
        if not fit:
            return None
        heap = min(fit)
        free, number, worker, versions = heap[0]
        if free < -1:
            heapq.heapreplace(heap, (free + 1, number, worker, versions))
        else:
            heapq.heappop(heap)
        return worker, versions[bisect_left(versions, needed)]
