from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.buffer.records import NEVER_STALE
from asyncrl.buffer.replay import running_attempt
from asyncrl.buffer.staleness import (
    GroupSlots,
    LagHistogram,
    assignable_episodes,
    drop_overdue,
    lag,
    length_bucket,
    masked_by_quarter,
    stale_mask,
    token_lags,
    upcoming_slots,
)
from asyncrl.types import DropReason, EpisodeResult, EpisodeStats, FailReason, VersionSpan, start_version
from tests.unit.buffer.machine import admit, count_again, land_group, make

lags = st.lists(st.integers(0, 20), max_size=40)


def test_by_hand() -> None:
    """At V = 7 with a bound of 4, versions below 3 are over it."""
    spans = [VersionSpan(2, 4, 1, 1), VersionSpan(4, 5, 2, 2), VersionSpan(8, 10, 3, 3)]
    lags = token_lags(spans, current_version=7)
    assert lags == [6, 6, 5, 4, 4]
    assert stale_mask(lags, max_staleness=4) == [True, True, True, False, False]


def test_versions_ahead_of_the_step_count_by_distance() -> None:
    assert lag(3, 5) == lag(5, 3) == 2
    assert stale_mask(token_lags([VersionSpan(0, 1, 9, 9)], current_version=3), max_staleness=4) == [True]


@settings(deadline=None)
@given(lags, st.integers(0, 8))
def test_no_token_over_the_bound_is_left(values: list[int], bound: int) -> None:
    mask = stale_mask(values, bound)
    left = [value for value, stale in zip(values, mask, strict=True) if not stale]
    assert max(left, default=0) <= bound and len(left) == sum(value <= bound for value in values)


@settings(deadline=None)
@given(lags)
def test_the_histogram_counts_every_token(values: list[int]) -> None:
    histogram = LagHistogram(Counter(values))
    ordered = sorted(values)
    assert histogram.token_count == len(ordered)
    if ordered:
        assert histogram.max == ordered[-1] and histogram.quantile(1.0) == ordered[-1]
        assert histogram.quantile(0.5) == ordered[(len(ordered) - 1) // 2]
        assert abs(histogram.mean * len(ordered) - sum(ordered)) < 1e-9


def test_an_empty_histogram_is_zero() -> None:
    empty = LagHistogram({})
    assert (empty.token_count, empty.mean, empty.max, empty.quantile(0.95)) == (0, 0.0, 0, 0)


@settings(deadline=None)
@given(st.integers(0, 10**6))
@example(32)
def test_length_buckets_are_powers_of_two(tokens: int) -> None:
    low = length_bucket(tokens)
    assert (low == 0 and tokens < 32) or low <= tokens < 2 * low


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_quarters_cover_the_response(stale: list[bool]) -> None:
    quarters = masked_by_quarter(stale)
    assert [sum(column) for column in zip(*quarters, strict=True)] == [sum(stale), len(stale)]
    assert max(n for _, n in quarters) - min(n for _, n in quarters) <= 1


# -- hold: it keeps the bound and never waits for ever ------------------------------------------------------


STEPS = 12
SEEDS = 3


class HeldRun:
    """A run with servers that are updated one by one, and now and then set aside with the weights they have.

    Events are (time, number, what to do). A turn goes to any server that the buffer's rules admit; its length
    and the number of turns are log-normal. `worst` is the largest lag of a trained token.
    """

    def __init__(self, seed: int, servers: int = 2, **keys: Any) -> None:
        self.random = random.Random(seed)
        self.buffer, self.batches = make(**{"on_stale": "hold"} | keys)
        self.strict = True  # from its first step the run has had one rule
        self.held = [0] * servers
        self.leased = [False] * servers
        self.loading = [False] * servers
        self.events: list[tuple[float, int, Any]] = []
        self.numbers = itertools.count()
        self.now = 0.0
        self.worst = 0
        self.training = False
        self.published = 0
        self.turns: list[tuple[str, int, int]] = []  # that wait for a server: (uid, attempt, left)
        if servers > 1:
            self.after(self.random.uniform(1, 10), self.lease)

    @property
    def bound(self) -> int:
        return self.buffer.config.max_staleness

    def after(self, seconds: float, action: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), action))

    def until(self, steps: int, every: int = 1) -> None:
        """Until so many batches are committed; every so many are published."""
        self.every = every
        limit = self.now + 2000
        while self.buffer.committed < steps:
            self.go_on()
            assert self.now < limit and self.events, f"step {self.buffer.committed} waits for ever"
            self.now, _, action = heapq.heappop(self.events)
            action()

    def go_on(self) -> None:
        while self.buffer.can_admit(100, 100):
            self.buffer.admit_group(self.now)
        drop_overdue(self.buffer)
        for needed, episode in assignable_episodes(self.buffer):
            if fit := [self.held[server] for server in self.usable(needed)]:
                self.buffer.assign(episode, "w", 1, min(fit), 0.0)
                self.turns.append((episode.uid, episode.attempt, int(self.random.lognormvariate(0.5, 1))))
        assert not self.strict or min(upcoming_slots(self.buffer).slots_left) >= 0, (
            "more groups are due than there are places"
        )
        self.turns = [turn for turn in self.turns if not self.begun(*turn)]
        for server, version in enumerate(self.held):
            if version < self.published and not self.leased[server] and not any(self.loading):
                self.loading[server] = True
                self.after(self.random.uniform(0.05, 2), lambda server=server: self.load(server))
        self.take()

    def usable(self, oldest: int) -> list[int]:
        return [s for s, version in enumerate(self.held) if not self.leased[s] and version >= oldest]

    def begun(self, uid: str, attempt: int, left: int) -> bool:
        """Whether the turn has a server, or is wanted no more."""
        if (episode := running_attempt(self.buffer.episodes, uid, attempt)) is None:
            return True
        servers = self.usable(max(episode.min_version, self.buffer.committed - self.bound))
        if servers:
            version = self.held[self.random.choice(servers)]
            self.after(self.random.lognormvariate(0, 1), lambda: self.end_turn(uid, attempt, left, version))
        return bool(servers)

    def end_turn(self, uid: str, attempt: int, left: int, version: int) -> None:
        if (episode := running_attempt(self.buffer.episodes, uid, attempt)) is None:
            return
        if self.random.random() < 0.05:
            self.buffer.retries += 1
            reason = self.random.choice([FailReason.WORKER_LOST, FailReason.REWARD_ERROR])
            self.buffer.fail_attempt(episode, reason, self.now)
            return
        episode.add_turn(20, 10, version, version)
        self.buffer.mark_changed(episode)
        if left > 0:
            self.turns.append((uid, attempt, left - 1))
        else:  # some groups are of zero variance
            reward = float(self.random.random() < 0.5)
            self.buffer.finish_episode(episode, EpisodeResult(reward), EpisodeStats(episode.turns), self.now)

    def take(self) -> None:
        count_again(self.buffer)
        step = self.buffer.current_step
        plan = None
        while not self.training:
            batch = self.batches.by_step.get(step)
            if (plan := self.batches.next_part(step, len(batch.parts) if batch else 0, 1)) is None:
                return
            self.worst = max(
                [
                    self.worst,
                    *(start_version(step) - self.batches.planned_episodes[uid].oldest for uid in plan),
                ]
            )
            if not plan:
                self.training = True
                self.after(self.random.uniform(0.2, 1.5), self.commit)

    def commit(self) -> None:
        self.training = False
        step = self.buffer.current_step
        self.batches.commit_batch(step, self.batches.by_step[step].uids)
        if self.buffer.committed % self.every == 0:
            self.published = self.buffer.committed

    def load(self, server: int) -> None:
        self.held[server], self.loading[server] = self.published, False

    def lease(self) -> None:
        """A validation of some versions' time, which ends with a server that is behind the others."""
        idle = [server for server, loading in enumerate(self.loading) if not loading]
        self.leased[server := self.random.choice(idle)] = True
        self.after(self.random.uniform(1, 10), lambda: self.release(server))

    def release(self, server: int) -> None:
        self.leased[server] = False
        self.after(self.random.uniform(1, 20), self.lease)

    @property
    def stale(self) -> int:
        return self.buffer.reasons[f"dropped/{DropReason.STALE}"]


CASES = [(1, 1, 2, 1), (1, 1, 2, 2), (2, 1, 3, 1), (2, 2, 1, 1), (0, 0, 2, 1), (4, 4, 3, 3)]


@pytest.mark.parametrize(("bound", "target", "servers", "every"), CASES)
@pytest.mark.parametrize("filtering", [{}, {"filter_zero_variance": True, "max_refill": 1}])
def test_a_server_that_comes_back_with_old_weights_stops_nothing(
    bound: int, target: int, servers: int, every: int, filtering: dict[str, Any]
) -> None:
    for seed in range(SEEDS):
        run = HeldRun(seed, servers, max_staleness=bound, target_staleness=target, **filtering)
        run.until(STEPS, every)
        assert run.worst <= bound and run.stale == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"on_stale": "hold", "max_staleness": 4, "target_staleness": 3}, {"max_staleness": 1}),
        ({"on_stale": "mask", "max_staleness": 2, "target_staleness": 2}, {"on_stale": "hold"}),
    ],
)
def test_a_resumed_run_with_a_stricter_rule_drops_what_is_late_and_goes_on(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    dropped = 0
    for seed in range(2 * SEEDS):
        run = HeldRun(seed, **before)
        run.until(STEPS, every=2)
        run.buffer.config = msgspec.structs.replace(run.buffer.config, **after, target_staleness=1)
        run.worst = 0
        run.strict = False
        run.until(2 * STEPS)
        assert run.worst <= run.bound
        dropped += run.stale
    assert dropped  # by name: else this showed nothing


def test_a_group_that_starts_late_leaves_room_for_the_older_one() -> None:
    """By the order of admission there would be room for both; but a younger group has gone first."""
    buffer, batches = make(on_stale="hold", max_staleness=1, target_staleness=1)
    buffer.committed = 1
    admit(buffer, 3)
    for uid in ("0.0", "0.1"):
        buffer.assign(buffer.episodes[uid], "w", 1, 0, 0.0)  # due in batch 1
    land_group(buffer, 2, 1.0, 0.0, version=1)
    batches.micro_batch_tokens = 40
    assert batches.next_part(2, 0, 1) == ["2.0", "2.1"]
    assert {needed for needed, _ in assignable_episodes(buffer)} == {
        1
    }  # group 1: on version 0, both would be due now


def test_a_batch_that_was_closed_short_has_no_places_left() -> None:
    buffer, batches = make(on_stale="hold", max_staleness=1, target_staleness=1, max_refill=1)
    buffer.committed = 1
    buffer.refills = 2
    admit(buffer, 2)
    land_group(buffer, 0, 1.0, 0.0, version=1)
    assert len(batches.next_part(2, 0, 1) or []) == 2
    assert {needed for needed, _ in assignable_episodes(buffer)} == {0}  # due in batch 1, while that is open
    assert batches.next_part(2, 1, 1) == []
    assert {needed for needed, _ in assignable_episodes(buffer)} == {1}


def test_a_group_whose_oldest_version_changes_gives_its_former_slots_back() -> None:
    """At V = 7 a group of version 6 is due one batch after the current one, a group of version 5 at once."""
    slots = GroupSlots(7, free_slots=2, slots_per_batch=2, max_staleness=2, oldest_versions=[6, 6])
    assert slots.slots_left == [2, 2, 4]
    slots.move_group(6, 5)
    assert slots.slots_left == [1, 2, 4]


def fits(step: int, free: int, per_batch: int, bound: int, floors: list[int]) -> bool:
    """Whether all groups can be taken in time, those due first first."""
    due_steps = sorted(floor + bound for floor in floors)
    batches = [step] * free + [step + 1 + index // per_batch for index in range(len(due_steps))]
    return all(batch <= last for batch, last in zip(batches, due_steps, strict=False))


@settings(deadline=None)
@given(
    free=st.integers(0, 3),
    per_batch=st.integers(1, 3),
    bound=st.integers(0, 4),
    ages=st.lists(st.integers(0, 4), max_size=8),
    age=st.none() | st.integers(0, 4),
)
def test_places_are_what_a_schedule_by_due_time_leaves(
    free: int, per_batch: int, bound: int, ages: list[int], age: int | None
) -> None:
    """`needed`: the oldest version on which a group with this floor may start; against all schedules."""
    step = 10
    free = min(free, per_batch)
    floors = [step - min(age, bound) for age in ages]
    floor = NEVER_STALE if age is None else step - min(age, bound)
    oldest_versions = [*floors, floor]
    slots = GroupSlots(step, free, per_batch, bound, oldest_versions)
    assert (min(slots.slots_left) >= 0) is fits(step, free, per_batch, bound, oldest_versions)
    if min(slots.slots_left) < 0:
        return
    possible = [
        v
        for v in range(step - bound, step + 2)
        if fits(step, free, per_batch, bound, [*floors, min(v, floor)])
    ]
    assert slots.min_start_version(floor) == possible[0]
    assert slots.may_take(floor) is (free > 0 and fits(step, free - 1, per_batch, bound, floors))
    assert slots.may_close is fits(step, 0, per_batch, bound, oldest_versions)
