"""A run in simulated time: engines, tools and a trainer around the real buffer, plans and flow control.

Seeded and pure: from a workload it computes one record per step. Left out: failures, memory, validation.
Where engines and trainer use the same devices, the real `Shifts` say whose shift it is.
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
from asyncrl.buffer.flow_control import BUSY, Crossings, FlowControl
from asyncrl.buffer.prompts import Prompts
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.shifts import NOTHING_ASKED, Shift, Shifts, Situation
from asyncrl.buffer.staleness import pending
from asyncrl.config import BufferConfig
from asyncrl.types import EpisodeResult, EpisodeStats

MOMENT = 1e-6  # seconds
# A turn's tokens count as sampled in four quarters: at these parts of its duration before its end.
PARTS = np.array([0.875, 0.625, 0.375, 0.125])


class RecordedTurn(msgspec.Struct, frozen=True):
    """Tokens that were sampled, and the seconds from then to the next turn, or until the episode landed."""

    tokens: float
    wait: float


Recorded = tuple[tuple[tuple[RecordedTurn, ...], ...], ...]  # turns of episodes of groups


class Workload(msgspec.Struct, frozen=True):
    """A workload, in seconds and tokens. Episodes play as those of a group that is drawn from `recorded`."""

    recorded: Recorded
    buffer: BufferConfig = BufferConfig(groups_per_batch=8, episodes_per_group=4, group_policy="complete")
    slots: int = 64
    speed: float = 200.0  # tokens/s of one episode alone
    rate: float = 4000.0  # tokens/s of all engines
    base: float = 0.0  # n episodes that sample take max(1/speed, base + n/rate) seconds for a token each
    train: float = 0.2  # seconds per batch, by its episodes
    commit: float = 0.0  # seconds per batch, at its end: the optimizer's step, the snapshot
    publish: float = 0.05  # seconds from a commit until the engines have the weights
    shift: float | None = None  # engines and trainer use the same devices: seconds of both changes together
    lent: float = 0.0  # tokens/s more of all engines, while the trainer waits
    ranks: int = 1
    micro_tokens: int = 1 << 30  # of a micro-batch on one rank; more than a batch: batches are trained whole
    computed: float = 1.0  # tokens that the trainer computes for each that was sampled
    filtered: float = 0.0  # share of groups without a learning signal
    limit: float = 60.0  # seconds that an episode may take


class SimulatedStep(msgspec.Struct, frozen=True):
    """Holds figures of one step. Times in seconds, lags in batches."""

    limit: int  # on live groups, in it
    seconds: float  # from the last commit to this one
    train: float  # seconds of these in which the trainer worked
    rollout: float  # in which the engines worked
    awake: float  # in which they had the devices; all, without shifts
    masked: float  # share of the batch's model tokens that were over the bound
    lags: tuple[float, ...]  # sampled tokens of its batch within the bound, by lag: 0, 1, …

    @property
    def tokens(self) -> float:
        """Within the bound."""
        return sum(self.lags)

    @property
    def lag(self) -> float:
        """The mean of the tokens within the bound."""
        return sum(lag * tokens for lag, tokens in enumerate(self.lags)) / max(1e-9, self.tokens)


class _Play:
    """An episode that runs; the last `left` turns of `recorded` are to be sampled."""

    def __init__(self, episode: EpisodeRecord, recorded: Sequence[RecordedTurn], began: float) -> None:
        self.episode = episode
        self.recorded = recorded
        self.left = len(recorded)
        self.began = began
        # times are the engines'
        self.turn_began = began
        self.version = 0
        self.tokens = 0.0
        self.turns: list[tuple[float, float, float]] = []  # began, ended, tokens


class Simulation:
    """A simulated run. Its flow control moves the live limit, unless buffer.target_staleness is a number."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self.w = workload
        self.now = 0.0
        self.random = Random(seed)

        keys = workload.buffer
        filters = workload.filtered > 0 and keys.episodes_per_group > 1
        keys = replace(keys, filter_zero_variance=filters, retire_pass_rate=1.0)
        prompts = Prompts(1, lambda epoch: [0])
        self.buffer = ReplayBuffer(keys, prompts, total_groups=1 << 60, retries=0, group_bytes=0)
        self.batches = Batches(self.buffer, workload.micro_tokens, flush=True, packing="packed")
        self.control = FlowControl(keys)
        self.crossings = Crossings(self.buffer, keys.max_staleness)

        self.steps: list[SimulatedStep] = []
        fill = keys.shift_fill
        shares = workload.shift is not None
        self.shifts = Shifts(fill, 0.0) if shares else None  # it begins with the trainer's, which has no data
        # devices change hands; when engines last sampled
        self._changing = False
        self._sampled_at = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # The engines divide their rate equally. `served`: tokens of a turn that would run since the start.
        self._served = 0.0
        self._sampling: list[tuple[float, int, _Play]] = []  # (served at its end, order, episode)
        self._groups: dict[int, tuple[tuple[tuple[RecordedTurn, ...], ...], bool]] = {}  # drawn; filtered
        self._turns: dict[str, list[tuple[float, float, float]]] = {}  # of episodes that landed
        self._held = 0  # slots
        self._changed = True  # something may be admitted, begun or trained
        self._working = False
        self._micro = 0
        self._refused = (-1, 0)
        self._published: list[float] = []  # when the engines got version 1, 2 …
        # of the step: engines, trainer; its start
        self._busy = 0.0
        self._worked = 0.0
        self._began = 0.0
        self._clock_began = 0.0
        # seconds of episodes that landed in it: without sampling, all
        self._waited = 0.0
        self._lived = 0.0
        self._lags: list[tuple[np.ndarray, np.ndarray]] = []  # of the batch: lags, tokens

    # -- time ----------------------------------------------------------------------------------------

    def run(self, steps: int, changes: Mapping[int, Workload] = MappingProxyType({})) -> list[SimulatedStep]:
        """Give one record per step. `changes`: by step, the workload from that step on."""
        while len(self.steps) < steps:
            self.w = changes.get(len(self.steps), self.w)
            while self._changed:
                self._changed = False
                self._admit()
                self._train()
                self._shift()
            self._next()
        return self.steps

    @property
    def _clock(self) -> float:
        """The time on the engines' clock."""
        return self.now if self.shifts is None else self.shifts.clock(self.now)

    def _has_devices(self, side: Shift) -> bool:
        return self.shifts is None or self.shifts.shift is side

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what))

    def _next(self) -> None:
        """The next event, or the end of the next turn, whichever is first."""
        awake = self._has_devices(Shift.ROLLOUT)
        sampling = len(self._sampling) * awake
        rate = self.w.rate + (0.0 if self._working else self.w.lent)
        rate = awake / max(1 / self.w.speed, self.w.base + max(1, sampling) / rate)
        ends = self.now + (self._sampling[0][0] - self._served) / rate if sampling else math.inf
        at = min(ends, self._events[0][0] if self._events else math.inf)
        if at == math.inf:
            raise ValueError("the simulated run waits for nothing: its workload cannot fill a batch")

        self._served += rate * (at - self.now)
        self._busy += (at - self.now) * bool(sampling)
        self._sampled_at = at if sampling else self._sampled_at
        self.now = at

        if ends <= at:
            self._turn_ended(heapq.heappop(self._sampling)[2])
        else:
            heapq.heappop(self._events)[2]()

    # -- shifts --------------------------------------------------------------------------------------

    def _shift(self) -> None:
        """Let the devices change hands if it is time."""
        shifts = self.shifts
        over = not self._changing
        if shifts is None or self.w.shift is None:
            return

        step = self.buffer.committed
        waits = not self._working
        outlook = self.batches.outlook(step, self._micro, self.w.ranks) if waits else NOTHING_ASKED
        idle = self.now - self._sampled_at
        seen = Situation(outlook, asked=waits, asleep=over, awake=over, resting=over, idle=idle)

        if not shifts.move(self.now, seen):
            return

        self._changed = True
        self._refused = (-1, 0)
        if shifts.shift in shifts.seconds:
            self._changing = True
            self._after(self.w.shift / 2, self._exchanged)
        elif shifts.shift is Shift.ROLLOUT:
            self._woke()

    def _exchanged(self) -> None:
        self._changing = False
        self._changed = True

    def _woke(self) -> None:
        """Engines go on, with the newest version; deadlines come as much later as they slept."""
        self._published += [self._clock] * (self.buffer.committed - len(self._published))
        for _, _, play in self._sampling:
            if play.turn_began == self._clock:  # it has waited for this
                play.version = len(self._published)

        for group in self.buffer.live.values():
            if self._clock < group.deadline < math.inf:
                self._tick_at(group.deadline)

        self._sampled_at = self.now
        self._look_again()

    def _look_again(self) -> None:
        """Ask whose shift it is once engines have idled for as long as two changes take."""
        if self.shifts is not None and not self._sampling:
            self._after(sum(self.shifts.seconds.values()) + MOMENT, self._look)

    def _look(self) -> None:
        self._changed = True

    # -- rollout -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Rule 1, then rule 2, as the coordinator follows them."""
        if not self._has_devices(Shift.ROLLOUT):
            return

        slots = self.w.slots
        version = len(self._published)

        while self.buffer.can_admit(slots - self._held - self.buffer.waiting, slots):
            self.buffer.admit(self.buffer.committed, self._clock)
        if not self.buffer.waiting:
            return

        for needed, episode in pending(self.buffer):
            if self._held >= slots:
                return
            if needed <= version:
                self._begin(episode, version)
            elif self.buffer.config.on_stale != "hold":
                return  # later ones need no older weights

    def _begin(self, episode: EpisodeRecord, version: int) -> None:
        self._held += 1
        self.buffer.assign(episode, "", 0, version, self._clock)

        group = self.buffer.live[episode.group]
        random = self.random
        if group.id not in self._groups:
            self._groups[group.id] = random.choice(self.w.recorded), random.random() < self.w.filtered
            if group.patience < math.inf:
                self._tick_at(group.deadline)
        drawn, _ = self._groups[group.id]  # a group of more members than were recorded has some twice
        recorded = drawn[episode.member] if episode.member < len(drawn) else random.choice(drawn)

        self._sample(_Play(episode, recorded, self._clock))

    def _tick_at(self, at: float) -> None:
        """At a time on the engines' clock; if they sleep before it, `_woke` asks again."""
        self._after(at - self._clock, lambda: self._deadline(at))

    def _deadline(self, at: float) -> None:
        if self._clock >= at - MOMENT:
            self.buffer.tick(max(at, self._clock))
            self._changed = True

    def _sample(self, play: _Play) -> None:
        play.tokens = play.recorded[-play.left].tokens
        play.turn_began = self._clock
        play.version = len(self._published)
        heapq.heappush(self._sampling, (self._served + play.tokens, next(self._order), play))

    def _turn_ended(self, play: _Play) -> None:
        tokens = max(1, round(play.tokens))
        episode = play.episode
        play.turns.append((play.turn_began, self._clock, play.tokens))
        self.buffer.waiting_tokens.begin(episode.uid, self._clock, play.tokens)

        computed = max(tokens, round(tokens * self.w.computed))
        episode.extend(computed, tokens, play.version, len(self._published))
        self.buffer.touch(episode)

        wait = min(play.recorded[-play.left].wait, self.w.limit - (self._clock - play.began))
        play.left -= 1
        goes_on = self._sample if play.left and wait >= 0 else self._landed
        self._after(max(0.0, wait), lambda: goes_on(play))
        self._look_again()

    def _landed(self, play: _Play) -> None:
        """Rewards of a group differ, unless it is to be filtered."""
        episode = play.episode
        self._changed = True
        self._held -= 1

        lived = self._clock - play.began
        self._waited += lived - sum(ended - began for began, ended, _ in play.turns)
        self._lived += lived
        self._turns[episode.uid] = play.turns

        _, filtered = self._groups[episode.group]
        result = EpisodeResult(0.0 if filtered else float(episode.member))
        self.buffer.finish(episode, result, EpisodeStats(len(play.turns)), self._clock)

    # -- training ------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Ask for the next micro-batch, unless nothing changed since the last one was refused."""
        known = self.buffer.tally.states[State.READY], self.buffer.refills
        if self._working or known == self._refused or not self._has_devices(Shift.TRAIN):
            return

        uids = self.batches.plan(self.buffer.committed, self._micro, self.w.ranks)
        self._refused = (-1, 0) if uids is not None else known
        if uids is None:
            return

        self._working = True
        if not uids:
            self._worked += self.w.commit
            self._after(self.w.commit, self._commit)
            return

        self._micro += 1
        turns = np.array([turn for uid in uids for turn in self._turns.pop(uid)])
        sampled = turns[:, 1] - np.outer(PARTS, turns[:, 1] - turns[:, 0])
        versions = np.searchsorted(np.array(self._published), sampled, "right")
        self._lags.append((self.buffer.committed - versions, np.broadcast_to(turns[:, 2], versions.shape)))

        seconds = self.w.train * len(uids) / self.w.buffer.batch_size
        self._worked += seconds
        self._after(seconds, self._trained)

    def _trained(self) -> None:
        self._working = False
        self._changed = True

    def _publish(self) -> None:
        self._published.append(self.now)
        self._changed = True

    def _commit(self) -> None:
        step = self.buffer.committed
        live = self.buffer.tally.open(self.buffer.committed)
        self.batches.commit(step + 1, self.batches.batches[step].uids)
        self.batches.retain(step + 1)
        self.buffer.changes()  # kept for a store, which there is not

        if self.shifts is None:
            self._after(self.w.publish, self._publish)

        lags, tokens = (np.concatenate([part[k].ravel() for part in self._lags]) for k in (0, 1))
        bound = self.buffer.config.max_staleness
        limit = self.buffer.live_limit
        by_lag = np.bincount(lags, tokens / PARTS.size, bound + 1)
        total = float(by_lag.sum())
        within = by_lag[: bound + 1].tolist()
        over = by_lag[bound + 1 :]
        masked = float(over.sum()) / total

        seconds = self.now - self._began
        awake = self._clock - self._clock_began
        self.steps.append(
            SimulatedStep(limit, seconds, self._worked, self._busy, awake, masked, tuple(within))
        )

        crossed = self.crossings.committed(masked, total, self._clock)
        if self.buffer.config.target_staleness == "auto":
            idle = 1 - self._worked / seconds
            grows = live >= limit
            if self.shifts is not None:  # the trainer waits for its shift in any case
                idle = 1 - self._busy / max(MOMENT, self._busy, awake)
            outside = self._waited / max(1e-9, self._lived)
            shares = [(crossed, self.buffer.config.stale_budget)]
            self.control.update(shares, grows and idle >= BUSY, idle * outside)
            self.buffer.live_limit = self.control.limit
            self.buffer.spare = self.control.spare(outside)

        self._lags = []
        self._began = self.now
        self._busy = 0.0
        self._worked = 0.0
        self._waited = 0.0
        self._lived = 0.0
        self._clock_began = self._clock
        self._working = False
        self._micro = 0
        self._changed = True
