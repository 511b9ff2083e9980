"""Shifts in simulated runs: whose the devices are, what time is made of, what is trained and how late."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from asyncrl.buffer.records import State
from asyncrl.buffer.shifts import Shift
from asyncrl.config import BufferConfig
from asyncrl.planning.simulator import RecordedTurn, Simulation, Workload
from tests.fakes.scripts import bench_script

TAILS = bench_script("flow_control").TAILS
BUFFER = BufferConfig(groups_per_batch=8, episodes_per_group=4, group_policy="complete", max_staleness=4)
PLAIN = Workload(  # batches of 3200 tokens: 30 s of sampling, 10 s of training, 3 s of changes
    (((RecordedTurn(100.0, 0.0),),) * 4,),
    BUFFER,
    speed=math.inf,
    rate=3200 / 30,
    train=9.0,
    commit=1.0,
    shift=3.0,
)
# A tenth of the calls take as long as five batches.
SLOW = replace(
    PLAIN, recorded=tuple(((RecordedTurn(100.0, 400.0 if n % 10 == 0 else 1.0),),) * 4 for n in range(40))
)


class Watched(Simulation):
    """Counts the intervals in which engines sample, and those in which the trainer works."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        super().__init__(workload, seed)
        self.sampled = self.trained = 0

    def _advance(self) -> None:
        assert self.shifts is not None
        busy = self._engine_seconds
        works = self._trainer_working
        shift = self.shifts.shift
        super()._advance()
        if self._engine_seconds > busy:
            self.sampled += 1
            assert shift is Shift.ROLLOUT and not works
        if works:
            self.trained += 1
            assert shift is Shift.TRAIN


@pytest.mark.parametrize("workload", [PLAIN, SLOW, *(replace(w, shift=0.05) for w in TAILS.values())])
def test_one_side_has_the_devices_and_nothing_is_lost(workload: Workload) -> None:
    """Time is made of the engines' clock, training and changes; what was issued is trained, or live."""
    run = Watched(workload)
    steps = run.run(25)
    assert run.sampled > 25 and run.trained >= 25 and run.shifts is not None
    worked = sum(step.train for step in steps)
    changes = run.shifts.train_shifts * (workload.shift or 0)
    assert run.now == pytest.approx(run._engine_clock + worked + changes)
    assert run.now == pytest.approx(sum(step.seconds for step in steps))
    flow = run.buffer.account()
    assert flow.conserved and flow.trained >= 24 * workload.buffer.batch_size
    masked = sum(step.masked for step in steps) / 25
    assert masked < 0.05


def test_without_tails_a_step_takes_what_its_parts_take() -> None:
    assert [step.seconds for step in Simulation(PLAIN).run(20)[3:]] == pytest.approx([43.0] * 17)


def test_without_staleness_episodes_see_the_newest_weights_only() -> None:
    strict = replace(PLAIN, buffer=replace(BUFFER, max_staleness=0))
    steps = Simulation(strict).run(9)
    assert [(step.lag, step.masked) for step in steps] == [(0.0, 0.0)] * 9
    assert steps[-1].seconds == pytest.approx(43.0)


def test_engines_that_wait_for_slow_tools_give_the_devices_for_a_part_of_a_batch() -> None:
    """auto: once they have idled for longer than two changes take. With 1 they wait for all of it."""
    parts = replace(SLOW, micro_tokens=400)
    runs = [
        Simulation(replace(parts, buffer=replace(BUFFER, shift_fill=fill, target_staleness=0)))
        for fill in ("auto", 1.0)
    ]
    some, whole = (run.run(20) for run in runs)
    shifts = [run.shifts.train_shifts for run in runs if run.shifts is not None]
    assert shifts[0] > 20 == shifts[1]
    assert sum(step.seconds for step in some) < 0.99 * sum(step.seconds for step in whole)


def test_it_is_seeded() -> None:
    tail = replace(TAILS["tail"], shift=0.05)
    one, again, other = (Simulation(tail, seed).run(12) for seed in (3, 3, 4))
    assert one == again != other


def test_devices_that_are_lent_sample_while_the_trainer_waits() -> None:
    """One of two devices trains for 10 s, and samples for the rest of T: T + (T - 10) = 30."""
    fixed = replace(BUFFER, target_staleness=2)
    apart = replace(PLAIN, shift=None, buffer=fixed, publish=0.0)
    lent = Simulation(replace(apart, lent=apart.rate)).run(40)
    assert sum(step.seconds for step in lent[20:]) / 20 == pytest.approx(20.0, rel=0.02)
    alone = Simulation(apart).run(40)
    assert sum(step.seconds for step in alone[20:]) / 20 == pytest.approx(30.0, rel=0.02)


def test_deadlines_are_on_the_clock_of_the_engines() -> None:
    """Groups whose deadline passes while their engines sleep are settled when these have sampled as long."""
    groups = tuple(
        (*(((RecordedTurn(50.0, 0.0),),) * 3), (RecordedTurn(50.0, wait),)) for wait in (0.0, 200.0, 300.0)
    )
    partial = replace(BUFFER, group_policy="partial", group_deadline=20.0)
    run = Simulation(replace(PLAIN, recorded=groups, buffer=partial))
    steps = run.run(20)
    assert run.buffer.tally.state_counts[State.LANDED] < 64 and len(steps) == 20
