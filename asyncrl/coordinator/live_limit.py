"""Flow control in the run: after each commit, what was measured in the step moves the limit on live groups.

waits for: a commit
unblocks: admission (rule 1)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from asyncrl.buffer.flow_control import BUDGET, FlowControl, Measured
from asyncrl.buffer.kv_cap import KvCap
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import RunConfig

TRAINER_IDLE, ROLLOUT_IDLE = "async/trainer_idle_frac", "async/rollout_idle_frac"


class LiveLimit:
    """Moves `buffer.live_limit` after each commit, unless buffer.target_staleness is a number: by the
    servers' memory at once, by flow control in the turn of the loop after it, as the turn of a commit is the
    longest. After a restart of the coordinator it begins anew: what was measured is not stored."""

    def __init__(self, config: RunConfig, buffer: ReplayBuffer) -> None:
        section = config.buffer
        self.buffer, self.seconds = buffer, config.rollout.episode_timeout
        self.adapts = section.target_staleness == "auto"
        self.control = FlowControl(section.groups_per_batch, section.max_staleness, config.weights.every)
        self.kv, self._servers = KvCap(section.groups_per_batch, section.max_staleness), config.engine.remote
        self._commits: deque[float] = deque(maxlen=section.max_staleness + 1)  # times of the newest
        self.life = self.token_age = 0.0
        self._idle = {TRAINER_IDLE: 0.0, ROLLOUT_IDLE: 0.0}  # newest known shares
        self._engines: frozenset[str] = frozenset()
        self._row: Mapping[str, float] | None = None  # of a step that was committed and not looked at
        self._plain = False  # it may move the limit

    def committed(self, row: Mapping[str, float], engines: Collection[str], validating: bool) -> None:
        """A step is committed; `row` has its metrics. The limit does not change after a step that ends in a
        validation, or that has other engines than the one before: its times are not those of plain steps."""
        same, self._engines = self._engines == frozenset(engines), frozenset(engines)
        self._row, self._plain = row, same and not validating
        self.kv.update(self.buffer.tally.open(self.buffer.committed) + self.kv.groups, self._plain)
        if self.adapts:
            self._move()

    def tick(self, now: float) -> None:
        """At the beginning of each turn of the loop: measure, and move the limit, if a step was committed."""
        if self._row is None:
            return
        row, self._row = self._row, None
        meter = self.buffer.meter
        self.life = meter.life(now, self.seconds)
        self.token_age = meter.token_age(1 - BUDGET, now, self.seconds)
        self._commits.append(now)
        if self._plain and self.adapts and self.life:
            self.control.update(self._measured(row))
            self._move()

    def _move(self) -> None:
        self.buffer.live_limit = min(self.control.limit, self.kv.limit)

    def _measured(self, row: Mapping[str, float]) -> Measured:
        self._idle = {name: row.get(name, known) for name, known in self._idle.items()}  # by heartbeats
        seconds, idle, rollout = row["timing_s/step"], self._idle[TRAINER_IDLE], self._idle[ROLLOUT_IDLE]
        self.buffer.meter.committed(rollout)
        return Measured(
            seconds=seconds,
            train=seconds * (1 - idle),
            rollout=seconds * (1 - rollout),
            trainer_idle=idle,
            masked=row.get("staleness/masked_token_frac", 0.0),
            overdue=self._overdue(row),
            life=self.life,
            unloaded=self.buffer.meter.unloaded,
            settled=self.buffer.meter.settled_groups,
            token_age=self.token_age,
        )

    def _overdue(self, row: Mapping[str, float]) -> float:
        """In batches: tokens over the bound in the next batch that no batch may train yet. The newest version
        of max_staleness + 1 is that of the last commit; what was sampled before the first of them is over."""
        tokens = row.get("trainer/model_tokens", 0.0)
        if not tokens or len(self._commits) <= self.control.bound:
            return 0.0
        return self.buffer.meter.older(self._commits[0]) / tokens

    def gauges(self) -> dict[str, float]:
        found = {
            "async/live_limit": float(self.buffer.max_live),
            "async/group_life_s": self.life,
            "async/token_age_p99_s": self.token_age,
        }
        if self._servers:
            found["rollout/retractions"] = float(self.kv.retracted)
        return found if self.kv.use is None else found | {"rollout/kv_use": self.kv.use}
