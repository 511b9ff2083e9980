"""What becomes of an episode whose payloads are gone, and of the group that is compared with it."""

from __future__ import annotations

from asyncrl.buffer.batches import Baseline
from asyncrl.buffer.payloads import cut_back
from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from tests.unit.buffer.machine import admit, land, make, run


def rewards(buffer: ReplayBuffer, group: int) -> list[float]:
    return [result.reward for result in Baseline.of(buffer.live[group], buffer.episodes).results]


def test_who_runs_again_is_not_in_the_baseline_before_it_lands_again() -> None:
    """It had landed after the deadline, as the first; then the others land, and the group settles."""
    buffer, _ = make(episodes_per_group=3, group_policy="partial", group_deadline=4.0)
    admit(buffer, 1)
    for member in range(3):
        run(buffer, f"0.{member}")
    land(buffer, "0.0", 1.0, now=5.0)
    cut_back(buffer, buffer.episodes["0.0"], [])
    land(buffer, "0.1", 0.5, now=6.0), land(buffer, "0.2", 1.0, now=7.0)
    assert buffer.live[0].settled and rewards(buffer, 0) == [0.5, 1.0]
    assert land(buffer, "0.0", 1.0, now=8.0).state is State.READY
    assert rewards(buffer, 0) == [0.5, 1.0]


def test_the_others_are_compared_with_the_reward_of_a_ready_member_that_is_dropped() -> None:
    buffer, _ = make(episodes_per_group=3)
    admit(buffer, 1)
    for member, reward in enumerate((1.0, 0.0, 0.5)):
        land(buffer, f"0.{member}", reward)
    cut_back(buffer, buffer.episodes["0.0"], [])
    assert [e.state for e in buffer.members(buffer.live[0])] == [State.DROPPED, State.READY, State.READY]
    assert rewards(buffer, 0) == [1.0, 0.0, 0.5]
