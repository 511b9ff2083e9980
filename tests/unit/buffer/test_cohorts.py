from __future__ import annotations

from asyncrl.buffer.cohorts import Cohorts
from asyncrl.buffer.records import EpisodeRecord
from asyncrl.types import EpisodeResult
from tests.unit.buffer.machine import admit, land, land_group, make, train


def episode(reward: float, tokens: int) -> EpisodeRecord:
    return EpisodeRecord("0.0", 0, 0, result=EpisodeResult(reward, tokens))


def test_gaps_are_trained_minus_landed_of_the_same_cohort() -> None:
    cohorts = Cohorts()
    for step in (0, 0, 1):
        cohorts.issued(step)
    for step, reward, tokens in ((0, 1.0, 10), (0, 0.0, 30), (0, 0.0, 20), (1, 5.0, 8)):
        cohorts.landed(step, episode(reward, tokens))
    cohorts.trained(0, episode(1.0, 10))
    cohorts.trained(0, episode(0.0, 20))
    cohorts.over(0)
    assert cohorts.take(before=1) == {}  # a group of it is not over
    cohorts.over(0)
    assert cohorts.take(before=0) == {}  # more may be issued at this step
    # trained: mean reward 1/2, length 15; landed: 1/3, 20
    found = cohorts.take(before=1)
    assert abs(found["cohort/reward_gap"] - 1 / 6) < 1e-15
    assert found["cohort/length_gap"] == -5.0
    assert cohorts.take(before=9) == {}  # reported once; of cohort 1 nothing was trained


def test_several_cohorts_weigh_by_what_they_trained() -> None:
    cohorts = Cohorts()
    for step, landed, trained in ((0, (1.0, 0.0), (1.0,)), (1, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))):
        cohorts.issued(step)
        for reward in landed:
            cohorts.landed(step, episode(reward, 1))
        for reward in trained:
            cohorts.trained(step, episode(reward, 1))
        cohorts.over(step)
    assert cohorts.take(before=2)["cohort/reward_gap"] == (1 * 0.5 + 3 * 0.0) / 4


def test_a_cohort_that_a_restart_cut_in_two_is_left_out() -> None:
    buffer, _ = make(groups_per_batch=1)
    admit(buffer, 1, step=3)
    again, batches = make(groups_per_batch=1, filter_zero_variance=True)
    again.restore(buffer.live.values(), buffer.episodes.values(), {}, 0.0)
    again.next_group = 1
    admit(again, 1, step=3)
    admit(again, 2, step=4)
    land_group(again, 0, 1.0, 0.0), land_group(again, 1, 1.0, 0.0)
    train(batches, 0), train(batches, 1)
    assert again.cohorts.take(before=4) == {}
    land_group(again, 2, 1.0, 0.0), land_group(again, 3, 1.0, 1.0)  # the second is filtered
    train(batches, 2)
    assert again.cohorts.take(before=5) == {"cohort/reward_gap": 0.5 - 0.75, "cohort/length_gap": 0.0}


def test_the_greedy_episode_is_of_no_cohort() -> None:
    buffer, batches = make(groups_per_batch=1, greedy=True)
    admit(buffer, 1)
    land_group(buffer, 0, 1.0, 0.0)
    land(buffer, "0.2", 100.0)
    train(batches, 0)
    assert buffer.cohorts.take(before=1) == {"cohort/reward_gap": 0.0, "cohort/length_gap": 0.0}
