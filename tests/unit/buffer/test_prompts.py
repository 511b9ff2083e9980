"""Which groups are of zero variance depends on what the advantage reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import AdvantageInput, advantages
from asyncrl.buffer.prompts import ComparedParts, all_equal
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.types import EpisodeResult
from tests.unit.buffer.machine import admit, give_up, land, land_group, make, train

Turns = tuple[float, ...]
TURNS = ComparedParts(turns=True)
PARTS = ComparedParts(components=True)
rewards = st.sampled_from([0.0, 0.5, 1.0])
groups = st.lists(st.lists(rewards, min_size=1, max_size=3).map(tuple), min_size=2, max_size=4)


def results(*turns: Turns) -> list[EpisodeResult]:
    return [EpisodeResult(sum(some), len(some), some) for some in turns]


@pytest.mark.parametrize(
    ("turns", "greedy", "reads", "same"),
    [
        ([(0.5, 0.5), (0.0, 1.0)], None, ComparedParts(), True),  # only sums are read
        ([(0.5, 0.5), (0.0, 1.0)], None, TURNS, False),
        ([(0.0, 0.0, 1.0), (1.0,)], None, TURNS, True),  # solved, in three turns or in one
        ([(0.5, 0.5), (0.5, 0.0, 0.5)], None, TURNS, True),
        ([(0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.25, 0.0, 0.25)], None, TURNS, False),
        ([(1.0,), (0.0,)], None, TURNS, False),
        ([(), ()], None, TURNS, True),  # rewards without turns
        ([(0.1 + 0.2, 0.7), (0.3, 0.7)], None, TURNS, True),  # rounding
        ([(0.0, 1.0), (1.0,)], 1.0, TURNS, True),
        ([(0.0, 1.0), (1.0,)], 0.5, TURNS, False),
        ([(0.5, 0.5), (0.5, 0.5)], 1.0, TURNS, False),  # against 1 on both turns: 0, then -0.5
        ([(0.5, 0.5), (0.5, 0.5)], 1.0, ComparedParts(), True),
    ],
)
def test_turns_by_hand(turns: list[Turns], greedy: float | None, reads: ComparedParts, same: bool) -> None:
    assert all_equal(results(*turns), greedy, reads) is same


def game(white: float, black: float) -> EpisodeResult:
    return EpisodeResult(white + black, 3, (0.0, white, black), agents=("w", "w", "b"), turn_tokens=(1, 1, 1))


def test_a_zero_sum_game_is_compared_by_what_each_agent_earned() -> None:
    assert not all_equal([game(1.0, -1.0), game(-1.0, 1.0)], None, ComparedParts())
    assert all_equal([game(1.0, -1.0), game(1.0, -1.0)], None, TURNS)
    alone = EpisodeResult(1.0, 1, (1.0,), agents=("w",), turn_tokens=(1,))  # black never moved
    assert all_equal([game(1.0, -1.0), alone], None, ComparedParts())


@pytest.mark.parametrize(
    ("parts", "reads", "same"),
    [
        ([{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}], PARTS, False),  # a tie of the sums
        ([{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}], ComparedParts(), True),
        ([{"right": 1.0}, {"right": 1.0}], PARTS, True),
    ],
)
def test_components_by_hand(parts: list[dict[str, float]], reads: ComparedParts, same: bool) -> None:
    group = [EpisodeResult(1.0, components=some) for some in parts]
    assert all_equal(group, None, reads) is same


def advantages_of(name: str, group: list[EpisodeResult], greedy: float | None) -> list[float]:
    """The advantages themselves, with one token per turn."""
    advantage_list: list[float] = []
    for position, result in enumerate(group):
        rewards = np.array(result.turn_rewards)
        credit = AdvantageInput(
            result, group, rewards, np.arange(len(rewards)), len(group), position, greedy=greedy
        )
        advantage_list += np.atleast_1d(advantages.load(name).of(credit)).tolist()
    return advantage_list


@settings(deadline=None)
@given(groups, st.sampled_from(["dr_grpo", "rloo", "grpo_turn", "remax"]), rewards)
def test_a_group_is_left_out_if_and_only_if_all_its_advantages_are_zero(
    turns: list[Turns], name: str, greedy: float
) -> None:
    entry = advantages.load(name)
    group = results(*turns)
    baseline = greedy if entry.greedy else None
    trains = any(abs(value) > 1e-9 for value in advantages_of(name, group, baseline))
    compared = ComparedParts(turns=entry.turns, components=entry.components)
    assert all_equal(group, baseline, compared) is not trains


@pytest.mark.parametrize(("reads", "filtered"), [(ComparedParts(), 2), (PARTS, 0)])
def test_the_buffer_asks_for_what_is_read(reads: ComparedParts, filtered: int) -> None:
    buffer, _ = make(filter_zero_variance=True, reads=reads)
    admit(buffer, 1)
    land(buffer, "0.0", components={"a": 1.0})
    land(buffer, "0.1", components={"a": 0.0})
    assert buffer.account().filtered == filtered


# -- samples that are solved retire -------------------------------------------------------------------------


def rows_of(buffer: ReplayBuffer, count: int) -> list[int]:
    return [buffer.admit_group(0.0).sample for _ in range(count)]


@pytest.mark.parametrize(
    ("rewards", "retires"),
    [
        ((1.0, 1.0, 1.0, 0.0), True),  # 3/4 reaches the rate
        ((1.0, 1.0, 0.0, 0.0), False),
        ((0.2, 0.2, 0.2, -1.0), True),  # positive is above zero
        ((0.0, 0.0, 0.0, 0.0), False),
    ],
)
def test_a_sample_retires_at_its_pass_rate(rewards: tuple[float, ...], retires: bool) -> None:
    buffer, _ = make(episodes_per_group=4, retire_pass_rate=0.75, filter_zero_variance=True)
    group = buffer.admit_group(0.0)
    land_group(buffer, 0, *rewards[:3])
    assert not buffer.prompts.retired_samples  # the group is not complete
    land(buffer, "0.3", rewards[3])
    assert buffer.prompts.retired_samples == ({group.sample} if retires else set())


def test_shaping_neither_hides_nor_makes_a_solved_sample() -> None:
    """Overlong shaping took all of a reward of 1, and gave something for a reward of 0."""
    buffer, _ = make(retire_pass_rate=0.9)
    rows = rows_of(buffer, 2)
    for group, reward, shaping in ((0, 0.0, -1.0), (1, 0.3, 0.3)):
        for uid in buffer.live_groups[group].members:
            land(buffer, uid, reward, shaping=shaping)
    assert buffer.prompts.retired_samples == {rows[0]}


def test_a_failed_member_is_not_one_that_did_not_pass() -> None:
    buffer, _ = make(episodes_per_group=3, retire_pass_rate=0.75)
    group = buffer.admit_group(0.0)
    land_group(buffer, 0, 1.0, 1.0)
    give_up(buffer, "0.2")
    assert buffer.prompts.retired_samples == {group.sample}
    buffer.admit_group(0.0)
    land(buffer, "1.0")
    give_up(buffer, "1.1"), give_up(buffer, "1.2")  # one of three is no group
    assert buffer.prompts.retired_samples == {group.sample}


def test_retired_samples_are_skipped_and_the_order_of_the_rest_stays() -> None:
    buffer, _ = make(rows=4, retire_pass_rate=0.9)
    plain, _ = make(rows=4)
    order = rows_of(plain, 8)
    assert rows_of(buffer, 4) == order[:4]
    land_group(buffer, 1, 1.0, 1.0)
    assert rows_of(buffer, 3) == [row for row in order[4:] if row != order[1]]
    assert buffer.account().issued == 7 * 2


def test_when_all_samples_have_retired_the_data_is_over() -> None:
    buffer, batches = make(rows=2, retire_pass_rate=0.9)
    admit(buffer, 3)
    land_group(buffer, 0, 1.0, 1.0)
    assert not buffer.prompts.over
    land_group(buffer, 1, 1.0, 1.0)
    assert buffer.prompts.over and not buffer.can_admit(100, 100)
    assert len(train(batches)) == 4
    assert batches.next_part(2, 0, 1) is None and not batches.over  # a group of a retired sample still runs
    land_group(buffer, 2, 1.0, 0.0)
    assert len(train(batches)) == 2 and batches.over


def test_a_pass_over_the_data_ends_where_it_did_before() -> None:
    buffer, _ = make(rows=3, epochs=2, retire_pass_rate=0.9)
    first = rows_of(buffer, 3)
    land_group(buffer, 0, 1.0, 1.0)
    second = []
    while not buffer.prompts.over:
        second.append(buffer.admit_group(0.0).sample)
    assert sorted(second) == sorted(first[1:])


def test_a_late_member_completes_the_record_of_its_sample() -> None:
    keys = {"group_policy": "partial", "group_deadline": 5.0, "groups_per_batch": 1}
    buffer, batches = make(episodes_per_group=3, retire_pass_rate=0.9, **keys)
    group = buffer.admit_group(0.0)
    land_group(buffer, 0, 1.0, 1.0)
    buffer.assign(buffer.episodes["0.2"], "w", 1, 0, 0.0)
    buffer.settle_overdue(5.0)
    train(batches)
    assert not buffer.prompts.retired_samples
    land(buffer, "0.2", now=6.0)
    assert buffer.prompts.retired_samples == {group.sample}
