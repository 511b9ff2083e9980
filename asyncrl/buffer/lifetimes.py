"""Estimates how long groups live and tokens wait while some still run, and sets deadlines of groups."""

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
    """The product-limit estimate (Kaplan and Meier, JASA 53, 1958) over a window of lifetimes.

    The window has the newest `size` lifetimes that ended and all that still run. A running lifetime counts as
    longer than its present age. A lifetime that began before the window counts only from its age at the
    window's start (delayed entry), as short lifetimes of that time have left the window.

    Times are of the caller's clock, in seconds. `weight` is a number of tokens, or 1.

    Example: three lifetimes of weight 1 last 1, 2 and 3 s, and the second still runs. The fraction that lasts
    longer falls to 2/3 at 1 s and to 0 at 3 s, so 1 s is the quantile of 0.3.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Pairs (begin, weight) of running lives, in order of begin.
        self._running_lives: dict[Hashable, list[tuple[float, float]]] = {}
        self._ended_lives: deque[tuple[float, float, float]] = deque()  # (began, weight, ended)
        self._window_start = -math.inf  # begin of the window: the newest end that has left the window

    def begin_life(self, key: Hashable, now: float, weight: float = 1.0) -> None:
        """Begin a further lifetime of `key`."""
        self._running_lives.setdefault(key, []).append((now, weight))

    def end_lives(self, key: Hashable, now: float) -> None:
        """End all running lifetimes of `key`."""
        for began, weight in self._running_lives.pop(key, ()):
            self._ended_lives.append((began, weight, now))
            if len(self._ended_lives) > self.size:
                self._window_start = self._ended_lives.popleft()[-1]

    def forget_lives(self, key: Hashable) -> None:
        """Remove the running lifetimes of `key`."""
        self._running_lives.pop(key, None)

    def running_weight(self, began_before: float) -> float:
        """Return the weight of running lifetimes that began before a time."""
        older_lives = takewhile(lambda lives: lives[0][0] < began_before, self._running_lives.values())
        return sum(weight for lives in older_lives for began, weight in lives if began < began_before)

    def ended_weight(self, ended_after: float, began_before: float) -> float:
        """Return the weight of ended lifetimes of the window, by time of end and of begin."""
        newest_lives = takewhile(lambda life: life[2] > ended_after, reversed(self._ended_lives))
        return sum(weight for began, weight, _ in newest_lives if began < began_before)

    def quantile(self, fraction: float, now: float) -> float:
        """Return the duration that `fraction` of the weight does not exceed; inf if too much still runs."""
        ages, survival = self._survival(now)
        reached = np.flatnonzero(survival <= 1 - fraction + 1e-9)
        return float(ages[reached[0]]) if reached.size else math.inf

    def _survival(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the ages at which lives ended or were last seen, and the fraction that lasts longer."""
        running_lives = chain.from_iterable(self._running_lives.values())
        lives = [*self._ended_lives, *((began, weight, math.inf) for began, weight in running_lives)]
        table = np.array(lives, float).reshape(-1, 3)
        began_at, weights, ended_at = table[table[:, 1] > 0].T

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
        survival = np.cumprod(np.maximum(0, 1 - hazard))
        return ages, np.where(survival < 1e-12, 0.0, survival)


class Deadlines:
    """The deadlines of partial groups, at which their baselines are fixed.

    The time from a group's start to its deadline is the time in which half of the groups end all their
    members (docs/background/staleness.md, section 4).

    `lifetimes` of groups last from their start to the end of their last member.

    Args:
        patience: seconds from the start of a group to its deadline; "auto": estimated; inf: no deadlines.
    """

    def __init__(self, patience: float | Literal["auto"]) -> None:
        self._fixed_patience = patience
        self.lifetimes = Lifetimes(ESTIMATED_GROUPS)
        self._deadline_heap: list[tuple[float, int]] = []  # (deadline, group)
        self._estimate = math.inf
        self._estimated_at = -math.inf

    def patience(self, now: float) -> float:
        """Return the seconds from start to deadline for a group that is issued now.

        The estimate is inf while fewer than half of the groups have ended all their members. The group itself
        has no influence on its deadline.
        """
        if self._fixed_patience != "auto":
            return self._fixed_patience

        if not 0 <= now - self._estimated_at < ESTIMATE_EVERY:
            self._estimate = self.lifetimes.quantile(0.5, now)
            self._estimated_at = now
        return self._estimate

    def start_group(self, group: GroupRecord, now: float) -> None:
        """Start the clock of a group, whose first member was assigned."""
        group.started = now
        self.lifetimes.begin_life(group.id, now)
        self._set_deadline(group, now)

    def restore_group(self, group: GroupRecord, now: float) -> None:
        """Take over a group from the store.

        A group that was started before this process gets a new deadline, as the clock of that time is gone,
        and its landed members count as in time.
        """
        if not math.isnan(group.started):
            group.started = -math.inf
            self._set_deadline(group, now)

        if not group.settled:
            group.baseline = ()

    def _set_deadline(self, group: GroupRecord, now: float) -> None:
        group.deadline = now + group.patience
        if group.deadline < math.inf:
            heapq.heappush(self._deadline_heap, (group.deadline, group.id))

    def pop_passed(self, now: float) -> Iterator[int]:
        """Yield the ids of groups whose deadline has passed since the last call."""
        while self._deadline_heap and self._deadline_heap[0][0] <= now:
            yield heapq.heappop(self._deadline_heap)[1]
