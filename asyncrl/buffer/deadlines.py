"""The deadlines of partial groups, at which their baselines are fixed: that long after the start of a group
as half of the groups need until all of their members have ended (docs/staleness.md, section 4)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Literal

from asyncrl.buffer.lifetimes import Lifetimes
from asyncrl.buffer.records import GroupRecord

NEWEST = 256  # groups that the estimate is made from: a median needs few, and follows changes
ESTIMATE_EVERY = 0.25  # seconds: many groups are issued at once, and one estimate serves them all


class Deadlines:
    """The deadlines of the live groups. Times are of the caller's clock, in seconds.

    Args:
        patience: from the start of a group to its deadline; "auto": estimated; inf: there are no deadlines.
    """

    def __init__(self, patience: float | Literal["auto"]) -> None:
        self._fixed = patience
        self._lifetimes = Lifetimes(NEWEST)  # from the start of a group to the end of its last member
        self._heap: list[tuple[float, int]] = []  # (deadline, group)
        self._estimate, self._estimated_at = math.inf, -math.inf

    def patience(self, now: float) -> float:
        """Seconds from start to deadline for a group that is issued now. "auto": the time in which half of
        the groups end all of their members; inf while fewer than half have. What the group itself will do has
        no influence on it."""
        if self._fixed != "auto":
            return self._fixed
        if not 0 <= now - self._estimated_at < ESTIMATE_EVERY:
            self._estimate, self._estimated_at = self._lifetimes.quantile(0.5, now), now
        return self._estimate

    def start(self, group: GroupRecord, now: float) -> None:
        """Its first member was assigned."""
        group.started = now
        self._lifetimes.begin(group.id, now)
        self._set(group, now)

    def restore(self, group: GroupRecord, now: float) -> None:
        """Take over a group from the store. If it was started before this process, the clock of that time is
        gone: its deadline is set anew, and what has landed counts as in time."""
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
        """All of its members have ended. A second call changes nothing."""
        self._lifetimes.end(group.id, now)

    def forget(self, group: GroupRecord) -> None:
        """The group is over. One that was dropped while members were running gives no duration."""
        self._lifetimes.forget(group.id)

    def passed(self, now: float) -> Iterator[int]:
        """Groups whose deadline has passed since the last call."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
