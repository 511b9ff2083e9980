"""Flow control: its arithmetic by hand, and whole runs of the simulator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import cache

import pytest
from msgspec.structs import replace

from asyncrl.buffer.flow_control import FIRST_GAIN, GAIN, MOST, Crossings, FlowControl
from asyncrl.buffer.lifetimes import Lifetimes
from asyncrl.planning.forecast import slower
from asyncrl.planning.simulator import SimulatedStep, Simulation, Workload
from tests.fakes.scripts import bench_script
from tests.unit.buffer.machine import make

BUDGET = 0.01
BENCH = bench_script("flow_control")
WORKLOADS: dict[str, Workload] = BENCH.WORKLOADS
CHANGES: dict[str, Callable[[Workload], Workload]] = {
    "a longer tail": lambda w: replace(w, recorded=slower(w.recorded, 3.0)),
    "a slower trainer": lambda w: replace(w, train=3 * w.train),
    "a third of the engines": lambda w: replace(w, rate=w.rate / 3),
    "three times the engines": lambda w: replace(w, rate=w.rate * 3),
}
HALF = 50  # steps before the change, and after it


@pytest.mark.parametrize(
    ("shares", "grows", "factor"),
    [
        pytest.param([(0.002, BUDGET)], True, math.exp(GAIN * 0.8), id="the example of the docs"),
        pytest.param([(0.05, BUDGET)], True, math.exp(GAIN * -4), id="over the budget"),
        pytest.param(
            [(0.05, BUDGET)], False, math.exp(GAIN * -4), id="it shrinks, even if more are of no use"
        ),
        pytest.param([(0.002, BUDGET)], False, 1.0, id="more are of no use"),
        pytest.param([(0.002, BUDGET), (0.2, 0.1)], True, math.exp(-GAIN), id="the tightest budget"),
        pytest.param([(0.0, BUDGET)], True, math.exp(FIRST_GAIN), id="nothing was measured yet"),
        pytest.param([(0.5, BUDGET)], True, math.exp(-MOST), id="a batch of a single late trajectory"),
        pytest.param([(-0.01, BUDGET)], True, math.exp(FIRST_GAIN * 2), id="fewer wait than before"),
    ],
)
def test_a_step_by_hand(shares: list[tuple[float, float]], grows: bool, factor: float) -> None:
    control = FlowControl(8, 4)
    control.level = 16.0
    control.update(shares, grows)
    assert control.level == pytest.approx(16 * factor) and control.limit == round(control.level)


def test_limits_of_the_limit() -> None:
    for bound, share, limits in ((4, 0.0, 40), (4, 0.1, 8), (0, 0.0, 8), (0, 0.1, 8)):
        control = FlowControl(8, bound)
        assert control.limit == (12 if bound else 8)
        for _ in range(100):
            control.update([(share, BUDGET)], True)
        assert control.limit == limits


def test_the_limit_is_read_by_admission() -> None:
    buffer, _ = make(groups_per_batch=2, max_staleness=4)
    assert buffer.max_live == 3  # auto begins with a target of a half
    buffer.live_limit = 5
    while buffer.can_admit(100, 100):
        buffer.admit(0, now=0.0)
    assert len(buffer.live) == 5
    assert make(target_staleness=1.5, max_staleness=4)[0].max_live == 5
    assert make(max_staleness=0)[0].max_live == 2


# -- in the simulator ------------------------------------------------------------------------------


@cache
def run(name: str, target: float | None = None, change: str = "") -> list[SimulatedStep]:
    workload = (
        WORKLOADS[name] if target is None else BENCH.with_keys(WORKLOADS[name], target_staleness=target)
    )
    changes = {HALF: CHANGES[change](workload)} if change else {}
    return Simulation(workload, seed=1).run(2 * HALF if change else HALF, changes)


def mean(steps: list[SimulatedStep], figure: str) -> float:
    """Over the second half."""
    return statistics.mean(getattr(step, figure) for step in steps[len(steps) // 2 :])


def test_each_token_that_goes_over_the_bound_counts_once() -> None:
    """Bound 1: two tokens of 10 wait over the bound; one of them gets ready and is masked, one is dropped."""
    waiting = Lifetimes(100)
    for uid in ("masked", "dropped"):
        waiting.begin(uid, 0.5)
    crossings = Crossings(waiting, bound=1)
    assert [crossings.committed(0.0, 10, now) for now in (1.0, 2.0, 3.0)] == [0.0, 0.2, 0.0]
    waiting.end("masked", 3.5)
    waiting.forget("dropped")
    assert crossings.committed(0.0, 10, 4.0) == 0.0  # they are in no batch yet
    waiting.begin("late", 4.5)
    waiting.end("late", 4.6)
    assert crossings.committed(0.05, 10, 5.0) == 0.0
    shares = [crossings.committed(share, 10, now) for share, now in ((0.0, 6.0), (0.0, 7.0), (0.1, 8.0))]
    assert shares == pytest.approx([0.0, 0.0, 0.1])  # it was ready before it crossed


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
    """In the second half of the steps after it, the limit stays near its mean. A burst of late tokens is
    paid back in the steps that follow, so it is not constant."""
    steps = run(name, change=change)
    for part in (steps[:HALF], steps[HALF:]):
        after = [step.limit for step in part[HALF // 2 :]]
        assert min(after) / statistics.mean(after) >= 0.6 and max(after) / statistics.mean(after) <= 1.6


@pytest.mark.parametrize(("name", "slowest"), [("tail", 0.9), ("tail, complete", 2.6), ("lengths", 2.8)])
def test_a_whole_run_keeps_the_budget(name: str, slowest: float) -> None:
    """About: tokens go over the bound in bursts, and the first ones are seen late."""
    steps = Simulation(WORKLOADS[name], seed=1).run(120)
    assert 0.5 * BUDGET < statistics.mean(step.masked for step in steps) <= 1.3 * BUDGET
    assert statistics.mean(step.seconds for step in steps) <= slowest


def test_twice_the_budget_is_faster() -> None:
    plain, twice = (
        Simulation(BENCH.with_keys(WORKLOADS["slow tool"], stale_budget=budget), seed=1).run(100)
        for budget in (BUDGET, 2 * BUDGET)
    )
    assert mean(twice, "seconds") < 0.9 * mean(plain, "seconds")
    assert BUDGET < mean(twice, "masked") < 2.6 * BUDGET


@pytest.mark.parametrize("name", ["rollout bound", "trainer bound"])
def test_no_slower_than_a_fixed_target_that_keeps_the_budget(name: str) -> None:
    fixed = run(name, target=1)
    assert mean(fixed, "masked") <= BUDGET
    assert mean(run(name), "seconds") <= 1.05 * mean(fixed, "seconds")


def test_a_target_that_masks_too_much_is_not_followed() -> None:
    assert mean(run("slow tool", target=1), "masked") > 1.5 * BUDGET


def test_a_bound_of_zero_is_synchronous() -> None:
    steps = run("synchronous")
    assert {step.limit for step in steps} == {8}
    assert {step.lag for step in steps} == {0.0} and mean(steps, "masked") == 0.0


def test_a_run_is_its_seed() -> None:
    runs = [Simulation(WORKLOADS["tail"], seed).run(5) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_a_workload_that_cannot_fill_a_batch_is_named() -> None:
    with pytest.raises(ValueError, match="cannot fill a batch"):
        Simulation(BENCH.with_keys(WORKLOADS["rollout bound"], target_staleness=-1.0)).run(1)
