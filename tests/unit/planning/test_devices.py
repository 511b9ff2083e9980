"""Devices apart or shared: where one is better than the other, by arithmetic and simulated."""

from __future__ import annotations

import math
from functools import partial

import pytest
from msgspec.structs import replace

from asyncrl.config import BufferConfig
from asyncrl.planning.devices import batch_seconds, compare
from asyncrl.planning.simulator import RecordedTurn, Workload

BUFFER = BufferConfig(groups_per_batch=4, episodes_per_group=2, max_staleness=4)
# device-seconds of a batch: 3200 tokens
G = 30.0
T = 10.0
BUFFER = replace(BUFFER, group_policy="complete")
PLAIN = Workload((((RecordedTurn(400.0, 0.0),),) * 2,), BUFFER, speed=math.inf, publish=0.0)


def work(engines: int, ranks: int, g: float = G) -> Workload:
    return replace(PLAIN, rate=engines * 3200 / g, train=T / ranks, ranks=ranks)


def test_with_few_devices_shifts_are_faster_and_with_many_a_split() -> None:
    """g = 3t: on two devices 3t apart, 2t + s by shifts; on four and more a split loses nothing."""
    for number, split in {2: (1, 1), 4: (3, 1), 16: (12, 4)}.items():
        comparison = compare(work, number, shift_seconds=3.0)
        assert comparison.apart is not None and comparison.shifts is not None
        assert (comparison.apart.engines, comparison.apart.ranks) == split
        apart = max(G / split[0], T / split[1])
        shifts = (G + T) / number + 3.0
        assert (comparison.apart.formula, comparison.shifts.formula) == (
            pytest.approx(apart),
            pytest.approx(shifts),
        )
        assert comparison.apart.forecast.step_s == pytest.approx(apart, rel=0.03)
        assert comparison.shifts.forecast.step_s == pytest.approx(shifts, rel=0.02)
        assert comparison.best is (comparison.shifts if number == 2 else comparison.apart)


def test_one_device_is_shared_or_nothing() -> None:
    comparison = compare(work, 1, shift_seconds=3.0)
    assert comparison.apart is None and comparison.best is comparison.shifts
    assert comparison.shifts is not None and comparison.shifts.forecast.step_s == pytest.approx(
        G + T + 3.0, rel=0.02
    )
    idle = comparison.shifts.forecast.trainer_idle, comparison.shifts.forecast.rollout_idle
    assert idle == pytest.approx((3.0 / (T + 3.0), 0.0), abs=0.02), "each side, of its own half, as in a run"
    assert (
        compare(work, 3, shift_seconds=3.0, tp=2).shifts is None
    )  # an engine of two devices leaves one over


def test_elastic_devices_save_what_a_split_leaves_idle_at_the_price_of_changes() -> None:
    """Of two, one trains for 10 s, and samples for the rest, but for 3 s: (g + t + s) / 2 instead of
    (g + t) / 2 + s. With changes as long as training they save nothing over the split."""
    assert compare(work, 2, shift_seconds=3.0).elastic == pytest.approx(21.5, rel=0.02)
    assert compare(work, 2, shift_seconds=3.0).gain == pytest.approx(1 - 21.5 / 23.0, abs=0.01)
    assert compare(work, 2, shift_seconds=25.0).gain < 0.01


def test_the_share_of_a_token_that_engines_do_not_divide() -> None:
    """64 slots, a token takes 0.1 s and 0.01 s for each episode beside: 3200 take 50 times that."""
    slow = replace(work(2, 1), base=0.1, rate=2 / 0.01, commit=0.5)
    assert batch_seconds(slow) == (pytest.approx(50 * (0.1 + 64 * 0.005)), pytest.approx(10.5))
    assert batch_seconds(replace(slow, filtered=0.5))[0] == pytest.approx(100 * (0.1 + 64 * 0.005))


def test_a_free_change_makes_sharing_no_worse_than_any_split() -> None:
    for g in (12.0, 40.0):
        comparison = compare(partial(work, g=g), 3, shift_seconds=0.0)
        assert comparison.apart is not None and comparison.shifts is not None
        assert comparison.shifts.forecast.step_s <= 1.02 * comparison.apart.forecast.step_s
