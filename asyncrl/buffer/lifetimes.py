"""Estimates how long groups live and tokens wait, while some of them still run; the deadlines that follow."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import chain, takewhile
from typing import Literal

import numpy as np

from asyncrl.buffer.records import GroupRecord

NEWEST = 256  # groups that the patience is estimated from: a median needs few, and follows changes
ESTIMATE_EVERY = 0.25  # seconds: many groups are issued at once, and one estimate serves them all


class Lifetimes:
    """The newest `size` lifetimes that ended, and those that still run, which count as lasting longer than
    until now: the product-limit estimate (Kaplan and Meier, JASA 53, 1958). A lifetime that began before the
    window counts only from the age that it had then (delayed entry), as short ones of that time have left it.

    Times are of the caller's clock, in seconds. `weight` is a number of tokens, or 1.

    Example: three of weight 1 last 1, 2 and 3 s, and the second still runs. The share that lasts longer falls
    to 2/3 at 1 s and to 0 at 3 s, so 1 s is the quantile of 0.3.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._running: dict[Hashable, list[tuple[float, float]]] = {}  # (began, weight), in order of begin
        self._ended: deque[tuple[float, float, float]] = deque()  # (began, weight, ended)
        self._since = -math.inf  # when the window begins: the newest end that is not in it any more

    def begin(self, key: Hashable, now: float, weight: float = 1.0) -> None:
        """Begins one more lifetime of `key`."""
        self._running.setdefault(key, []).append((now, weight))

    def end(self, key: Hashable, now: float) -> None:
        """End all lifetimes of `key`, if there are any."""
        for began, weight in self._running.pop(key, ()):
            self._ended.append((began, weight, now))
            if len(self._ended) > self.size:
                self._since = self._ended.popleft()[-1]

    def forget(self, key: Hashable) -> None:
        """Leave out the lifetimes of `key` that still run."""
        self._running.pop(key, None)

    def older(self, than: float) -> float:
        """Weight that runs and began before `than`."""
        begun = takewhile(lambda lives: lives[0][0] < than, self._running.values())
        return sum(weight for lives in begun for began, weight in lives if began < than)

    def ended(self, since: float, than: float) -> float:
        """Weight that ended after `since` and began before `than`, of the window."""
        newest = takewhile(lambda life: life[2] > since, reversed(self._ended))
        return sum(weight for began, weight, _ in newest if began < than)

    def quantile(self, q: float, now: float) -> float:
        """The duration that a share q of the weight does not exceed; inf where too much runs to know it."""
        ages, survival = self._survival(now)
        found = np.flatnonzero(survival <= 1 - q + 1e-9)
        return float(ages[found[0]]) if found.size else math.inf

    def _survival(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """(ages at which a life ended or was last seen, ascending; share of the weight that lasts longer)."""
        runs = chain.from_iterable(self._running.values())
        rows = np.array([*self._ended, *((b, w, math.inf) for b, w in runs)], float).reshape(-1, 3)
        began, weight, ended = rows[rows[:, 1] > 0].T

        until = np.minimum(ended, now) - began
        entered = self._since - began

        ages, place = np.unique(until, return_inverse=True)
        ends = np.bincount(place, weight * ((ended <= now) & (entered < until)), ages.size)
        leave = np.bincount(place, weight, ages.size)
        enter = np.bincount(np.searchsorted(ages, entered, "right"), weight, ages.size + 1)[:-1]

        at_risk = np.cumsum(enter) - np.cumsum(leave) + leave
        share = np.divide(ends, at_risk, out=np.zeros(ages.size), where=ends > 0)
        return ages, np.where((curve := np.cumprod(np.maximum(0, 1 - share))) < 1e-12, 0.0, curve)


class Deadlines:
    """The deadlines of partial groups, at which their baselines are fixed: as long after the start of a group
    as half of the groups need until all of their members have ended (docs/staleness.md, section 4).

    Args:
        patience: from the start of a group to its deadline; "auto": estimated; inf: there are no deadlines.
    """

    def __init__(self, patience: float | Literal["auto"]) -> None:
        self._fixed = patience
        self._lifetimes = Lifetimes(NEWEST)  # from the start of a group to the end of its last member
        self._heap: list[tuple[float, int]] = []  # (deadline, group)
        self._estimate = math.inf
        self._estimated_at = -math.inf

    def patience(self, now: float) -> float:
        """Seconds from start to deadline for a group that is issued now. "auto": the time in which half of
        the groups end all of their members; inf while fewer than half have. What the group itself will do has
        no influence on it."""
        if self._fixed != "auto":
            return self._fixed

        if not 0 <= now - self._estimated_at < ESTIMATE_EVERY:
            self._estimate = self._lifetimes.quantile(0.5, now)
            self._estimated_at = now
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
        """Note that all members have ended. A second call changes nothing."""
        self._lifetimes.end(group.id, now)

    def forget(self, group: GroupRecord) -> None:
        """The group is over. One that was dropped while members were running gives no duration."""
        self._lifetimes.forget(group.id)

    def passed(self, now: float) -> Iterator[int]:
        """Groups whose deadline has passed since the last call."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
