"""The greedy episode of a group: compared with, never trained, and counted like any other."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.records import Flow, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.staleness import floor_of
from asyncrl.types import DropReason, FilterReason
from tests.unit.buffer.machine import admit, give_up, land, land_group, make, run, train


def world(groups: int = 2, **keys: object) -> tuple[ReplayBuffer, Batches]:
    """Groups of two and a greedy one: 0.0, 0.1, 0.2; one group per batch."""
    buffer, batches = make(greedy=True, groups_per_batch=1, max_staleness=4, **keys)
    admit(buffer, groups)
    return buffer, batches


def flow(buffer: ReplayBuffer) -> Flow:
    found = buffer.flow()
    assert found.conserved
    return found


def test_a_group_has_one_member_more() -> None:
    buffer, _ = world()
    assert [buffer.episodes[uid].greedy for uid in buffer.live[0].members] == [False, False, True]
    assert flow(buffer).issued == 6
    assert not buffer.can_admit(free_slots=2, total_slots=100)


def test_its_reward_is_the_baseline_and_it_leaves_as_filtered() -> None:
    buffer, batches = world()
    land_group(buffer, 0, 1.0, 0.0)
    assert batches.plan(0, 0, 1) is None  # without it there is no baseline
    land(buffer, "0.2", 0.25)
    assert flow(buffer).filtered == 1
    assert buffer.reasons[f"{State.FILTERED}/{FilterReason.BASELINE}"] == 1
    assert sorted(train(batches, 0)) == ["0.0", "0.1"]
    baseline = batches.baselines[0]
    assert baseline.greedy == 0.25
    assert [
        (place, r.reward, r.turn_rewards) for place, r in zip(baseline.members, baseline.results, strict=True)
    ] == [
        (0, 1.0, (1.0,)),
        (1, 0.0, (0.0,)),
    ]
    assert (flow(buffer).trained, flow(buffer).filtered, list(buffer.live)) == (2, 1, [1])


def test_without_the_option_there_is_no_greedy_reward() -> None:
    buffer, batches = make(groups_per_batch=1)
    admit(buffer, 1)
    land_group(buffer, 0, 1.0, 0.0)
    train(batches, 0)
    assert batches.baselines[0].greedy is None


PAIRS = list(combinations_with_replacement(["pending", "running", "landed", "failed"], 2))


@pytest.mark.parametrize("policy", ["complete", "partial"])
@pytest.mark.parametrize("states", PAIRS)
def test_a_group_whose_greedy_episode_is_given_up_is_dropped_at_once(
    states: tuple[str, str], policy: str
) -> None:
    """Wherever its members are: those that ran are handed back, to be cancelled."""
    buffer, batches = world(group_policy=policy)
    act = {"running": run, "landed": land, "failed": give_up, "pending": lambda buffer, uid: None}
    for member, state in enumerate(states):
        act[state](buffer, f"0.{member}")
    running = give_up(buffer, "0.2")
    found, failed = flow(buffer), states.count("failed")
    assert [episode.member for episode in running] == [i for i in (0, 1) if states[i] == "running"]
    assert (found.failed, found.dropped, list(buffer.live)) == (1 + failed, 2 - failed, [1])
    assert buffer.reasons[f"{State.DROPPED}/{DropReason.GROUP_SHORT}"] == 2 - failed
    assert batches.plan(0, 0, 1) is None and buffer.settled[State.DROPPED] == 1


def test_it_is_not_what_hold_waits_for() -> None:
    buffer, _ = world(on_stale="hold", target_staleness=4)
    for uid in ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2"):
        buffer.assign(buffer.episodes[uid], "w", 1, 4 if uid != "0.2" else 0, 0.0)
    assert floor_of(buffer, buffer.live[0]) == 4
