"""Samples that are solved retire."""

from __future__ import annotations

import pytest

from asyncrl.buffer.replay import ReplayBuffer
from tests.unit.buffer.machine import admit, give_up, land, land_group, make, train


def rows_of(buffer: ReplayBuffer, count: int) -> list[int]:
    return [buffer.admit(0, 0.0).sample for _ in range(count)]


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
    group = buffer.admit(0, 0.0)
    land_group(buffer, 0, *rewards[:3])
    assert not buffer.prompts.retired  # the group is not complete
    land(buffer, "0.3", rewards[3])
    assert buffer.prompts.retired == ({group.sample} if retires else set())


def test_shaping_neither_hides_nor_makes_a_solved_sample() -> None:
    """Overlong shaping took all of a reward of 1, and gave something for a reward of 0."""
    buffer, _ = make(retire_pass_rate=0.9)
    rows = rows_of(buffer, 2)
    for group, reward, shaping in ((0, 0.0, -1.0), (1, 0.3, 0.3)):
        for uid in buffer.live[group].members:
            land(buffer, uid, reward, shaping=shaping)
    assert buffer.prompts.retired == {rows[0]}


def test_a_failed_member_is_not_one_that_did_not_pass() -> None:
    buffer, _ = make(episodes_per_group=3, retire_pass_rate=0.75)
    group = buffer.admit(0, 0.0)
    land_group(buffer, 0, 1.0, 1.0)
    give_up(buffer, "0.2")
    assert buffer.prompts.retired == {group.sample}
    buffer.admit(0, 0.0)
    land(buffer, "1.0")
    give_up(buffer, "1.1"), give_up(buffer, "1.2")  # one of three is no group
    assert buffer.prompts.retired == {group.sample}


def test_retired_samples_are_skipped_and_the_order_of_the_rest_stays() -> None:
    buffer, _ = make(rows=4, retire_pass_rate=0.9)
    plain, _ = make(rows=4)
    order = rows_of(plain, 8)
    assert rows_of(buffer, 4) == order[:4]
    land_group(buffer, 1, 1.0, 1.0)
    assert rows_of(buffer, 3) == [row for row in order[4:] if row != order[1]]
    assert buffer.flow().issued == 7 * 2


def test_when_all_samples_have_retired_the_data_is_over() -> None:
    buffer, batches = make(rows=2, retire_pass_rate=0.9)
    admit(buffer, 3)
    land_group(buffer, 0, 1.0, 1.0)
    assert not buffer.prompts.over
    land_group(buffer, 1, 1.0, 1.0)
    assert buffer.prompts.over and not buffer.can_admit(100, 100)
    assert len(train(batches, 0)) == 4
    assert batches.plan(1, 0, 1) is None and not batches.over  # a group of a retired sample still runs
    land_group(buffer, 2, 1.0, 0.0)
    assert len(train(batches, 1)) == 2 and batches.over


def test_a_pass_over_the_data_ends_where_it_did_before() -> None:
    buffer, _ = make(rows=3, epochs=2, retire_pass_rate=0.9)
    first = rows_of(buffer, 3)
    land_group(buffer, 0, 1.0, 1.0)
    second = []
    while not buffer.prompts.over:
        second.append(buffer.admit(0, 0.0).sample)
    assert sorted(second) == sorted(first[1:])


def test_a_late_member_completes_the_record_of_its_sample() -> None:
    keys = {"group_policy": "partial", "group_deadline": 5.0, "groups_per_batch": 1}
    buffer, batches = make(episodes_per_group=3, retire_pass_rate=0.9, **keys)
    group = buffer.admit(0, 0.0)
    land_group(buffer, 0, 1.0, 1.0)
    buffer.assign(buffer.episodes["0.2"], "w", 1, 0, 0.0)
    buffer.tick(5.0)
    train(batches, 0)
    assert not buffer.prompts.retired
    land(buffer, "0.2", now=6.0)
    assert buffer.prompts.retired == {group.sample}
