"""A run in simulated time: engines, tools, the buffer's rules, flow control and a trainer.

Seeded and pure: from a workload it computes one record per step. Admission is that of ReplayBuffer (rule 1,
whole groups while slots are free), episodes start by rule 2, batches take the oldest groups first, and the
real FlowControl moves the live limit. Left out: failures, memory, validation.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np

from asyncrl.buffer.deadlines import Deadlines
from asyncrl.buffer.flow_control import BUSY, Crossings, FlowControl
from asyncrl.buffer.lifetimes import Lifetimes
from asyncrl.buffer.records import GroupRecord

# A turn's tokens count as sampled in four quarters: at these parts of its duration before its end.
PARTS = np.array([0.875, 0.625, 0.375, 0.125])


class LogNormal(msgspec.Struct, frozen=True):
    """exp(N(ln median, sigma²)); 0 for a median of 0."""

    median: float
    sigma: float = 0.0

    def draw(self, random: Random) -> float:
        return self.median * math.exp(random.gauss(0.0, self.sigma)) if self.median else 0.0


class RecordedTurn(msgspec.Struct, frozen=True):
    """Tokens that were sampled, and the seconds from then to the next turn, or until the episode landed."""

    tokens: float
    wait: float


Recorded = tuple[tuple[tuple[RecordedTurn, ...], ...], ...]  # turns of episodes of groups


class Workload(msgspec.Struct, frozen=True):
    """What is simulated, in seconds and tokens. An episode samples `turns` times, with one tool call between
    two turns; or, with `recorded`, as an episode did of a group that is drawn from these."""

    groups: int = 8  # per batch
    members: int = 4  # of a group
    bound: int = 4  # max_staleness
    slots: int = 64
    turns: int = 2
    again: float = 0.0  # probability of one more turn, after these and after each that follows
    tokens: LogNormal = LogNormal(20.0)  # of a turn
    tool: LogNormal = LogNormal(0.0)  # seconds of a call
    recorded: Recorded = ()
    speed: float = 200.0  # tokens/s of one episode alone
    rate: float = 4000.0  # tokens/s of all engines
    base: float = 0.0  # n episodes that sample take max(1/speed, base + n/rate) seconds for a token each
    train: float = 0.2  # seconds per batch, by its episodes
    commit: float = 0.0  # seconds per batch, at its end: the optimizer's step, the snapshot
    publish: float = 0.05  # seconds from a commit until the engines have the weights
    micro: int = 8  # groups that the trainer takes at a time
    filtered: float = 0.0  # share of groups without a learning signal
    deadline: float | Literal["auto"] = math.inf  # of a group, in seconds, as in Deadlines; inf: complete
    limit: float = 60.0  # seconds that an episode may take
    budget: float = 0.01  # stale_budget


class Measured(msgspec.Struct, frozen=True):
    """What was measured when a batch was committed. Times in seconds; shares in [0, 1]."""

    seconds: float  # from the last commit to this one
    train: float  # seconds of these in which the trainer worked
    rollout: float  # in which the engines worked
    masked: float  # share of the batch's model tokens that were over the bound
    life: float  # mean seconds from a group's first slot until it settled


class SimulatedStep(msgspec.Struct, frozen=True):
    """Figures of one step. Shares in [0, 1], times in seconds, lags in batches."""

    limit: int
    running: int  # episodes that held a slot when it was committed
    lag: float  # mean, of the tokens within the bound
    rollout_busy: float
    tokens: float  # sampled, of its batch, within the bound
    measured: Measured


class _Group:
    def __init__(self, number: int, members: int, patience: float) -> None:
        self.id, self.members, self.running = number, members, 0
        self.record = GroupRecord(number, 0, 0, [], patience)
        self.began, self.settled, self.taken = 0.0, False, False
        self.landed: list[_Episode] = []  # that no batch has taken


class _Episode:
    def __init__(
        self, group: _Group, member: int, turns: int, now: float, recorded: Sequence[RecordedTurn] = ()
    ) -> None:
        self.group, self.uid, self.left = group, f"{group.id}.{member}", turns
        self.recorded = recorded
        self.began, self.turn_began, self.tokens, self.tools = now, now, 0.0, 0.0
        self.turns: list[tuple[float, float, float]] = []  # began, ended, tokens


class Simulation:
    """One run. `target` fixes the limit at (1 + target) * groups; None: flow control moves it."""

    def __init__(self, workload: Workload, seed: int = 0, target: float | None = None) -> None:
        self.w, self.now, self.committed = workload, 0.0, 0
        self.random = Random(seed)
        self.lives, self.tokens, self.adapts = Lifetimes(128), Lifetimes(4096), target is None
        self.deadlines = Deadlines(workload.deadline)
        self.flow = FlowControl(workload.groups, workload.bound)
        self.crossings = Crossings(self.tokens, workload.bound)
        if target is not None:
            self.flow.level = (1 + target) * workload.groups
        self.steps: list[SimulatedStep] = []
        self._order, self._numbers = count(), count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # The engines divide their rate equally. `served`: tokens of a turn that would run since the start.
        self._served = 0.0
        self._sampling: list[tuple[float, int, _Episode]] = []  # (served at its end, order, episode)
        self._live: set[int] = set()
        self._pending: deque[_Group] = deque()  # admitted, not begun
        self._held = 0  # slots
        self._ready: list[tuple[int, _Group]] = []
        self._late: list[_Episode] = []
        self._taken: list[_Group] = []  # of the batch under way
        self._working = False
        self._published: list[float] = []  # when the engines got version 1, 2 …
        self._busy, self._worked, self._began = 0.0, 0.0, 0.0  # of the step: engines, trainer; its start
        self._lags: list[tuple[np.ndarray, np.ndarray]] = []  # of the batch: lags, tokens

    # -- time ----------------------------------------------------------------------------------------

    def run(self, steps: int, changes: Mapping[int, Workload] = MappingProxyType({})) -> list[SimulatedStep]:
        """One record per step. `changes`: by step, the workload from that step on."""
        while self.committed < steps:
            self.w = changes.get(self.committed, self.w)
            self._admit()
            self._next()
        return self.steps

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what))

    def _next(self) -> None:
        """The next event, or the end of the next turn, whichever is first."""
        sampling = len(self._sampling)
        rate = 1 / max(1 / self.w.speed, self.w.base + max(1, sampling) / self.w.rate)
        ends = self.now + (self._sampling[0][0] - self._served) / rate if sampling else math.inf
        at = min(ends, self._events[0][0] if self._events else math.inf)
        if at == math.inf:
            raise ValueError("the simulated run waits for nothing: its workload cannot fill a batch")
        self._served += rate * (at - self.now)
        self._busy += (at - self.now) * bool(sampling)
        self.now = at
        if ends <= at:
            self._turn_ended(heapq.heappop(self._sampling)[2])
        else:
            heapq.heappop(self._events)[2]()

    # -- rollout -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Rule 1, then rule 2."""
        w = self.w
        while len(self._live) + 1 <= self.flow.limit and w.slots - self._held >= min(w.members, w.slots):
            group = _Group(next(self._numbers), w.members, self.deadlines.patience(self.now))
            self._live.add(group.id)
            self._pending.append(group)
            self._held += w.members
        while self._pending:
            rank = len(self._live) - len(self._pending)  # older groups
            if len(self._published) + w.bound < self.committed + rank // w.groups:
                return
            self._begin(self._pending.popleft())

    def _begin(self, group: _Group) -> None:
        group.began, group.running = self.now, group.members
        self.lives.begin(group.id, self.now)
        self.deadlines.start(group.record, self.now)
        if group.record.patience < math.inf:
            self._after(group.record.patience, lambda: self._deadline(group))
        drawn = self.random.choice(self.w.recorded) if self.w.recorded else ()
        for member in range(group.members):
            if drawn:  # a group of more members than were recorded has some twice
                recorded = drawn[member] if member < len(drawn) else self.random.choice(drawn)
                self._sample(_Episode(group, member, len(recorded), self.now, recorded))
                continue
            turns = self.w.turns
            while self.random.random() < self.w.again:
                turns += 1
            self._sample(_Episode(group, member, turns, self.now))

    def _sample(self, episode: _Episode) -> None:
        recorded = episode.recorded
        tokens = recorded[-episode.left].tokens if recorded else self.w.tokens.draw(self.random)
        episode.turn_began, episode.tokens = self.now, tokens
        heapq.heappush(self._sampling, (self._served + episode.tokens, next(self._order), episode))

    def _turn_ended(self, episode: _Episode) -> None:
        episode.turns.append((episode.turn_began, self.now, episode.tokens))
        self.tokens.begin(episode.uid, self.now, episode.tokens)
        wait = episode.recorded[-episode.left].wait if episode.recorded else math.nan
        episode.left -= 1
        left = self.w.limit - (self.now - episode.began)
        if left <= 0 or not (episode.left or episode.recorded):
            self._landed(episode)
            return
        seconds = min(wait if episode.recorded else self.w.tool.draw(self.random), left)
        episode.tools += seconds
        goes_on = self._sample if episode.left else self._landed
        self._after(seconds, lambda: goes_on(episode))

    def _landed(self, episode: _Episode) -> None:
        group = episode.group
        self._held -= 1
        group.running -= 1
        if not group.running:
            self.deadlines.end(group.record, self.now)
        if group.settled:
            self.tokens.end(episode.uid, self.now)
            (self._late if group.taken else group.landed).append(episode)
        else:
            group.landed.append(episode)
            self._deadline(group)
        self._train()

    def _deadline(self, group: _Group) -> None:
        """Fix the baseline, if it is time."""
        due = not group.running or (group.landed and self.now >= group.record.deadline)
        if group.settled or not due:
            return
        group.settled = True
        self.lives.end(group.id, self.now)
        if self.random.random() < self.w.filtered:
            self._live.discard(group.id)
            for episode in group.landed:
                self.tokens.forget(episode.uid)
            return
        for episode in group.landed:
            self.tokens.end(episode.uid, self.now)
        heapq.heappush(self._ready, (group.id, group))
        self._train()

    # -- training ------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Take a micro-batch, oldest groups first."""
        missing = self.w.groups - len(self._taken)
        if self._working or missing <= 0 or len(self._ready) < min(self.w.micro, missing):
            return
        groups = [heapq.heappop(self._ready)[1] for _ in range(min(missing, len(self._ready)))]
        episodes = [episode for group in groups for episode in group.landed] + self._late
        self._late = []
        for group in groups:
            group.taken = True
        self._taken += groups
        turns = np.array([turn for episode in episodes for turn in episode.turns])
        sampled = turns[:, 1] - np.outer(PARTS, turns[:, 1] - turns[:, 0])
        versions = np.searchsorted(np.array(self._published), sampled, "right")
        self._lags.append((self.committed - versions, np.broadcast_to(turns[:, 2], versions.shape)))
        seconds = self.w.train * len(episodes) / (self.w.groups * self.w.members)
        self._working, self._worked = True, self._worked + seconds
        self._after(seconds, self._trained)

    def _trained(self) -> None:
        self._working = False
        if len(self._taken) < self.w.groups:
            self._train()
            return
        self._working, self._worked = True, self._worked + self.w.commit
        self._after(self.w.commit, self._commit)

    def _commit(self) -> None:
        self._working, live = False, len(self._live)
        self._live -= {group.id for group in self._taken}
        self._taken, self.committed = [], self.committed + 1
        self._after(self.w.publish, lambda: self._published.append(self.now))
        lags, tokens = (np.concatenate([part[k].ravel() for part in self._lags]) for k in (0, 1))
        over, seconds = lags > self.w.bound, self.now - self._began
        measured = Measured(
            seconds=seconds,
            train=self._worked,
            rollout=self._busy,
            masked=float(tokens[over].sum() / tokens.sum()),
            life=self.lives.mean(self.now, self.w.limit),
        )
        lag = float(lags[~over] @ tokens[~over] / max(1e-9, tokens[~over].sum()))
        useful = float(tokens[~over].sum()) / PARTS.size
        busy = self._busy / seconds
        self.steps.append(SimulatedStep(self.flow.limit, self._held, lag, busy, useful, measured))
        if self.adapts:
            grows = 1 - self._worked / seconds >= BUSY and live >= self.flow.limit
            crossed = self.crossings.committed(measured.masked, float(tokens.sum()) / PARTS.size, self.now)
            self.flow.update([(crossed, self.w.budget)], grows)
        self._lags, self._began, self._busy, self._worked = [], self.now, 0.0, 0.0
        self._train()
