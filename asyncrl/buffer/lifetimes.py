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

ESTIMATED_GROUPS = 256  # groups that the patience is estimated from: a median needs few, and follows changes
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
        self._running_lives: dict[
            Hashable, list[tuple[float, float]]
        ] = {}  # (began, weight), in order of begin
        self._ended_lives: deque[tuple[float, float, float]] = deque()  # (began, weight, ended)
        self._window_start = -math.inf  # when the window begins: the newest end that is not in it any more

    def begin(self, key: Hashable, now: float, weight: float = 1.0) -> None:
        """Begins one more lifetime of `key`."""
        self._running_lives.setdefault(key, []).append((now, weight))

    def end_lives(self, key: Hashable, now: float) -> None:
        """End all lifetimes of `key`, if there are any."""
        for began, weight in self._running_lives.pop(key, ()):
            self._ended_lives.append((began, weight, now))
            if len(self._ended_lives) > self.size:
                self._window_start = self._ended_lives.popleft()[-1]

    def forget_lives(self, key: Hashable) -> None:
        """Leave out the lifetimes of `key` that still run."""
        self._running_lives.pop(key, None)

    def running_weight(self, began_before: float) -> float:
        """Weight that runs and began before `than`."""
        older_lives = takewhile(lambda lives: lives[0][0] < began_before, self._running_lives.values())
        return sum(weight for lives in older_lives for began, weight in lives if began < began_before)

    def ended_weight(self, ended_after: float, began_before: float) -> float:
        """Weight that ended after `since` and began before `than`, of the window."""
        newest_lives = takewhile(lambda life: life[2] > ended_after, reversed(self._ended_lives))
        return sum(weight for began, weight, _ in newest_lives if began < began_before)

    def quantile(self, fraction: float, now: float) -> float:
        """The duration that a share q of the weight does not exceed; inf where too much runs to know it."""
        ages, survival = self._survival(now)
        reached = np.flatnonzero(survival <= 1 - fraction + 1e-9)
        return float(ages[reached[0]]) if reached.size else math.inf

    def _survival(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """(ages at which a life ended or was last seen, ascending; share of the weight that lasts longer)."""
        running_lives = chain.from_iterable(self._running_lives.values())
        rows = np.array([*self._ended_lives, *((b, w, math.inf) for b, w in running_lives)], float).reshape(
            -1, 3
        )
        began_at, weights, ended_at = rows[rows[:, 1] > 0].T

        durations = np.minimum(ended_at, now) - began_at
        entry_ages = self._window_start - began_at

        ages, age_index = np.unique(durations, return_inverse=True)
        ended_weight = np.bincount(
            age_index, weights * ((ended_at <= now) & (entry_ages < durations)), ages.size
        )
        leaving_weight = np.bincount(age_index, weights, ages.size)
        entering_weight = np.bincount(np.searchsorted(ages, entry_ages, "right"), weights, ages.size + 1)[:-1]

        at_risk = np.cumsum(entering_weight) - np.cumsum(leaving_weight) + leaving_weight
        hazard = np.divide(ended_weight, at_risk, out=np.zeros(ages.size), where=ended_weight > 0)
        return ages, np.where((curve := np.cumprod(np.maximum(0, 1 - hazard))) < 1e-12, 0.0, curve)


class Deadlines:
    """The deadlines of partial groups, at which their baselines are fixed: as long after the start of a group
    as half of the groups need until all of their members have ended (docs/staleness.md, section 4).

    Args:
        patience: from the start of a group to its deadline; "auto": estimated; inf: there are no deadlines.
    """

    def __init__(self, patience: float | Literal["auto"]) -> None:
        self._fixed_patience = patience
        self._lifetimes = Lifetimes(
            ESTIMATED_GROUPS
        )  # from the start of a group to the end of its last member
        self._deadline_heap: list[tuple[float, int]] = []  # (deadline, group)
        self._estimate = math.inf
        self._estimated_at = -math.inf

    def patience(self, now: float) -> float:
        """Seconds from start to deadline for a group that is issued now. "auto": the time in which half of
        the groups end all of their members; inf while fewer than half have. What the group itself will do has
        no influence on it."""
        if self._fixed_patience != "auto":
            return self._fixed_patience

        if not 0 <= now - self._estimated_at < ESTIMATE_EVERY:
            self._estimate = self._lifetimes.quantile(0.5, now)
            self._estimated_at = now
        return self._estimate

    def start_group(self, group: GroupRecord, now: float) -> None:
        """Its first member was assigned."""
        group.started = now
        self._lifetimes.begin(group.id, now)
        self._set_deadline(group, now)

    def restore_group(self, group: GroupRecord, now: float) -> None:
        """Take over a group from the store. If it was started before this process, the clock of that time is
        gone: its deadline is set anew, and what has landed counts as in time."""
        if not math.isnan(group.started):
            group.started = -math.inf
            self._set_deadline(group, now)

        if not group.settled:
            group.baseline = ()

    def _set_deadline(self, group: GroupRecord, now: float) -> None:
        group.deadline = now + group.patience
        if group.deadline < math.inf:
            heapq.heappush(self._deadline_heap, (group.deadline, group.id))

    def end_group(self, group: GroupRecord, now: float) -> None:
        """Note that all members have ended. A second call changes nothing."""
        self._lifetimes.end_lives(group.id, now)

    def forget_group(self, group: GroupRecord) -> None:
        """The group is over. One that was dropped while members were running gives no duration."""
        self._lifetimes.forget_lives(group.id)

    def pop_passed(self, now: float) -> Iterator[int]:
        """Groups whose deadline has passed since the last call."""
        while self._deadline_heap and self._deadline_heap[0][0] <= now:
            yield heapq.heappop(self._deadline_heap)[1]
