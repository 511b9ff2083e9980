"""Flow control sets how many groups may be live, once per committed batch, by what was measured.

An integral controller keeps shares of stale tokens within their budgets. A cap keeps to what the servers'
memory holds. `LiveLimit` uses both in a run. Formulas and reasons are in docs/staleness.md, section 1.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import BufferConfig, RunConfig

GAIN = 0.015  # how fast the level moves: slowly, as one late group masks many tokens at once
FIRST_GAIN = 0.03  # the same until the first token goes over the bound
QUICK_GAIN = 0.5  # added until then, times the share of the step that was only waiting,
QUICK = 4  # while groups live for less than a quarter of the bound
WAITING = 0.25  # of their time: episodes that wait less for tools end as soon as engines have time
MOST = 0.25  # of the level, that one batch takes at most: a batch may be a single trajectory
BUSY = 0.02  # a trainer that idles less than this gains nothing from more live groups
# share of a KV cache in use: over HIGH the cap shrinks, under LOW it grows
HIGH = 0.8
LOW = 0.6
FACTOR = 1.25  # less than HIGH / LOW: a change of the cap does not lead from one side to the other


class Crossings:
    """Counts tokens when they go over the bound, once each: when a batch has masked them, or while their
    episode or group still runs. `buffer`: its `waiting_tokens` are those that no batch may take yet."""

    def __init__(self, buffer: ReplayBuffer, bound: int) -> None:
        self._buffer = buffer
        self._commits = deque([-math.inf] * (bound + 1), bound + 1)  # times of the newest
        self._counted = 0.0  # tokens that are ready, and were counted while they waited

    def committed(self, masked: float, tokens: float, now: float) -> float:
        """Return what went over the bound since the last commit, as a share of this batch. The batch has so
        many model tokens, of which the share `masked` was masked. What was sampled before the first of the
        newest bound + 1 commits, with this one, is over the bound from now on."""
        last = self._commits[-1]
        before = self._commits[0]
        self._commits.append(now)

        waiting = self._buffer.waiting_tokens
        self._counted += waiting.ended(last, before)
        crossed = waiting.older(self._commits[0]) - waiting.older(before)

        again = min(self._counted, masked * tokens)
        self._counted = (self._counted - again) / 2  # some of them are dropped, and no batch masks these

        return (masked * tokens - again + crossed) / max(1.0, tokens)


class FlowControl:
    """Moves `limit`, how many live groups rule 1 allows now.

    Example: G = 8, a level of 16, a budget of 1%. A batch with 0.2% of its tokens over the bound leads to
    16 · exp(0.015 · (1 − 0.2)) = 16.19, one with 5% to 16 · exp(0.015 · (1 − 5)) = 15.07. At the beginning
    one with none leads from 12 to 12 · exp(0.03 + 0.5 · 0.4) = 15.10, if trainer and episodes waited for 40%.
    """

    def __init__(self, config: BufferConfig) -> None:
        self.groups = config.groups_per_batch
        self.most = config.max_live_groups
        self.level = self.first = (1 + config.target) * self.groups
        self.quick = config.max_staleness * self.groups / QUICK  # L groups live for L / G steps on average
        self._measured = False

    @property
    def limit(self) -> int:
        return round(self.level)

    def spare(self, outside: float) -> int:
        """Return how many groups a run may issue beyond those that it trains: what `update` has added to the
        live ones, if `outside`, the share of their time in which episodes wait for tools, is not small."""
        return max(0, round(self.level - self.first)) if outside >= WAITING else 0

    def update(self, shares: Iterable[tuple[float, float]], grows: bool, waits: float) -> None:
        """Obey the tightest of (measured share, its budget). `grows`: more live groups would be of use, as
        the trainer idles and the limit is reached; engines, slots and memory still have room then. `waits`,
        w in the docs: the share of the step in which the trainer idled, times the share of their time in
        which the episodes that landed in it waited for tools and rewards."""
        used = max(share / budget for share, budget in shares)
        self._measured |= used > 0

        step = (GAIN if self._measured else FIRST_GAIN) * (1 - used)
        if not self._measured and self.level < self.quick:
            step += QUICK_GAIN * waits

        if step < 0 or grows:
            level = self.level * math.exp(max(step, -MOST))
            self.level = min(max(level, self.groups), self.most)


class KvCap:
    """Moves `limit`, how many live groups the servers have room for.

    Readings of the time since the last commit are given to `read` and added to `retracted`.

    Args:
        groups: groups per batch, G: the cap is never less.
        ahead: usual staleness, in batches: the cap is never more than (1 + ahead) * groups.
    """

    def __init__(self, groups: int, ahead: int) -> None:
        self.groups = groups
        self.most = (1 + ahead) * groups
        self.level = float(self.most)
        self.retracted = 0  # requests of which a server took the KV memory away
        self._uses: defaultdict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))  # sum, count
        self._wait = 0  # commits until what is read shows the last change

    @property
    def limit(self) -> int:
        return int(self.level)

    @property
    def use(self) -> float | None:
        """Return the mean reading of the fullest server; None: nothing was read."""
        return max((total / count for total, count in self._uses.values()), default=None)

    def read(self, server: str, use: float) -> None:
        """Note a server's share of KV memory in use, in [0, 1]."""
        total, count = self._uses[server]
        self._uses[server] = total + use, count + 1

    def update(self, live: int, counts: bool = True) -> None:
        """Move the limit after a commit, before which `live` groups were live. `counts`: what was read since
        the last commit is of a plain step, not of a validation."""
        use = self.use
        retracted = self.retracted

        self._uses.clear()
        self.retracted = 0

        self._wait -= 1
        if self._wait >= 0 or not counts:
            return

        before = self.level
        if retracted or (use is not None and use > HIGH):
            self.level = max(self.groups, min(before, live) / FACTOR)
        elif use is not None and use < LOW:
            self.level = min(self.most, before * FACTOR)

        if self.level != before:
            self._wait = -(-self.limit // self.groups)  # the steps for which a group is live


# -- flow control in the run -------------------------------------------------------------------------------


TRAINER_IDLE = "async/trainer_idle_frac"
ROLLOUT_IDLE = "async/rollout_idle_frac"


class LiveLimit:
    """Moves `buffer.live_limit` and `buffer.spare` after each commit, unless buffer.target_staleness is a
    number: flow control, within what the servers' memory holds. A restarted coordinator begins anew."""

    def __init__(self, config: RunConfig, buffer: ReplayBuffer) -> None:
        section = config.buffer
        self.buffer = buffer
        self.adapts = section.target_staleness == "auto"
        self.budget = section.stale_budget
        self.control = FlowControl(section)
        self.kv = KvCap(section.groups_per_batch, section.usual_staleness)

        self._servers = config.engine.remote
        # With shifts the trainer waits for theirs in any case: then more live groups are of use to engines.
        self._waits = ROLLOUT_IDLE if config.shifts else TRAINER_IDLE
        self.crossings = Crossings(buffer, section.max_staleness)
        self._crossed = 0.0  # share of tokens that went over the bound and that the control does not know yet
        self._idle = 0.0  # share of a step that the trainer waited, as last known
        self._engines: frozenset[str] = frozenset()

    def committed(
        self, row: Mapping[str, float], taken: int, engines: Collection[str], validating: bool, now: float
    ) -> None:
        """Move the limit after a commit, whose step has taken so many new groups; `row` has its metrics. The
        limit does not change after a step that ends in a validation, or that has other engines than the one
        before: its times are not those of plain steps."""
        same = self._engines == frozenset(engines)
        self._engines = frozenset(engines)
        plain = same and not validating

        live = self.buffer.tally.open(self.buffer.committed) + taken  # before the commit
        self.kv.update(live, plain)

        self._idle = row.get(self._waits, self._idle)  # it comes with heartbeats
        masked = row.get("staleness/masked_token_frac", 0.0)
        tokens = row.get("trainer/model_tokens", 0.0)
        self._crossed += self.crossings.committed(masked, tokens, now)

        if self.adapts:
            if plain:
                grows = self._idle >= BUSY and live >= self.control.limit
                outside = row.get("timing_s/tools/mean", 0.0) + row.get("timing_s/reward/mean", 0.0)
                outside /= max(1e-9, outside, row.get("timing_s/episode/mean", 0.0))
                self.control.update([(self._crossed, self.budget)], grows, self._idle * outside)
                self.buffer.spare = self.control.spare(outside)
                self._crossed = 0.0

            self.buffer.live_limit = min(self.control.limit, self.kv.limit)

    def gauges(self) -> dict[str, float]:
        found = {"async/live_limit": float(self.buffer.max_live)}
        if self._servers:
            found["rollout/retractions"] = float(self.kv.retracted)
        return found if self.kv.use is None else found | {"rollout/kv_use": self.kv.use}
