"""When the baselines of partial groups are fixed: so long after a group's start as half of the groups need
until all of their members have ended (docs/staleness.md, section 4)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Literal

from asyncrl.buffer.records import GroupRecord
from asyncrl.buffer.survival import RecentLifetimes

NEWEST = 256  # groups that the estimate is from
ESTIMATE_EVERY = 0.25  # seconds


class Deadlines:
    """Of the live groups. Times are of the caller's clock, in seconds.

    Args:
        patience: from a group's start to its deadline; "auto": estimated; inf: there are no deadlines.
    """

    def __init__(self, patience: float | Literal["auto"]) -> None:
        self._fixed = patience
        self._lifetimes = RecentLifetimes(NEWEST)
        self._began: dict[int, float] = {}  # groups that run, and were started by this process
        self._heap: list[tuple[float, int]] = []  # (deadline, group)
        self._estimate, self._estimated_at = math.inf, -math.inf

    def patience(self, now: float) -> float:
        """Of a group that is issued now: what half of the groups need, as far as is known; inf while fewer
        have ended. What the group itself will do has no influence on it."""
        if self._fixed != "auto":
            return self._fixed
        if not 0 <= now - self._estimated_at < ESTIMATE_EVERY:
            running = ((began, 1.0) for began in self._began.values())
            self._estimate, self._estimated_at = self._lifetimes.curve(running, now).quantile(0.5), now
        return self._estimate

    def start(self, group: GroupRecord, now: float) -> None:
        """Its first member was assigned."""
        group.started, self._began[group.id] = now, now
        self._set(group, now)

    def restore(self, group: GroupRecord, now: float) -> None:
        """A group that was started before this process: the clock of that time is gone, so its deadline is
        set anew, and what has landed is in time for it."""
        if not math.isnan(group.started):
            group.started = -math.inf
            self._set(group, now)
        if not group.settled:
            group.baseline = ()

    def _set(self, group: GroupRecord, now: float) -> None:
        group.deadline = now + group.patience
        if group.deadline < math.inf:
            heapq.heappush(self._heap, (group.deadline, group.id))

    def end(self, group: GroupRecord, now: float) -> None:
        """All of its members have ended; said again, it changes nothing."""
        if (began := self._began.pop(group.id, None)) is not None:
            self._lifetimes.add(began, now)

    def forget(self, group: GroupRecord) -> None:
        """It is over. Its life is not known if it was dropped in the midst of it."""
        self._began.pop(group.id, None)

    def passed(self, now: float) -> Iterator[int]:
        """Groups whose deadline has passed since the last call."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
