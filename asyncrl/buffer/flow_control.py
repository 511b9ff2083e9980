"""Flow control: an integral controller of the number of live groups, moved once per committed batch.

Pure arithmetic. The formula and its reasons are in docs/staleness.md, section 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from asyncrl.buffer.lifetimes import Lifetimes
from asyncrl.config.training import START

GAIN = 0.015  # how fast the level moves: slowly, as one late group masks many tokens at once
FIRST_GAIN = 0.03  # until something is measured for the first time
MOST = 0.25  # of the level, that one batch takes at most: a batch may be a single trajectory
BUSY = 0.02  # a trainer that idles less than this gains nothing from more live groups


class Crossings:
    """Counts tokens when they go over the bound, once each: when a batch has masked them, or while their
    episode or group still runs. `waiting`: tokens that no batch may take yet."""

    def __init__(self, waiting: Lifetimes, bound: int) -> None:
        self._waiting = waiting
        self._commits: deque[float] = deque(maxlen=bound + 1)  # times of the newest
        self._overdue = 0.0  # tokens that were over the bound after the last commit, and waited

    def committed(self, masked: float, tokens: float, now: float) -> float:
        """The share of a batch that went over the bound since the last commit. It has so many model tokens,
        of which the share `masked` was masked. The newest version of bound + 1 is that of this commit: what
        was sampled before the first of these is over the bound from now on."""
        self._commits.append(now)
        full, before = len(self._commits) == self._commits.maxlen, self._overdue
        self._overdue = self._waiting.older(self._commits[0]) if full else 0.0
        return masked + (self._overdue - before) / max(1.0, tokens)


class FlowControl:
    """`limit`: live groups that rule 1 allows now.

    Args:
        groups: groups per batch, G: the limit is never less.
        bound: max_staleness, in batches, η: the limit is never more than (1 + η) * groups.

    Example: G = 8, a level of 16, a budget of 1%. A batch with 0.2% of its tokens over the bound leads to
    16 · exp(0.015 · (1 − 0.2)) = 16.19, one with 5% to 16 · exp(0.015 · (1 − 5)) = 15.07.
    """

    def __init__(self, groups: int, bound: int) -> None:
        self.groups, self.most = groups, (1 + bound) * groups
        self.level = (1 + min(START, bound)) * groups
        self._gain = FIRST_GAIN

    @property
    def limit(self) -> int:
        return round(self.level)

    def update(self, shares: Iterable[tuple[float, float]], grows: bool) -> None:
        """Obey the tightest of (measured share, its budget). `grows`: more live groups would be of use, as
        the trainer idles and the limit is reached; engines, slots and memory still have room then."""
        used = max(share / budget for share, budget in shares)
        if used > 0:
            self._gain = GAIN
        step = self._gain * (1 - used)
        if step < 0 or grows:
            level = self.level * math.exp(max(step, -MOST))
            self.level = min(max(level, self.groups), self.most)
