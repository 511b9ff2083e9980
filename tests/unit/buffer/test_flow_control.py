"""Flow control: its arithmetic by hand, and whole runs of the simulator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import cache

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl.buffer.flow_control import AIM, BUDGET, CAUTION, FlowControl, Measured
from asyncrl.buffer.simulator import LogNormal, SimulatedStep, Simulation, Workload

PLAIN = Workload()
SLOW_TOOL = replace(PLAIN, members=8, turns=4, tool=LogNormal(0.097, 1.5))
TAIL = replace(  # that of tools/bench/async_ratio.py: 0.3 s a call, the demo's model
    PLAIN,
    members=8,
    turns=1,
    again=0.47,
    tokens=LogNormal(7.0, 0.3),
    tool=LogNormal(0.097, 1.5),
    speed=600.0,
    train=0.085,
    publish=0.02,
    limit=600.0,
)
WORKLOADS = {
    "tail": replace(TAIL, deadline="auto"),
    "tail, complete": TAIL,
    "rollout bound": PLAIN,
    "trainer bound": replace(PLAIN, train=1.0),
    "slow tool": SLOW_TOOL,
    "slow tool, partial": replace(SLOW_TOOL, deadline=1.0),
    "lengths": replace(PLAIN, turns=1, tokens=LogNormal(100.0, 1.0), slots=256),
    "synchronous": replace(SLOW_TOOL, bound=0),
}
CHANGES: dict[str, Callable[[Workload], Workload]] = {
    "a longer tail": lambda w: replace(w, tool=replace(w.tool, median=3 * w.tool.median)),
    "a slower trainer": lambda w: replace(w, train=3 * w.train),
    "a third of the engines": lambda w: replace(w, rate=w.rate / 3),
    "three times the engines": lambda w: replace(w, rate=w.rate * 3),
}
HALF = 50  # steps before the change, and after it


def measured(**keys: float) -> Measured:
    """The worked example of docs/staleness.md: 8 groups per batch, a bound of 4."""
    numbers = {
        "seconds": 2.0,
        "train": 0.2,
        "rollout": 0.5,
        "trainer_idle": 0.9,
        "masked": AIM,
        "overdue": 0.0,
    }
    numbers |= {"life": 3.0, "unloaded": 1.0, "token_age": 9.0}
    numbers |= {"settled": 400} | keys
    return msgspec.convert(numbers, Measured, strict=False)


def moved(limit: float = 16, **keys: float) -> FlowControl:
    control = FlowControl(8, 4, limit=limit)
    control.caution = 1.0
    control.update(measured(**keys))
    return control


def test_the_example_of_the_docs() -> None:
    """With 400 groups settled the budget asks for steps of 1.05 * 9 / 4.5 = 2.1 s."""
    control = moved(14)
    assert control.level == pytest.approx(14 + (8 * (0.75 + 3 / 2.1) - 14) / (1 + 14 / 8))
    assert control.limit == 15 and control.caution == 1.0


def test_the_trainer_is_fed_where_the_budget_allows_it() -> None:
    """Lives of 1 s, steps of 0.5 s: 8 groups train, 16 are under way, 4 more for their variation; 28 of at
    most 40. The move is clipped to a quarter of a batch."""
    keys = {"life": 1.0, "token_age": 0.5}
    assert moved(**keys).level == 18
    assert moved(27.5, **keys).level == 27.5  # within a group
    assert moved(39, **keys).level == pytest.approx(39 + (28 - 39) / (1 + 39 / 8))
    assert moved(16, **keys, trainer_idle=0.01).level == 16  # it has no need
    assert moved(16, **keys, settled=63).level == 16  # the tail is not known yet
    assert moved(39, **keys, trainer_idle=0.01, settled=1).level < 39


@pytest.mark.parametrize(("groups", "enough"), [(2, 16), (8, 64), (16, 64)])
def test_small_batches_know_their_tail_after_eight_of_them(groups: int, enough: int) -> None:
    for settled in (enough - 1, enough):
        control = FlowControl(groups, 4, limit=groups)
        control.update(measured(life=1.0, token_age=0.5, settled=settled))
        assert (control.level > groups) == (settled == enough)


def test_long_lives_on_a_loaded_engine_do_not_ask_for_more_groups() -> None:
    keys = {"life": 1.0, "token_age": 0.5}
    assert moved(20, **keys, unloaded=0.4).level < 20 < moved(20, **keys).level


def test_masked_tokens_over_the_budget_shrink_the_limit() -> None:
    control = moved(masked=0.125)  # of a batch, an eighth
    assert control.caution == pytest.approx(math.exp(0.015 * (0.125 / 0.008 - 1)))
    before = control.level
    for _ in range(20):
        control.update(measured(masked=0.04))
    assert control.level < before - 1 and control.caution > 1.8
    for _ in range(50):
        control.update(measured(masked=1.0))
    assert control.caution == 4 and 8 * (0.75 + 3 / 8.4) <= control.level <= 8 * (0.75 + 3 / 8.4) + 1


def test_the_correction_stays_within_its_limits_whatever_is_measured() -> None:
    assert moved(masked=0.0, overdue=400.0).caution == 4


def test_tokens_count_when_they_cross_the_bound_not_when_they_are_trained() -> None:
    """An eighth of a batch crosses it while its episodes run; a later batch has it, masked."""
    early, late = FlowControl(8, 4, limit=16), FlowControl(8, 4, limit=16)
    early.update(measured(masked=0.0, overdue=0.125))
    late.update(measured(masked=0.0))
    assert early.caution > CAUTION > late.caution
    early.update(measured(masked=0.125, overdue=0.0))
    late.update(measured(masked=0.125, overdue=0.0))
    assert early.caution == pytest.approx(late.caution)  # they are not counted twice


def test_versions_that_are_published_rarely_shorten_the_horizon() -> None:
    often, rarely = FlowControl(8, 4, every=1, limit=16), FlowControl(8, 4, every=3, limit=16)
    for control in (often, rarely):
        control.update(measured(token_age=7.0))
    assert rarely.level < 16 < often.level


def test_limits_of_the_limit() -> None:
    for keys in ({"masked": 1.0, "token_age": 1e9}, {"life": 1e9, "token_age": 1e-9}):
        control = FlowControl(8, 4)
        for _ in range(100):
            control.update(measured(**keys))
        assert control.level <= 9 if keys.get("masked") else control.level >= 39
    control = FlowControl(8, 0)
    assert control.limit == 8
    control.update(measured(life=1e9, token_age=1e-9))
    assert control.limit == 8


# -- in the simulator ------------------------------------------------------------------------------


@cache
def run(name: str, target: float | None = None, change: str = "") -> list[SimulatedStep]:
    workload = WORKLOADS[name]
    changes = {HALF: CHANGES[change](workload)} if change else {}
    return Simulation(workload, seed=1, target=target).run(2 * HALF if change else HALF, changes)


def seconds(steps: list[SimulatedStep]) -> float:
    return statistics.mean(step.measured.seconds for step in steps[len(steps) // 2 :])


def masked(steps: list[SimulatedStep]) -> float:
    return statistics.mean(step.measured.masked for step in steps[len(steps) // 2 :])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slow tool", "a longer tail"),
        ("trainer bound", "a slower trainer"),
        ("rollout bound", "a third of the engines"),
        ("lengths", "three times the engines"),
    ],
)
def test_it_settles_after_a_change(name: str, change: str) -> None:
    """Within three dead times (the life of a group, in steps) or 500 episodes the limit is within 20% of what
    it is in the end, and stays there. It never exceeds by more the higher of that and its first value."""
    steps = run(name, change=change)
    for part in (steps[:HALF], steps[HALF:]):
        final = statistics.mean(step.limit for step in part[HALF // 2 :])
        life = statistics.mean(step.measured.life for step in part[HALF // 2 :])
        allowed = max(3 * life / seconds(part), 500 / (PLAIN.groups * WORKLOADS[name].members))
        after = [step.limit for step in part[round(allowed) + 1 :]]
        assert max(after) <= 1.2 * final and min(after) >= 0.8 * final
        assert max(step.limit for step in part) <= 1.2 * max(final, part[0].limit)


def test_the_budget_is_kept_in_the_steady_state() -> None:
    """In the mean over workloads, from step 20 on, a change included: the share of one run varies by half."""
    runs = [run("slow tool", change="a longer tail"), run("slow tool, partial")]
    runs.append(run("lengths", change="three times the engines"))
    assert 0.2 * BUDGET < statistics.mean(s.measured.masked for steps in runs for s in steps[20:]) <= BUDGET


@pytest.mark.parametrize(("name", "slowest"), [("tail", 0.9), ("tail, complete", 2.3)])
def test_a_whole_run_keeps_the_budget(name: str, slowest: float) -> None:
    """The first steps included. With partial groups 1% needs 0.8 s a step if no token ever waits."""
    steps = Simulation(WORKLOADS[name], seed=1).run(120)
    assert 0.5 * BUDGET < statistics.mean(step.measured.masked for step in steps) <= BUDGET
    assert statistics.mean(step.measured.seconds for step in steps) <= slowest


@pytest.mark.parametrize("name", ["rollout bound", "trainer bound"])
def test_no_slower_than_a_fixed_target_that_keeps_the_budget(name: str) -> None:
    fixed = run(name, target=1)
    assert masked(fixed) <= BUDGET
    assert seconds(run(name)) <= 1.05 * seconds(fixed)


def test_a_target_that_masks_too_much_is_not_followed() -> None:
    assert masked(run("slow tool", target=1)) > 1.5 * BUDGET


def test_a_bound_of_zero_is_synchronous() -> None:
    steps = run("synchronous")
    assert {step.limit for step in steps} == {8}
    assert {step.lag for step in steps} == {0.0} and masked(steps) == 0.0


def test_a_run_is_its_seed() -> None:
    assert (
        Simulation(SLOW_TOOL, 3).run(5) == Simulation(SLOW_TOOL, 3).run(5) != Simulation(SLOW_TOOL, 4).run(5)
    )


def test_a_workload_that_cannot_fill_a_batch_is_named() -> None:
    with pytest.raises(ValueError, match="cannot fill a batch"):
        Simulation(PLAIN, target=-1).run(1)
