"""Flow control in the run: when it moves the limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

import pytest

from asyncrl.buffer.flow_control import LiveLimit
from asyncrl.config import parse
from tests.unit.buffer.machine import admit, make
from tests.unit.test_config import MINIMUM, with_keys

ROW = {"timing_s/step": 1.0, "async/trainer_idle_frac": 0.5, "trainer/model_tokens": 100.0}
GROWN = 6 * 1.03  # the first gain is 0.03


def limit_of(live: int = 40, **keys: object) -> LiveLimit:
    """Four groups a batch; six may be live at first, and all of these are."""
    config = parse(with_keys(buffer__groups_per_batch=4, **keys))
    buffer, _ = make(groups_per_batch=4, target_staleness=config.buffer.target_staleness)
    admit(buffer, live)
    for group in range(3):
        buffer.lives.begin(group, 0.0)
        buffer.waiting_tokens.begin(f"{group}", 1.5, 10)
        buffer.waiting_tokens.end(f"{group}", 2.0)
        buffer.lives.end(group, 2.0)
    return LiveLimit(config, buffer)


def step(
    limit: LiveLimit,
    row: Mapping[str, float] = ROW,
    engines: Collection[str] = ("a",),
    validating: bool = False,
    now: float = 3.0,
) -> float:
    limit.committed(row, engines, validating, now)
    limit.tick(now)
    return limit.control.level


def test_it_follows_the_steps_and_is_reported() -> None:
    limit = limit_of()
    assert step(limit) == 6  # nothing was known of the engines before
    assert "async/token_age_p99_s" in limit.gauges()
    assert step(limit) == pytest.approx(GROWN, rel=0.01)
    assert step(limit, {"timing_s/step": 1.0}) > GROWN  # without a heartbeat: as idle as the one before
    for _ in range(4):
        step(limit)
    found = limit.gauges()
    assert found["async/live_limit"] == limit.buffer.live_limit == 7
    assert (found["async/group_life_s"], found["async/token_age_p99_s"]) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("live", "row", "engines", "validating"),
    [
        pytest.param(40, ROW, {"a"}, True, id="a validation"),
        pytest.param(40, ROW, {"a", "b"}, False, id="an engine came"),
        pytest.param(40, ROW, set[str](), False, id="an engine left"),
        pytest.param(40, {**ROW, "async/trainer_idle_frac": 0.01}, {"a"}, False, id="a busy trainer"),
        pytest.param(1, ROW, {"a"}, False, id="fewer groups are live: slots are full, or the data is over"),
    ],
)
def test_it_does_not_grow(live: int, row: dict[str, float], engines: set[str], validating: bool) -> None:
    limit = limit_of(live)
    step(limit)
    assert step(limit, row, engines, validating) == 6


def test_tokens_count_when_they_cross_the_bound_not_when_they_are_trained() -> None:
    """25 tokens sampled at 3.5 s are within a bound of 4 until the commit at 8 s. A batch has them, masked,
    two steps later: they do not count again."""
    limit, levels = limit_of(), []
    limit.buffer.waiting_tokens.begin("slow", 3.5, 25)
    for now in range(3, 12):
        if now == 10:
            limit.buffer.waiting_tokens.end("slow", 9.5)
        levels.append(step(limit, {**ROW, "staleness/masked_token_frac": 0.25 * (now == 10)}, now=float(now)))
    ratios = [after / before for before, after in pairwise(levels)]
    assert ratios[4] == pytest.approx(0.78, abs=0.01) and min(ratios[:4] + ratios[5:]) > 1


def test_a_larger_budget_is_obeyed() -> None:
    row = {**ROW, "staleness/masked_token_frac": 0.03}
    levels = []
    for budget in (0.01, 0.05):
        limit = limit_of(buffer__stale_budget=budget)
        step(limit)
        levels.append(step(limit, row))
    assert levels[0] < 6 < levels[1]


def test_servers_without_room_lower_it() -> None:
    limit = limit_of(engine__name="sglang")
    step(limit)
    assert "rollout/kv_use" not in limit.gauges()
    for server, use in (("a", 0.8), ("b", 0.2), ("a", 1.0)):
        limit.kv.read(server, use)
    limit.kv.retracted = 2
    found = limit.gauges()
    assert (found["rollout/kv_use"], found["rollout/retractions"]) == (pytest.approx(0.9), 2)
    limit.control.level = 20.0
    limit.kv.level = 10.0
    step(limit)  # at once: groups are admitted in the turn of a commit
    assert limit.buffer.live_limit == limit.kv.limit == 8 < limit.control.limit
    assert limit.gauges()["rollout/retractions"] == 0
    assert not {"rollout/kv_use", "rollout/retractions"} & limit_of().gauges().keys()


def test_a_number_stays_and_the_default_adapts() -> None:
    limit = limit_of(buffer__target_staleness=1)
    limit.kv.read("a", 1.0)
    for _ in range(3):
        step(limit)
    assert limit.buffer.live_limit == 8 and limit.gauges()["async/group_life_s"] == 2.0
    assert parse(MINIMUM).buffer.target_staleness == "auto"
