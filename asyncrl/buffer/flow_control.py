"""Flow control: how many groups may be live, so that few tokens are over the bound, and the trainer is fed.

Pure arithmetic, once per committed batch (docs/staleness.md, section 1). The share of masked tokens has the
precedence: where the tail of the lives does not let both be had, the trainer waits.
"""

from __future__ import annotations

import math

import msgspec

BUDGET = 0.01  # share of model tokens that may be over the bound
AIM = 0.9 * BUDGET  # what the correction goes for
CAUTION = 1.0  # the correction to begin with
GAIN = 0.01  # of the correction, per batch: what is masked comes in bursts, a group at a time
DOUBT = 2.0  # by the root of the groups settled so far: what the tail may be longer than it seems
BUSY = 0.02  # a trainer that idles less than this gains nothing from more live groups
WAITING = 0.75  # batches' worth of groups that have settled and are not committed, where the budget decides
WARM = 128  # groups that have settled before the limit grows: the tail is known last


class Measured(msgspec.Struct, frozen=True):
    """Of one committed batch. Seconds; shares in [0, 1]."""

    seconds: float  # from the last commit to this one
    train: float  # that the trainer worked
    rollout: float  # that the engines worked
    trainer_idle: float  # share
    masked: float  # share of model tokens over the bound
    life: float  # of a group, W; at full load
    unloaded: float  # the share of `life` that would remain on idle engines
    token_age: float  # quantile 1 - BUDGET
    settled: int  # groups, so far


class FlowControl:
    """`limit`: live groups that rule 1 allows now.

    Args:
        groups: groups per batch, G.
        bound: max_staleness.
        every: batches between two published versions.
        limit: to begin with.
    """

    def __init__(self, groups: int, bound: int, every: int = 1, limit: float | None = None) -> None:
        self.groups, self.bound = groups, bound
        self.horizon = max(0.5, bound + 0.5 - (every - 1))
        self.level = float((1 + min(1, bound)) * groups if limit is None else limit)
        self.caution = CAUTION

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
        self._correct(m.masked, decides=within < feed)
        wanted = max(size, min(feed, within))
        step = (wanted - self.level) / (1 + self.level / size)
        grows = m.trainer_idle >= BUSY and m.settled >= WARM
        if abs(wanted - self.level) >= 1 and (step < 0 or grows):
            self.level += min(max(step, -size / 4), size / 4)

    def _correct(self, masked: float, decides: bool) -> None:
        """By what was masked: token ages leave out the waits for the trainer and for the weights."""
        over = masked / AIM - 1
        if decides or over > 0:
            self.caution = min(max(self.caution * math.exp(GAIN * over), 0.5), 4.0)
