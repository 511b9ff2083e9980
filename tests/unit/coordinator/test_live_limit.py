"""Flow control in the run: when it moves the limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import pytest

from asyncrl.buffer.flow_control import CAUTION
from asyncrl.config import parse
from asyncrl.coordinator.live_limit import LiveLimit
from tests.unit.buffer.machine import make
from tests.unit.test_config import MINIMUM, with_keys

ROW = {"timing_s/step": 1.0, "async/trainer_idle_frac": 0.5, "async/rollout_idle_frac": 0.2}


def limit_of(**keys: object) -> LiveLimit:
    """The meter has seen 200 groups that lived for 2 s, with tokens of 0.1 s: more live groups are wanted."""
    config = parse(with_keys(buffer__groups_per_batch=4, **keys))
    buffer, _ = make(groups_per_batch=4, target_staleness=config.buffer.target_staleness)
    for group in range(200):
        buffer.meter.began(group, 0.0)
        buffer.meter.sampled(f"{group}", 10, 1.9)
        buffer.meter.ready([f"{group}"], 2.0)
        buffer.meter.settled(group, 2.0)
    return LiveLimit(config, buffer)


def step(
    limit: LiveLimit,
    row: Mapping[str, float] = ROW,
    engines: Collection[str] = ("a",),
    validating: bool = False,
) -> None:
    limit.committed(row, engines, validating)
    limit.tick(3.0)


def test_it_follows_the_steps_and_is_reported() -> None:
    limit = limit_of()
    step(limit)
    assert limit.buffer.live_limit == 6  # nothing was known of the engines before
    step(limit)
    assert limit.buffer.live_limit == 7
    found = limit.gauges()
    assert found["async/live_limit"] == 7.0 and found["async/group_life_s"] == 2.0
    assert found["async/token_age_p99_s"] == pytest.approx(0.1)


@pytest.mark.parametrize(("engines", "validating"), [({"a"}, True), ({"a", "b"}, False), (set[str](), False)])
def test_it_stays_during_a_validation_and_when_engines_come_and_go(
    engines: set[str], validating: bool
) -> None:
    limit = limit_of()
    step(limit)
    step(limit, ROW, engines, validating)
    assert limit.buffer.live_limit == 6


def test_nothing_is_measured_in_the_turn_of_a_commit_and_once_after_it() -> None:
    limit = limit_of()
    step(limit)
    limit.committed(ROW, {"a"}, validating=False)
    limit.life = 0.0
    assert limit.buffer.live_limit == 6
    for _ in range(3):
        limit.tick(3.0)
    assert limit.buffer.live_limit == 7 and limit.life == 2.0


def test_a_step_without_a_heartbeat_counts_as_idle_as_the_one_before() -> None:
    limit = limit_of()
    for row in (ROW, ROW, {"timing_s/step": 1.0}):
        step(limit, row)
    assert limit.buffer.live_limit == 8


def test_tokens_that_still_run_count_when_they_cross_the_bound() -> None:
    """Sampled on the weights of the first commit, within a bound of 4 until the sixth."""
    limit, row, cautions = limit_of(), {**ROW, "trainer/model_tokens": 100.0}, []
    limit.buffer.meter.sampled("slow", 25, 3.5)
    for now in range(3, 10):
        limit.committed(row, {"a"}, validating=False)
        limit.tick(float(now))
        cautions.append(limit.control.caution)
    ratios = [after / before for before, after in pairwise([CAUTION, *cautions])]
    assert ratios.pop(5) > 1.5 and max(ratios) <= 1


def test_servers_without_room_lower_it() -> None:
    limit = limit_of(engine__name="sglang")
    step(limit)
    assert "rollout/kv_use" not in limit.gauges()
    for server, use in (("a", 0.8), ("b", 0.2), ("a", 1.0)):
        limit.kv.read(server, use)
    limit.kv.retracted = 2
    found = limit.gauges()
    assert (found["rollout/kv_use"], found["rollout/retractions"]) == (pytest.approx(0.9), 2)
    limit.committed(ROW, {"a"}, validating=False)
    assert limit.buffer.live_limit == 4  # at once: groups are admitted in the turn of a commit
    limit.tick(3.0)
    assert limit.control.limit == 7 and limit.buffer.live_limit == limit.gauges()["async/live_limit"] == 4
    assert limit.gauges()["rollout/retractions"] == 0
    for _ in range(8):
        limit.kv.read("a", 0.3)
        step(limit)
    assert 4 < limit.buffer.live_limit == limit.kv.limit <= limit.control.limit
    limit = limit_of()
    assert not {"rollout/kv_use", "rollout/retractions"} & limit.gauges().keys()


def test_a_number_stays() -> None:
    limit = limit_of(buffer__target_staleness=1)
    limit.kv.read("a", 1.0)
    for _ in range(3):
        step(limit)
    assert limit.buffer.live_limit == 8 and limit.gauges()["async/group_life_s"] == 2.0


def test_the_default_adapts() -> None:
    assert parse(MINIMUM).buffer.target_staleness == "auto"
