"""A run in simulated time: engines, tools and a trainer around the real buffer, plans and flow control.

Seeded and pure: from a workload the simulation computes one record per step. Left out: failures, memory,
validation. If engines and trainer share devices, the real `Shifts` decide whose shift it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from types import MappingProxyType

import msgspec
import numpy as np
from msgspec.structs import replace

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.flow_control import MIN_TRAINER_IDLE, Crossings, FlowControl
from asyncrl.buffer.prompts import Prompts
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.shifts import NO_REQUEST, Shift, Shifts, Situation
from asyncrl.buffer.staleness import assignable_episodes
from asyncrl.config import BufferConfig
from asyncrl.types import EpisodeResult, EpisodeStats

TIME_EPSILON = 1e-6  # Seconds by which two times may differ and count as equal.
# A turn's tokens count as sampled in four quarters: at these fractions of its duration before its end.
QUARTER_MIDPOINTS = np.array([0.875, 0.625, 0.375, 0.125])


class RecordedTurn(msgspec.Struct, frozen=True):
    """The sampled tokens of a turn, and the seconds until the next turn, or until the episode landed."""

    tokens: float
    wait: float


Recorded = tuple[tuple[tuple[RecordedTurn, ...], ...], ...]  # turns of episodes of groups


class Workload(msgspec.Struct, frozen=True):
    """A workload, in seconds and tokens. Episodes play like the episodes of a group that is drawn from
    `recorded`."""

    recorded: Recorded
    buffer: BufferConfig = BufferConfig(groups_per_batch=8, episodes_per_group=4, group_policy="complete")
    slots: int = 64
    speed: float = 200.0  # tokens/s of one episode alone
    rate: float = 4000.0  # tokens/s of all engines
    base: float = 0.0  # if n episodes sample, each token takes max(1/speed, base + n/rate) seconds
    train: float = 0.2  # seconds per batch, by its episodes
    commit: float = 0.0  # seconds per batch, at its end: the optimizer's step, the snapshot
    publish: float = 0.05  # seconds from a commit until the engines have the weights
    shift: float | None = None  # engines and trainer use the same devices: seconds of both changes together
    lent: float = 0.0  # tokens/s more of all engines, while the trainer waits
    ranks: int = 1
    micro_tokens: int = 1 << 30  # tokens of a micro-batch on one rank; the default trains whole batches
    computed: float = 1.0  # tokens that the trainer computes per sampled token
    filtered: float = 0.0  # fraction of groups without a learning signal
    limit: float = 60.0  # seconds that an episode may take


class SimulatedStep(msgspec.Struct, frozen=True):
    """Figures of one step. Times in seconds, lags in batches."""

    limit: int  # limit of live groups in this step
    seconds: float  # from the last commit to this one
    train: float  # seconds in which the trainer worked
    rollout: float  # seconds in which the engines worked
    awake: float  # seconds in which engines had the devices; without shifts all seconds
    masked: float  # fraction of the batch's model tokens over the staleness bound
    lags: tuple[float, ...]  # sampled tokens of its batch within the bound, by lag: 0, 1, …

    @property
    def tokens(self) -> float:
        """Tokens of the batch within the staleness bound."""
        return sum(self.lags)

    @property
    def lag(self) -> float:
        """The mean lag of the tokens within the staleness bound."""
        return sum(lag * tokens for lag, tokens in enumerate(self.lags)) / max(1e-9, self.tokens)


class _SimulatedEpisode:
    """An episode under way; the last `turns_left` turns of `recorded` are to be sampled."""

    def __init__(self, episode: EpisodeRecord, recorded: Sequence[RecordedTurn], began_at: float) -> None:
        self.episode = episode
        self.recorded = recorded
        self.turns_left = len(recorded)
        self.began_at = began_at
        # Times are on the engines' clock.
        self.turn_began_at = began_at
        self.version = 0
        self.turn_tokens = 0.0
        self.turn_spans: list[tuple[float, float, float]] = []  # began, ended, tokens


class Simulation:
    """A simulated run. Its flow control moves the live limit, unless buffer.target_staleness is a number."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self.workload = workload
        self.now = 0.0
        self.random = Random(seed)

        buffer_config = workload.buffer
        filters_groups = workload.filtered > 0 and buffer_config.episodes_per_group > 1
        buffer_config = replace(buffer_config, filter_zero_variance=filters_groups, retire_pass_rate=1.0)
        prompts = Prompts(1, lambda epoch: [0])
        self.buffer = ReplayBuffer(buffer_config, prompts, total_groups=1 << 60, retries=0, group_bytes=0)
        self.batches = Batches(self.buffer, workload.micro_tokens, flush_at_end=True, packing="packed")
        self.flow_control = FlowControl(buffer_config)
        self.crossings = Crossings(self.buffer, buffer_config.max_staleness)

        self.steps: list[SimulatedStep] = []
        # The run begins with the trainer's shift, which has no data.
        self.shifts = Shifts(buffer_config.shift_fill, 0.0) if workload.shift is not None else None
        # Whether devices change hands, and when engines last sampled.
        self._devices_changing = False
        self._sampled_at = 0.0
        self._event_numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # Episodes share the engines' rate equally. `_served_tokens`: those of a turn running since the start.
        self._served_tokens = 0.0
        self._sampling: list[tuple[float, int, _SimulatedEpisode]] = []  # (served at its end, order, episode)
        # By group: the drawn turns, and whether the group is filtered.
        self._drawn_groups: dict[int, tuple[tuple[tuple[RecordedTurn, ...], ...], bool]] = {}
        self._landed_turns: dict[str, list[tuple[float, float, float]]] = {}  # turns of landed episodes
        self._used_slots = 0
        self._state_changed = True  # something may be admitted, begun or trained
        self._trainer_working = False
        self._part_index = 0
        self._refused_state = (-1, 0)
        self._published_at: list[float] = []  # when the engines got version 1, 2 …
        # Of the step under way: seconds of engines and trainer, and its start.
        self._engine_seconds = 0.0
        self._trainer_seconds = 0.0
        self._step_began = 0.0
        self._step_clock_began = 0.0
        # Seconds of episodes that landed in the step: without sampling, and in total.
        self._episode_wait_seconds = 0.0
        self._episode_seconds = 0.0
        self._batch_lags: list[tuple[np.ndarray, np.ndarray]] = []  # lags and tokens of the batch

    # -- time ----------------------------------------------------------------------------------------

    def run(self, steps: int, changes: Mapping[int, Workload] = MappingProxyType({})) -> list[SimulatedStep]:
        """Return one record per step. `changes`: by step, the workload from that step on."""
        while len(self.steps) < steps:
            self.workload = changes.get(len(self.steps), self.workload)
            while self._state_changed:
                self._state_changed = False
                self._admit()
                self._train_next()
                self._move_shift()
            self._advance()
        return self.steps

    @property
    def _engine_clock(self) -> float:
        """The time on the engines' clock."""
        return self.now if self.shifts is None else self.shifts.clock(self.now)

    def _has_devices(self, side: Shift) -> bool:
        return self.shifts is None or self.shifts.shift is side

    def _schedule(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._event_numbers), action))

    def _advance(self) -> None:
        """Advance to the next event or to the end of the next turn, whichever comes first."""
        engines_awake = self._has_devices(Shift.ROLLOUT)
        sampling_count = len(self._sampling) if engines_awake else 0
        token_rate = self.workload.rate + (0.0 if self._trainer_working else self.workload.lent)
        token_rate = engines_awake / max(
            1 / self.workload.speed, self.workload.base + max(1, sampling_count) / token_rate
        )
        turn_end = (
            self.now + (self._sampling[0][0] - self._served_tokens) / token_rate
            if sampling_count
            else math.inf
        )
        event_time = min(turn_end, self._events[0][0] if self._events else math.inf)
        if event_time == math.inf:
            raise ValueError("the simulated run is stuck: its workload cannot fill a batch")

        self._served_tokens += token_rate * (event_time - self.now)
        if sampling_count:
            self._engine_seconds += event_time - self.now
            self._sampled_at = event_time
        self.now = event_time

        if turn_end <= event_time:
            self._turn_ended(heapq.heappop(self._sampling)[2])
        else:
            heapq.heappop(self._events)[2]()

    # -- shifts --------------------------------------------------------------------------------------

    def _move_shift(self) -> None:
        """Let the devices change hands if it is time."""
        shifts = self.shifts
        if shifts is None or self.workload.shift is None:
            return

        outlook = NO_REQUEST
        if not self._trainer_working:
            outlook = self.batches.outlook(self.buffer.current_step, self._part_index, self.workload.ranks)

        is_settled = not self._devices_changing
        situation = Situation(
            outlook,
            trainer_waits=not self._trainer_working,
            engines_asleep=is_settled,
            engine_awake=is_settled,
            ranks_offloaded=is_settled,
            idle_seconds=self.now - self._sampled_at,
        )

        if not shifts.enter_next(self.now, situation):
            return

        self._state_changed = True
        self._refused_state = (-1, 0)
        if shifts.shift in shifts.change_seconds:
            self._devices_changing = True
            self._schedule(self.workload.shift / 2, self._exchanged)
        elif shifts.shift is Shift.ROLLOUT:
            self._woke()

    def _exchanged(self) -> None:
        self._devices_changing = False
        self._state_changed = True

    def _woke(self) -> None:
        """Let engines continue with the newest version. Deadlines move by the time that the engines slept."""
        self._published_at += [self._engine_clock] * (self.buffer.committed - len(self._published_at))
        for _, _, playing in self._sampling:
            if playing.turn_began_at == self._engine_clock:  # The turn has waited for the engines
                playing.version = len(self._published_at)

        for group in self.buffer.live_groups.values():
            if self._engine_clock < group.deadline < math.inf:
                self._schedule_deadline(group.deadline)

        self._sampled_at = self.now
        self._look_again()

    def _look_again(self) -> None:
        """Ask again whose shift it is once engines have idled for as long as two changes take."""
        if self.shifts is not None and not self._sampling:
            self._schedule(sum(self.shifts.change_seconds.values()) + TIME_EPSILON, self._mark_changed)

    def _mark_changed(self) -> None:
        self._state_changed = True

    # -- rollout -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit groups and begin episodes by rule 1, then rule 2, as the coordinator does."""
        if not self._has_devices(Shift.ROLLOUT):
            return

        slots = self.workload.slots
        version = len(self._published_at)

        while self.buffer.can_admit(slots - self._used_slots - self.buffer.waiting_count, slots):
            self.buffer.admit_group(self._engine_clock)
        if not self.buffer.waiting_count:
            return

        for min_version, episode in assignable_episodes(self.buffer):
            if self._used_slots >= slots:
                return
            if min_version <= version:
                self._begin_episode(episode, version)
            elif self.buffer.config.on_stale != "hold":
                return  # Later episodes need no older weights

    def _begin_episode(self, episode: EpisodeRecord, version: int) -> None:
        self._used_slots += 1
        self.buffer.assign(episode, "", 0, version, self._engine_clock)

        group = self.buffer.live_groups[episode.group]
        random = self.random
        if group.id not in self._drawn_groups:
            self._drawn_groups[group.id] = (
                random.choice(self.workload.recorded),
                random.random() < self.workload.filtered,
            )
            if group.patience < math.inf:
                self._schedule_deadline(group.deadline)
        # A group with more members than were recorded repeats some.
        drawn_group, _ = self._drawn_groups[group.id]
        recorded = (
            drawn_group[episode.member] if episode.member < len(drawn_group) else random.choice(drawn_group)
        )

        self._begin_turn(_SimulatedEpisode(episode, recorded, self._engine_clock))

    def _schedule_deadline(self, deadline: float) -> None:
        """Schedule a deadline on the engines' clock; if engines sleep before then, `_woke` schedules the
        deadline again."""
        self._schedule(deadline - self._engine_clock, lambda: self._pass_deadline(deadline))

    def _pass_deadline(self, deadline: float) -> None:
        if self._engine_clock >= deadline - TIME_EPSILON:
            self.buffer.settle_overdue(max(deadline, self._engine_clock))
            self._state_changed = True

    def _begin_turn(self, play: _SimulatedEpisode) -> None:
        play.turn_tokens = play.recorded[-play.turns_left].tokens
        play.turn_began_at = self._engine_clock
        play.version = len(self._published_at)
        heapq.heappush(
            self._sampling, (self._served_tokens + play.turn_tokens, next(self._event_numbers), play)
        )

    def _turn_ended(self, play: _SimulatedEpisode) -> None:
        token_count = max(1, round(play.turn_tokens))
        episode = play.episode
        play.turn_spans.append((play.turn_began_at, self._engine_clock, play.turn_tokens))
        self.buffer.waiting_tokens.begin_life(episode.uid, self._engine_clock, play.turn_tokens)

        computed_tokens = max(token_count, round(token_count * self.workload.computed))
        episode.add_turn(computed_tokens, token_count, play.version, len(self._published_at))
        self.buffer.mark_changed(episode)

        wait_seconds = min(
            play.recorded[-play.turns_left].wait, self.workload.limit - (self._engine_clock - play.began_at)
        )
        play.turns_left -= 1
        next_action = self._begin_turn if play.turns_left and wait_seconds >= 0 else self._land_episode
        self._schedule(max(0.0, wait_seconds), lambda: next_action(play))
        self._look_again()

    def _land_episode(self, play: _SimulatedEpisode) -> None:
        """Finish an episode. Rewards of a group differ, unless the group is to be filtered."""
        episode = play.episode
        self._state_changed = True
        self._used_slots -= 1

        lifetime = self._engine_clock - play.began_at
        self._episode_wait_seconds += lifetime - sum(
            ended_at - began_at for began_at, ended_at, _ in play.turn_spans
        )
        self._episode_seconds += lifetime
        self._landed_turns[episode.uid] = play.turn_spans

        _, is_filtered = self._drawn_groups[episode.group]
        result = EpisodeResult(0.0 if is_filtered else float(episode.member))
        self.buffer.finish_episode(episode, result, EpisodeStats(len(play.turn_spans)), self._engine_clock)

    # -- training ------------------------------------------------------------------------------------

    def _train_next(self) -> None:
        """Ask for the next part, unless nothing has changed since the last request was refused."""
        buffer_state = self.buffer.tally.state_counts[State.READY], self.buffer.refills
        if self._trainer_working or buffer_state == self._refused_state or not self._has_devices(Shift.TRAIN):
            return

        uids = self.batches.next_part(self.buffer.current_step, self._part_index, self.workload.ranks)
        self._refused_state = (-1, 0) if uids is not None else buffer_state
        if uids is None:
            return

        self._trainer_working = True
        if not uids:
            self._trainer_seconds += self.workload.commit
            self._schedule(self.workload.commit, self._commit_step)
            return

        self._part_index += 1
        turn_spans = np.array([turn for uid in uids for turn in self._landed_turns.pop(uid)])
        sampled_at = turn_spans[:, 1] - np.outer(QUARTER_MIDPOINTS, turn_spans[:, 1] - turn_spans[:, 0])
        versions = np.searchsorted(np.array(self._published_at), sampled_at, "right")
        self._batch_lags.append(
            (self.buffer.committed - versions, np.broadcast_to(turn_spans[:, 2], versions.shape))
        )

        seconds = self.workload.train * len(uids) / self.workload.buffer.batch_size
        self._trainer_seconds += seconds
        self._schedule(seconds, self._trained)

    def _trained(self) -> None:
        self._trainer_working = False
        self._state_changed = True

    def _publish(self) -> None:
        self._published_at.append(self.now)
        self._state_changed = True

    def _commit_step(self) -> None:
        step = self.buffer.current_step
        open_groups = self.buffer.tally.count_live(self.buffer.committed)
        self.batches.commit_batch(step, self.batches.by_step[step].uids)
        self.batches.forget_covered_plans(step)
        self.buffer.pop_changes()  # Changes are meant for a store; a simulation has none

        if self.shifts is None:
            self._schedule(self.workload.publish, self._publish)

        lags, tokens = (
            np.concatenate([batch_lags[column].ravel() for batch_lags in self._batch_lags])
            for column in (0, 1)
        )
        max_staleness = self.buffer.config.max_staleness
        live_limit = self.buffer.live_limit
        tokens_by_lag = np.bincount(lags, tokens / QUARTER_MIDPOINTS.size, max_staleness + 1)
        total_tokens = float(tokens_by_lag.sum())
        masked = float(tokens_by_lag[max_staleness + 1 :].sum()) / total_tokens

        step_seconds = self.now - self._step_began
        awake_seconds = self._engine_clock - self._step_clock_began
        self.steps.append(
            SimulatedStep(
                limit=live_limit,
                seconds=step_seconds,
                train=self._trainer_seconds,
                rollout=self._engine_seconds,
                awake=awake_seconds,
                masked=masked,
                lags=tuple(tokens_by_lag[: max_staleness + 1].tolist()),
            )
        )

        crossed_fraction = self.crossings.count_crossed(masked, total_tokens, self._engine_clock)
        if self.buffer.config.target_staleness == "auto":
            idle = 1 - self._trainer_seconds / step_seconds
            is_at_limit = open_groups >= live_limit
            if self.shifts is not None:  # The trainer waits for its shift in any case
                idle = 1 - self._engine_seconds / max(TIME_EPSILON, self._engine_seconds, awake_seconds)
            waiting_fraction = self._episode_wait_seconds / max(1e-9, self._episode_seconds)
            stale_fractions = [(crossed_fraction, self.buffer.config.stale_budget)]
            self.flow_control.update_level(
                stale_fractions, is_at_limit and idle >= MIN_TRAINER_IDLE, idle * waiting_fraction
            )
            self.buffer.live_limit = self.flow_control.limit
            self.buffer.spare_groups = self.flow_control.spare_groups(waiting_fraction)

        self._batch_lags = []
        self._step_began = self.now
        self._engine_seconds = 0.0
        self._trainer_seconds = 0.0
        self._episode_wait_seconds = 0.0
        self._episode_seconds = 0.0
        self._step_clock_began = self._engine_clock
        self._trainer_working = False
        self._part_index = 0
        self._state_changed = True
