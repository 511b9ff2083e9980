"""What flow control measures, of a real buffer."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.buffer.flow_meter import FlowMeter
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason
from tests.unit.buffer.machine import make


def began(buffer: ReplayBuffer, uid: str, now: float) -> None:
    buffer.assign(buffer.episodes[uid], "w", 1, 0, now)


def sampled(buffer: ReplayBuffer, uid: str, tokens: int, now: float) -> None:
    buffer.meter.sampled(uid, tokens, now)
    buffer.turn(buffer.episodes[uid], tokens, tokens, 0, 0)


def ended(buffer: ReplayBuffer, uid: str, now: float, reward: float = 1.0) -> None:
    buffer.finish(buffer.episodes[uid], EpisodeResult(reward, 10), EpisodeStats(1), now)


def test_a_life_is_from_the_first_slot_to_the_settlement() -> None:
    buffer, _ = make()
    buffer.admit(0, now=0.0)
    began(buffer, "0.0", 10.0)
    began(buffer, "0.1", 11.0)
    ended(buffer, "0.0", 12.0)
    assert buffer.meter.life(14.0, 100.0) == 4.0  # it runs: censored
    ended(buffer, "0.1", 15.0)
    assert buffer.meter.life(99.0, 100.0) == 5.0  # it is ready, and waits
    assert buffer.meter.life(99.0, 3.0) == 3.0
    assert buffer.meter.settled_groups == 1


def test_a_partial_group_settles_at_its_deadline_and_a_late_member_when_it_lands() -> None:
    buffer, _ = make(episodes_per_group=3, group_policy="partial", group_deadline=4.0)
    buffer.admit(0, now=0.0)
    for member in range(3):
        began(buffer, f"0.{member}", 1.0)
        sampled(buffer, f"0.{member}", 10, 2.0)
    ended(buffer, "0.0", 2.0)
    ended(buffer, "0.1", 3.0)
    buffer.tick(5.0)
    assert buffer.meter.life(9.0, 100.0) == 4.0
    ended(buffer, "0.2", 10.0)
    assert buffer.meter.token_age(0.5, 20.0, 100.0) == 3.0  # of those in time
    assert buffer.meter.token_age(0.9, 20.0, 100.0) == 8.0


def test_tokens_of_attempts_that_failed_are_not_counted() -> None:
    buffer, _ = make()
    buffer.admit(0, now=0.0)
    for member in range(2):
        began(buffer, f"0.{member}", 0.0)
        sampled(buffer, f"0.{member}", 10, 0.0)
    buffer.fail(buffer.episodes["0.1"], FailReason.EPISODE_ERROR, 5.0)
    began(buffer, "0.1", 5.0)
    sampled(buffer, "0.1", 10, 8.0)
    ended(buffer, "0.0", 8.0)
    ended(buffer, "0.1", 9.0)
    ages = buffer.meter.token_age(0.5, 20.0, 100.0), buffer.meter.token_age(1.0, 20.0, 100.0)
    assert ages == (1.0, 9.0)


def test_running_tokens_make_the_tail_longer() -> None:
    meter = FlowMeter()
    for group in range(10):
        meter.began(group, 0.0)
        meter.sampled(f"{group}", 10, 0.0)
    for group in range(9):
        meter.ready([f"{group}"], 1.0)
        meter.settled(group, 1.0)
    assert meter.token_age(0.9, 30.0, 100.0) == 1.0
    assert meter.token_age(0.99, 30.0, 100.0) == 30.0  # of the one that runs: at least
    assert meter.token_age(0.99, 30.0, 20.0) == 20.0


def test_of_many_episodes_under_way_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred episodes a second, lives from a heavy tail: a quarter of what runs tells about the same."""
    meter, begins = FlowMeter(), np.arange(2000) / 100
    ends = begins + np.random.default_rng(0).lognormal(0.0, 1.0, begins.size)
    events = [*((at, number, True) for number, at in enumerate(begins))]
    events += [(at, number, False) for number, at in enumerate(ends) if at < 20.0]
    for at, number, begin in sorted(events):
        meter.sampled(f"{number}", 10, at) if begin else meter.ready([f"{number}"], at)
    estimates = [meter.token_age(0.95, 20.0, 100.0)]
    monkeypatch.setattr("asyncrl.buffer.flow_meter.SAMPLE", len(meter._turns) // 3)
    estimates.append(meter.token_age(0.95, 20.0, 100.0))
    assert estimates[0] == pytest.approx(np.exp(1.645), rel=0.1)
    assert estimates[0] != estimates[1] == pytest.approx(estimates[0], rel=0.05)


def test_a_turn_is_sampled_over_the_time_that_its_tokens_took() -> None:
    """10 tokens/s: a turn of 40 tokens that ends at 4 s began at 0 s."""
    meter = FlowMeter()
    meter.landed(100, 12.0, 2.0)
    meter.began(0, 0.0)
    meter.sampled("0.0", 40, 4.0)
    meter.ready(["0.0"], 4.0)
    meter.settled(0, 4.0)
    assert [meter.token_age(q, 9.0, 100.0) for q in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.5, 2.5, 3.5]


def test_the_unloaded_share_of_a_life_leaves_tools_as_they_are() -> None:
    """Half of the time is spent in a tool; sampling takes three times as long as it did."""
    meter = FlowMeter()
    for _ in range(300):
        meter.landed(100, 20.0, 10.0)
    assert meter.unloaded == pytest.approx(1.0)
    for _ in range(300):
        meter.landed(100, 60.0, 30.0)
    assert meter.unloaded == pytest.approx(0.5 + 0.5 / 3, abs=0.01)


def test_the_highest_speed_is_forgotten_only_where_the_engines_are_idle() -> None:
    """The same episodes take twice as long from now on: of an idle engine that is its speed."""
    meter = FlowMeter()
    for seconds in (10.0, 20.0):
        for _ in range(300):
            meter.landed(100, seconds, 0.0)
    for _ in range(300):
        meter.committed(idle=0.0)
    assert meter.unloaded == pytest.approx(0.5)
    for _ in range(300):
        meter.committed(idle=0.5)
    assert meter.unloaded == pytest.approx(1.0, abs=0.01)


def test_tokens_that_are_older_than_the_bound_and_not_ready() -> None:
    meter = FlowMeter()
    for uid, now in (("a", 1.0), ("a", 3.0), ("b", 1.0)):
        meter.sampled(uid, 10, now)
    assert [meter.older(than) for than in (1.0, 2.0, 4.0)] == [0, 20, 30]
    meter.ready(["b"], 4.0)
    assert meter.older(2.0) == 10


def test_the_limit_is_read_by_admission() -> None:
    buffer, _ = make(groups_per_batch=2, max_staleness=4)
    assert buffer.max_live == 3  # auto begins with a target of a half
    buffer.live_limit = 5
    while buffer.can_admit(100, 100):
        buffer.admit(0, now=0.0)
    assert len(buffer.live) == 5
    assert make(target_staleness=1.5, max_staleness=4)[0].max_live == 5
    assert make(max_staleness=0)[0].max_live == 2
