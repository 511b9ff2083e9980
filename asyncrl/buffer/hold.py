"""`on_stale=hold`: places in the batch being filled and in the next ones, and the groups that need them.

A group whose oldest token was sampled by version s is within the bound until batch s + max_staleness: it is
due then at the latest. While no batch owes more places than there are until then, every group can be taken in
time. Both what may be taken and what may start is decided by that (proof: docs/staleness.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Places:
    """`left[j]`: places up to the batch j after the current one, less the groups due by then; j = 0 … bound.

    Args:
        step: number of committed batches, V.
        free: places left in the current batch.
        per_batch: places of each batch after it.
        bound: max_staleness.
        floors: of each live group that is not taken, the oldest version of its tokens.

    Example: V = 7, a bound of 1, two places a batch, the floors 6, 6 and 7. Two groups are due in batch 7,
    the third in batch 8: `left` is [0, 1]. Another group may start on version 7, but not on version 6.
    """

    def __init__(self, step: int, free: int, per_batch: int, bound: int, floors: Iterable[int]) -> None:
        self.free, self._oldest = free, step - bound
        self.left = [free + ahead * per_batch for ahead in range(bound + 1)]
        for floor, groups in Counter(floors).items():
            self._owe(floor, groups)

    def may_take(self, floor: int) -> bool:
        """A group takes a place of the current batch. Those due before it must still find theirs."""
        return self.free > 0 and all(left > 0 for left in self.left[: self._due(floor)])

    def take(self, floor: int) -> None:
        self._owe(floor, -1)
        self.free -= 1
        self.left = [left - 1 for left in self.left]

    def needed(self, floor: int) -> int:
        """The oldest version on which an episode of a group may start: all are still taken in time."""
        full = [ahead for ahead, left in enumerate(self.left[: self._due(floor)]) if left <= 0]
        return self._oldest + (full[-1] + 1 if full else 0)

    def move(self, before: int, after: int) -> None:
        """The floor of a group has changed."""
        self._owe(before, -1)
        self._owe(after, 1)

    @property
    def may_close(self) -> bool:
        """The current batch may be trained without its free places."""
        return all(left >= self.free for left in self.left)

    def _owe(self, floor: int, groups: int) -> None:
        for ahead in range(self._due(floor), len(self.left)):
            self.left[ahead] -= groups

    def _due(self, floor: int) -> int:
        """How many batches ahead a group with this floor is due at the latest."""
        return max(0, floor - self._oldest)
