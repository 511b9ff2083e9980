"""Flow control in the run: after each commit, what was measured in the step moves the limit on live groups.

waits for: a commit
unblocks: admission (rule 1)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from asyncrl.buffer.flow_control import BUSY, Crossings, FlowControl, KvCap
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import RunConfig

TRAINER_IDLE = "async/trainer_idle_frac"


class LiveLimit:
    """Moves `buffer.live_limit` after each commit, unless buffer.target_staleness is a number: flow control,
    within what the servers' memory holds. After a restart of the coordinator it begins anew."""

    def __init__(self, config: RunConfig, buffer: ReplayBuffer) -> None:
        section = config.buffer
        self.buffer, self.seconds = buffer, config.rollout.episode_timeout
        self.adapts, self.budget = section.target_staleness == "auto", section.stale_budget
        self.control = FlowControl(section.groups_per_batch, section.max_staleness)
        self.kv, self._servers = KvCap(section.groups_per_batch, section.max_staleness), config.engine.remote
        self.crossings = Crossings(buffer.waiting_tokens, section.max_staleness)
        self._crossed = 0.0  # share of tokens that went over the bound and that the control does not know yet
        self._idle = 0.0  # share of a step that the trainer waited, as last known
        self._engines: frozenset[str] = frozenset()
        self._measures = False  # a step was committed, and the gauges are older
        self.life, self.token_age = 0.0, math.inf

    def committed(
        self, row: Mapping[str, float], engines: Collection[str], validating: bool, now: float
    ) -> None:
        """A step is committed; `row` has its metrics. The limit does not change after a step that ends in a
        validation, or that has other engines than the one before: its times are not those of plain steps."""
        same, self._engines = self._engines == frozenset(engines), frozenset(engines)
        plain, groups = same and not validating, self.control.groups
        live = self.buffer.tally.open(self.buffer.committed) + groups  # before the commit
        self.kv.update(live, plain)
        self._idle, self._measures = row.get(TRAINER_IDLE, self._idle), True  # it comes with heartbeats
        masked, tokens = row.get("staleness/masked_token_frac", 0.0), row.get("trainer/model_tokens", 0.0)
        self._crossed += self.crossings.committed(masked, tokens, now)
        if self.adapts:
            if plain:
                grows = self._idle >= BUSY and live >= self.control.limit
                self.control.update([(self._crossed, self.budget)], grows)
                self._crossed = 0.0
            self.buffer.live_limit = min(self.control.limit, self.kv.limit)

    def tick(self, now: float) -> None:
        """Measure the gauges in the turn of the loop that follows a commit, which is the longest one."""
        if self._measures:
            self._measures = False
            self.life = self.buffer.lives.mean(now, self.seconds)
            self.token_age = self.buffer.waiting_tokens.quantile(0.99, now)

    def gauges(self) -> dict[str, float]:
        found = {"async/live_limit": float(self.buffer.max_live), "async/group_life_s": self.life}
        if self.token_age < math.inf:
            found["async/token_age_p99_s"] = self.token_age
        if self._servers:
            found["rollout/retractions"] = float(self.kv.retracted)
        return found if self.kv.use is None else found | {"rollout/kv_use": self.kv.use}
