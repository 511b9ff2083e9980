from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

from asyncrl.buffer.records import State
from asyncrl.buffer.shifts import NO_REQUEST, EngineClock, Outlook, Shift, Shifts, Situation
from asyncrl.buffer.staleness import assignable_episodes, drop_overdue
from tests.unit.buffer.machine import land, make

READY = Outlook(ready=True, group_fraction=1.0, batch_complete=False)


def test_a_shift_after_the_other() -> None:
    """Each state waits for what the other side reports, and for nothing else."""
    shifts = Shifts("auto", 0.0, Shift.SLEEPING)
    visited = []
    for situation in (
        Situation(trainer_waits=True, outlook=READY),
        Situation(engines_asleep=True),
        Situation(trainer_waits=True, outlook=READY, engines_asleep=True),  # trains
        Situation(trainer_waits=True, engines_asleep=True),
        Situation(trainer_waits=True, engines_asleep=True, ranks_offloaded=True),
        Situation(trainer_waits=True, engine_awake=True, ranks_offloaded=True),
        Situation(
            trainer_waits=True, engine_awake=True, ranks_offloaded=True, outlook=Outlook(True, 0.9, False)
        ),
        Situation(trainer_waits=True, engine_awake=True, ranks_offloaded=True, outlook=READY),
    ):
        shifts.enter_next(1.0 * len(visited), situation)
        visited.append(shifts.shift)
    asleep = Shift.SLEEPING
    train = Shift.TRAIN
    waking = Shift.WAKING
    rollout = Shift.ROLLOUT
    assert visited == [asleep, train, train, waking, waking, rollout, rollout, asleep]
    assert shifts.change_seconds == {Shift.SLEEPING: 1.0, Shift.WAKING: 2.0} and shifts.train_shifts == 1


@pytest.mark.parametrize(
    ("fill", "share", "complete", "idle", "begins"),
    [
        (0.5, 0.5, False, 0.0, True),
        (0.5, 0.4, False, 99.0, False),
        (0.5, 0.1, True, 0.0, True),
        ("auto", 0.9, False, 3.0, False),
        ("auto", 0.2, False, 3.1, True),
        ("auto", 1.0, False, 0.0, True),
    ],
)
def test_enough_of_a_batch_begins_the_trainers_shift(
    fill: Any, share: float, complete: bool, idle: float, begins: bool
) -> None:
    """With auto: all groups; or any that are ready, once engines have idled for longer than two changes."""
    shifts = Shifts(fill, 0.0, Shift.ROLLOUT)
    shifts.change_seconds = {Shift.SLEEPING: 1.0, Shift.WAKING: 2.0}
    seen = Situation(outlook=Outlook(True, share, complete), trainer_waits=True, idle_seconds=idle)
    assert shifts.enter_next(0.0, seen) is begins
    assert not Shifts(fill, 0.0, Shift.ROLLOUT).enter_next(
        0.0, Situation(Outlook(False, 1.0, True), idle_seconds=99.0)
    )


def test_ranks_that_start_come_first_but_after_a_validation() -> None:
    shifts = Shifts("auto", 0.0, Shift.ROLLOUT)
    assert not shifts.enter_next(0.0, Situation(ranks_starting=True, validation_waits=True))
    assert not shifts.enter_next(0.0, Situation(trainer_waits=True, outlook=READY, validation_waits=True))
    assert shifts.enter_next(0.0, Situation(ranks_starting=True)) and shifts.shift is Shift.SLEEPING
    shifts = Shifts("auto", 0.0, Shift.WAKING)
    assert shifts.enter_next(0.0, Situation(ranks_starting=True)) and shifts.shift is Shift.SLEEPING
    shifts = Shifts("auto", 0.0, Shift.TRAIN)
    assert not shifts.enter_next(
        0.0, Situation(ranks_starting=True, trainer_waits=True, validation_waits=True)
    )
    assert (
        shifts.enter_next(0.0, Situation(trainer_waits=True, validation_waits=True, outlook=READY))
        and shifts.shift is Shift.WAKING
    )


def test_the_engines_clock_stands_still_while_they_sleep() -> None:
    clock = EngineClock(0.0)
    clock.stop(10.0), clock.stop(11.0)
    assert [clock(9.0), clock(12.0)] == [9.0, 10.0]
    clock.go(14.0), clock.go(15.0)
    assert clock(15.0) == 11.0
    clock.stop(20.0), clock.go(25.0)
    assert clock(26.0) == 17.0


# -- the machine over the real buffer ----------------------------------------------------------------------


class World:
    """A run with random episodes, where engines and trainer share their devices. Engines sample in ROLLOUT
    only, and only then episodes land; the trainer trains in TRAIN only. Changes of the devices take no time
    but may be interrupted by ranks that start again."""

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        keys: dict[str, Any] = {
            "groups_per_batch": random.choice([1, 2, 4]),
            "episodes_per_group": random.choice([1, 2, 4]),
            "max_staleness": random.choice([0, 1, 4]),
            "on_stale": random.choice(["mask", "hold", "drop"]),
            "filter_zero_variance": random.random() < 0.5,
            "group_policy": random.choice(["complete", "partial"]),
            "max_refill": random.choice([1, 8]),
        }
        keys["target_staleness"] = random.choice([0, keys["max_staleness"]])
        if keys["group_policy"] == "partial":
            keys["group_deadline"] = 5.0
        if keys["episodes_per_group"] == 1:
            keys["filter_zero_variance"] = False
        self.steps = random.choice([1, 3, 6])
        self.ranks = random.choice([1, 2, 4])
        epochs, rows = random.choice([(0, 50), (1, random.randint(1, 20))])
        self.buffer, self.batches = make(
            rows, self.steps * keys["groups_per_batch"], epochs, greedy=random.random() < 0.2, **keys
        )
        self.batches.micro_batch_tokens = random.choice([10, 60, 1 << 20])
        self.batches.flush_at_end = random.random() < 0.5
        self.barrier = random.random() < 0.2  # the trainer asks for the whole batch before it computes
        self.shifts = Shifts(random.choice(["auto", 0.0, 0.5, 1.0]), 0.0, Shift.SLEEPING)
        self.slots = random.choice([1, 4, 100])
        self.now = self.sampled_at = 0.0
        self.version = self.part_index = self.moves = self.idle_moves = 0
        self.starting = True
        self.asked = False
        self.awake = False
        self.resting = True

    @property
    def over(self) -> bool:
        return self.buffer.committed >= self.steps or self.batches.over

    @property
    def time(self) -> float:
        return self.shifts.clock(self.now)

    @property
    def outlook(self) -> Outlook:
        step = self.buffer.current_step
        return self.batches.outlook(step, self.part_index, self.ranks) if self.asked else NO_REQUEST

    def progress(self) -> None:
        self.idle_moves = 0

    def turn(self) -> bool:
        """Make what is due, as the coordinator does; False: nothing but time, or an episode, is left."""
        buffer = self.buffer
        before = self._state()
        while buffer.can_admit(self.slots - self._running() - buffer.waiting_count, self.slots):
            buffer.admit_group(self.time)
        buffer.settle_overdue(self.time)
        drop_overdue(buffer)
        for needed, episode in list(assignable_episodes(buffer)):
            if needed <= self.version and self._running() < self.slots:
                buffer.assign(episode, "w", 1, self.version, self.time)
        if buffer.prompts.over and not self.batches.flush_at_end:
            self.batches.drop_remainder()
        self._shift()
        if self.shifts.shift is Shift.TRAIN:
            self._train()
        return self._state() != before

    def _state(self) -> tuple[object, ...]:
        states = tuple(sorted(self.buffer.state_counts().items()))
        return states, self.shifts.shift, self.part_index, self.buffer.committed, self.asked, self.resting

    def _running(self) -> int:
        return self.buffer.tally.state_counts[State.RUNNING]

    def _shift(self) -> None:
        seen = Situation(
            outlook=self.outlook,
            ranks_starting=self.starting,
            trainer_waits=self.asked,
            engines_asleep=not self.awake,
            engine_awake=self.awake,
            ranks_offloaded=self.resting,
            idle_seconds=self.now - self.sampled_at,
        )
        if self.shifts.enter_next(self.now, seen):
            self.moves += self.shifts.shift in (Shift.TRAIN, Shift.ROLLOUT)
            self.idle_moves += self.shifts.shift in (Shift.TRAIN, Shift.ROLLOUT)
            assert self.idle_moves <= 2, "devices changed twice, and nothing was done"
        match self.shifts.shift:
            case Shift.SLEEPING:
                self.awake = False
            case Shift.WAKING if not self.resting:
                self.resting = True
            case Shift.WAKING:
                self.awake = True
                self.version = self.buffer.committed
        assert not (self.awake and not self.resting), "both sides have the devices"
        assert self.awake or self.shifts.shift is not Shift.ROLLOUT

    def _train(self) -> None:
        if self.starting:
            self.starting = False
            self.asked = True
            self.resting = False
            self.progress()
            return
        uids = self.batches.next_part(self.buffer.current_step, self.part_index, self.ranks)
        if uids is None:
            return
        self.resting = False
        self.progress()
        if uids:
            self.part_index += 1
            return
        step = self.buffer.current_step
        self.batches.commit_batch(step, self.batches.by_step[step].uids)
        self.part_index = 0

    def wait(self) -> None:
        """An episode lands, or fails; ranks are started again; or time passes."""
        self.now += self.random.expovariate(1.0)
        running = [e for e in self.buffer.episodes.values() if e.state is State.RUNNING]
        engines = self.shifts.shift is Shift.ROLLOUT
        if self.random.random() < 0.02 and self.shifts.shift in (Shift.ROLLOUT, Shift.TRAIN):
            self.starting = True
            self.asked = False
            self.resting = True
            self.progress()  # a start is a reason
        elif running and engines:
            self.sampled_at = self.now
            episode = self.random.choice(running)
            if self.random.random() < 0.05:
                self.buffer.fail_attempt(episode, "engine_error", self.time)  # type: ignore[arg-type]
            else:
                reward = self.random.choice([0.0, 1.0])
                oldest = self.random.randint(max(0, episode.min_version), self.version)
                land(self.buffer, episode.uid, reward, oldest, self.time)
            self.progress()


@pytest.mark.parametrize("part", range(2))
def test_devices_change_only_for_work_and_there_is_always_a_next_event(part: int) -> None:
    """1,000 worlds, 10,000 more with `make long`: each run trains all that it can."""
    worlds(range(part * 500, (part + 1) * 500))


@pytest.mark.long
def test_10_000_worlds() -> None:
    worlds(range(1_000, 11_000))


def worlds(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        for _ in range(20_000):
            for turns in itertools.count():
                if world.over or not world.turn():
                    break
                assert turns < 1_000, f"world {seed}: it never comes to rest"
            if world.over:
                break
            running = world._running()
            stuck = not running and world.shifts.shift is Shift.ROLLOUT and world.now > world.sampled_at + 100
            assert not stuck, f"world {seed}: nothing runs, and nothing is trained"
            world.wait()
        assert world.over, f"world {seed}: step {world.buffer.committed} of {world.steps}"
        assert world.buffer.account().conserved
