"""Flow control: sets how many groups may be live, once per committed batch, by measurements.

`FlowControl`, an integral controller, keeps the fraction of stale tokens within a budget. `KvCap` keeps to
the memory of the servers. `LiveLimit` applies both in a run. Formulas and reasons:
docs/background/staleness.md, section 1, and docs/dev/proofs.md.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import BufferConfig, RunConfig

# Speed of the level after the first stale token: slow, as a single late group masks many tokens at once.
GAIN = 0.015
# Speed of the level until the first stale token.
FIRST_GAIN = 0.03
# Added to FIRST_GAIN, times the fraction of the step that was only waiting, while groups live for less than
# max_staleness / QUICK_LEVEL_DIVISOR steps.
QUICK_GAIN = 0.5
QUICK_LEVEL_DIVISOR = 4
# Fraction of their time in which episodes wait for tools: with less, episodes end as soon as engines have
# time.
MIN_TOOL_WAITING = 0.25
# Largest decrease of the level's logarithm by a batch, as a batch may be a single trajectory.
MAX_LOG_DECREASE = 0.25
# Fraction of a step: a trainer that idles less gains nothing from more live groups.
MIN_TRAINER_IDLE = 0.02
# Fraction of a KV cache in use: above HIGH_KV_USE the cap shrinks, below LOW_KV_USE the cap grows.
HIGH_KV_USE = 0.8
LOW_KV_USE = 0.6
# Factor of a change of the cap, less than HIGH_KV_USE / LOW_KV_USE, so that a change does not cross both
# limits.
CAP_FACTOR = 1.25


class Crossings:
    """Counts each token once when the lag of the token exceeds max_staleness.

    Such a token was masked by a batch, or belongs to an episode or a group that still runs. The
    `waiting_tokens` of `buffer` are tokens that no batch may take yet.
    """

    def __init__(self, buffer: ReplayBuffer, max_staleness: int) -> None:
        self._buffer = buffer
        # Times of the newest commits.
        self._commit_times = deque([-math.inf] * (max_staleness + 1), max_staleness + 1)
        self._counted_tokens = 0.0  # tokens that are ready, and were counted while they waited

    def count_crossed(self, masked_fraction: float, model_tokens: float, now: float) -> float:
        """Return the tokens that became stale since the last commit, as a fraction of the committed batch.

        Tokens sampled before the first of the newest max_staleness + 1 commits, the current commit included,
        are stale from now on.

        Args:
            masked_fraction: fraction of the batch's model tokens that was masked.
            model_tokens: model tokens of the batch.
        """
        last_commit = self._commit_times[-1]
        oldest_commit = self._commit_times[0]
        self._commit_times.append(now)

        waiting_tokens = self._buffer.waiting_tokens
        self._counted_tokens += waiting_tokens.ended_weight(last_commit, oldest_commit)
        newly_crossed = waiting_tokens.running_weight(self._commit_times[0]) - waiting_tokens.running_weight(
            oldest_commit
        )

        counted_before = min(self._counted_tokens, masked_fraction * model_tokens)
        # Some counted tokens are dropped, so that no batch masks them.
        self._counted_tokens = (self._counted_tokens - counted_before) / 2

        return (masked_fraction * model_tokens - counted_before + newly_crossed) / max(1.0, model_tokens)


class FlowControl:
    """Moves `limit`, the number of live groups that rule 1 allows.

    Example: G = 8, a level of 16, a budget of 1%. A batch with 0.2% of stale tokens leads to
    16 · exp(0.015 · (1 − 0.2)) = 16.19, a batch with 5% to 16 · exp(0.015 · (1 − 5)) = 15.07. At the
    beginning a batch without stale tokens leads from 12 to 12 · exp(0.03 + 0.5 · 0.4) = 15.10, if trainer and
    episodes waited for 40% of the time.
    """

    def __init__(self, config: BufferConfig) -> None:
        self.groups_per_batch = config.groups_per_batch
        self.max_level = config.max_live_groups
        self.first_level = (1 + config.target) * self.groups_per_batch
        self.level = self.first_level
        # By Little's law L live groups live for L / G steps on average.
        self.quick_level = config.max_staleness * self.groups_per_batch / QUICK_LEVEL_DIVISOR
        self._stale_measured = False

    @property
    def limit(self) -> int:
        return round(self.level)

    def spare_groups(self, waiting_fraction: float) -> int:
        """Return how many groups a run may issue beyond the groups that are trained.

        That is the number that `update_level` has added to the live groups, if `waiting_fraction`, the
        fraction of their time in which episodes wait for tools, is at least MIN_TOOL_WAITING; else 0.
        """
        return max(0, round(self.level - self.first_level)) if waiting_fraction >= MIN_TOOL_WAITING else 0

    def update_level(
        self, measured_fractions: Iterable[tuple[float, float]], may_grow: bool, idle_waiting: float
    ) -> None:
        """Move the level by the tightest budget.

        Args:
            measured_fractions: pairs of a measured fraction of tokens and the budget for that fraction.
            may_grow: more live groups would be of use, as the trainer idles and the limit is reached;
                engines, slots and memory still have room then.
            idle_waiting: w in the docs: the fraction of the step in which the trainer idled, times the
                fraction of their time in which the step's landed episodes waited for tools and rewards.
        """
        budget_use = max(share / budget for share, budget in measured_fractions)
        self._stale_measured |= budget_use > 0

        log_change = (GAIN if self._stale_measured else FIRST_GAIN) * (1 - budget_use)
        if not self._stale_measured and self.level < self.quick_level:
            log_change += QUICK_GAIN * idle_waiting

        if log_change < 0 or may_grow:
            new_level = self.level * math.exp(max(log_change, -MAX_LOG_DECREASE))
            self.level = min(max(new_level, self.groups_per_batch), self.max_level)


class KvCap:
    """Moves `limit`, the number of live groups that the servers' memory has room for.

    Readings since the last commit are passed to `note_use` and added to `retracted_requests`.

    Args:
        groups_per_batch: G; the cap is never less.
        usual_staleness: in batches; the cap is never more than (1 + usual_staleness) * groups_per_batch.
    """

    def __init__(self, groups_per_batch: int, usual_staleness: int) -> None:
        self.groups_per_batch = groups_per_batch
        self.max_level = (1 + usual_staleness) * groups_per_batch
        self.level = float(self.max_level)
        self.retracted_requests = 0  # requests of which a server took the KV memory away
        self._use_sums: defaultdict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))  # sum, count
        self._commits_to_wait = 0  # commits until readings show the last change

    @property
    def limit(self) -> int:
        return int(self.level)

    @property
    def mean_use(self) -> float | None:
        """Mean reading of the fullest server; None without a reading."""
        return max((total / count for total, count in self._use_sums.values()), default=None)

    def note_use(self, server: str, use: float) -> None:
        """Note the fraction of a server's KV memory that is in use, in [0, 1]."""
        use_sum, reading_count = self._use_sums[server]
        self._use_sums[server] = use_sum + use, reading_count + 1

    def update_cap(self, live_groups: int, plain_step: bool = True) -> None:
        """Move the limit after a commit, before which `live_groups` groups were live.

        Readings count only if `plain_step`: those of a step with a validation are of other requests.
        """
        mean_use = self.mean_use
        retracted_requests = self.retracted_requests

        self._use_sums.clear()
        self.retracted_requests = 0

        self._commits_to_wait -= 1
        if self._commits_to_wait >= 0 or not plain_step:
            return

        old_level = self.level
        if retracted_requests or (mean_use is not None and mean_use > HIGH_KV_USE):
            self.level = max(self.groups_per_batch, min(old_level, live_groups) / CAP_FACTOR)
        elif mean_use is not None and mean_use < LOW_KV_USE:
            self.level = min(self.max_level, old_level * CAP_FACTOR)

        if self.level != old_level:
            # The steps for which a group is live.
            self._commits_to_wait = -(-self.limit // self.groups_per_batch)


# -- flow control in the run -------------------------------------------------------------------------------


TRAINER_IDLE = "async/trainer_idle_frac"
ROLLOUT_IDLE = "async/rollout_idle_frac"


class LiveLimit:
    """Moves `buffer.live_limit` and `buffer.spare_groups` after each commit, by flow control and the KV cap.

    With a number as buffer.target_staleness nothing moves. A restarted coordinator begins anew.
    """

    def __init__(self, config: RunConfig, buffer: ReplayBuffer) -> None:
        buffer_config = config.buffer
        self.buffer = buffer
        self.adapts_limit = buffer_config.target_staleness == "auto"
        self.stale_budget = buffer_config.stale_budget
        self.flow_control = FlowControl(buffer_config)
        self.kv_cap = KvCap(buffer_config.groups_per_batch, buffer_config.usual_staleness)

        self._has_servers = config.engine.remote
        # With shifts the trainer always waits for the rollout shift: then more live groups are of use to
        # engines.
        self._idle_metric = ROLLOUT_IDLE if config.shifts else TRAINER_IDLE
        self.crossings = Crossings(buffer, buffer_config.max_staleness)
        self._crossed_fraction = 0.0  # fraction of stale tokens that the control does not know yet
        self._idle_fraction = 0.0  # newest known fraction of a step in which the trainer waited
        self._last_engines: frozenset[str] = frozenset()

    def update_limit(
        self,
        metrics: Mapping[str, float],
        taken_groups: int,
        engines: Collection[str],
        validating: bool,
        now: float,
    ) -> None:
        """Move the limit after a commit.

        The limit stays after a step that ends in a validation, or that had other engines than the step
        before, as the times of such a step are not typical.

        Args:
            metrics: the metrics row of the step.
            taken_groups: new groups that the step has taken.
        """
        same_engines = self._last_engines == frozenset(engines)
        self._last_engines = frozenset(engines)
        plain_step = same_engines and not validating

        live_groups = self.buffer.tally.count_live(self.buffer.committed) + taken_groups  # before the commit
        self.kv_cap.update_cap(live_groups, plain_step)

        self._idle_fraction = metrics.get(self._idle_metric, self._idle_fraction)  # arrives with heartbeats
        masked_fraction = metrics.get("staleness/masked_token_frac", 0.0)
        model_tokens = metrics.get("trainer/model_tokens", 0.0)
        self._crossed_fraction += self.crossings.count_crossed(masked_fraction, model_tokens, now)

        if self.adapts_limit:
            if plain_step:
                may_grow = self._idle_fraction >= MIN_TRAINER_IDLE and live_groups >= self.flow_control.limit
                waiting_fraction = metrics.get("timing_s/tools/mean", 0.0) + metrics.get(
                    "timing_s/reward/mean", 0.0
                )
                waiting_fraction /= max(1e-9, waiting_fraction, metrics.get("timing_s/episode/mean", 0.0))
                self.flow_control.update_level(
                    [(self._crossed_fraction, self.stale_budget)],
                    may_grow,
                    self._idle_fraction * waiting_fraction,
                )
                self.buffer.spare_groups = self.flow_control.spare_groups(waiting_fraction)
                self._crossed_fraction = 0.0

            self.buffer.live_limit = min(self.flow_control.limit, self.kv_cap.limit)

    def gauges(self) -> dict[str, float]:
        metrics = {"async/live_limit": float(self.buffer.max_live_groups)}
        if self._has_servers:
            metrics["rollout/retractions"] = float(self.kv_cap.retracted_requests)
        return metrics if self.kv_cap.mean_use is None else metrics | {"rollout/kv_use": self.kv_cap.mean_use}
