"""Flow control: how many groups may be live, so that few tokens are over the bound and the trainer has data.

Pure arithmetic, once per committed batch; formulas and symbols are those of docs/staleness.md, section 1. The
share of tokens over the bound has priority: where long lives do not allow both, the trainer waits.
"""

from __future__ import annotations

import math

import msgspec

from asyncrl.config.training import START

BUDGET = 0.01  # share of model tokens that may be over the bound
AIM = 0.8 * BUDGET  # the share that the correction aims at: less, as masked tokens come in bursts
CAUTION = 1.15  # the correction c at the beginning: what waits add to the ages in runs with slow tools
GAIN = 0.015  # how fast the correction moves, per batch: slowly, as one late group masks many tokens at once
MOST_CROSSED = 1.0  # batches' worth that the correction counts at once: a batch may be a single trajectory
DOUBT = 1.0  # DOUBT / sqrt(groups settled so far): relative amount by which the true tail may be longer
BUSY = 0.02  # a trainer that idles less than this gains nothing from more live groups
WAITING = 0.75  # batches' worth of groups that have settled and are not committed, where the budget decides
# Groups that must have settled before the limit grows (the slowest ones are seen last): so many, or those of
# so many batches where batches are small.
WARM, WARM_BATCHES = 64, 8


class Measured(msgspec.Struct, frozen=True):
    """What was measured when a batch was committed. Times in seconds; shares in [0, 1]."""

    seconds: float  # from the last commit to this one
    train: float  # seconds of these in which the trainer worked, t
    rollout: float  # in which the engines worked, g
    trainer_idle: float  # share of these in which the trainer waited
    masked: float  # share of the batch's model tokens that were over the bound, m
    overdue: float  # batches' worth of tokens that are over the bound and that no batch may train yet
    life: float  # mean seconds from a group's first slot until it settled, W
    unloaded: float  # share of `life` that would remain at the highest sampling speed seen so far, u
    token_age: float  # seconds that a share 1 - BUDGET of the tokens do not exceed, A
    settled: int  # groups settled so far, N


class FlowControl:
    """`limit`: live groups that rule 1 allows now, L.

    Args:
        groups: groups per batch, G.
        bound: max_staleness, in batches, η.
        every: batches between two published versions, k.
        limit: L at the beginning; None: (1 + min(START, bound)) * groups.
    """

    def __init__(self, groups: int, bound: int, every: int = 1, limit: float | None = None) -> None:
        self.groups, self.bound = groups, bound
        self.horizon = max(0.5, bound + 0.5 - (every - 1))
        self.level = float((1 + min(START, bound)) * groups if limit is None else limit)
        self.caution, self._overdue = CAUTION, 0.0

    @property
    def limit(self) -> int:
        return round(self.level)

    def update(self, m: Measured) -> None:
        """After a commit."""
        size, needed = self.groups, max(m.train, m.rollout, 1e-9)
        ahead = size * max(1.0, m.life * m.unloaded / needed)
        feed = min(size + ahead + math.sqrt(ahead), (1 + self.bound) * size)
        unsure = 1 + DOUBT / math.sqrt(max(1, m.settled))
        safe = self.caution * unsure * m.token_age / self.horizon
        within = size * (WAITING + m.life / max(safe, 1e-9))
        crossed, self._overdue = m.masked + m.overdue - self._overdue, m.overdue
        self._correct(crossed, decides=within < feed)
        wanted = max(size, min(feed, within))
        step = (wanted - self.level) / (1 + self.level / size)
        grows = m.trainer_idle >= BUSY and m.settled >= min(WARM, WARM_BATCHES * size)
        if abs(wanted - self.level) >= 1 and (step < 0 or grows):
            self.level += min(max(step, -size / 4), size / 4)

    def _correct(self, crossed: float, decides: bool) -> None:
        """Move the correction by the tokens that went over the bound in this step, whether a batch had them
        or not yet: the measured ages leave out the waits for the trainer and for the weights. `decides`: the
        budget limits the live groups, not the need of the trainer."""
        over = min(max(crossed, -MOST_CROSSED), MOST_CROSSED) / AIM - 1
        if decides or over > 0:
            self.caution = min(max(self.caution * math.exp(GAIN * over), 0.5), 4.0)
