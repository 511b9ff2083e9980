from __future__ import annotations

from typing import Any

import pytest

from asyncrl.buffer import batches as module
from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.errors import ProtocolError
from asyncrl.types import DropReason, EpisodeStats
from tests.unit.buffer.machine import admit, count_again, land, land_group, make, run, train


@pytest.mark.parametrize(("ranks", "groups"), [(1, [3, 3, 2]), (2, [5, 3])])
def test_a_trainer_that_waits_is_given_what_is_worth_a_micro_batch(ranks: int, groups: list[int]) -> None:
    """A quarter of the groups, with a quarter of a full micro-batch for each rank; the rest as it is."""
    buffer, batches = make(groups_per_batch=8, max_staleness=4, target_staleness=4)
    batches.micro_batch_tokens = 8192
    admit(buffer, 9)
    parts = []
    for group in range(9):
        for member in range(2):
            land(buffer, f"{group}.{member}").tokens = 500
        plan = batches.next_part(1, len(parts), ranks)
        parts += [plan] if plan else []
    assert [len(plan) / 2 for plan in parts] == groups
    assert batches.next_part(1, len(parts), ranks) == []


def test_what_a_group_shares_counts_once() -> None:
    """30 members of 90 tokens, of which they share 89: nine such groups have 1,000, eight have not."""
    buffer, batches = make(groups_per_batch=40, episodes_per_group=30)
    batches.packing = "tree"
    batches.micro_batch_tokens = 1000
    land_groups(buffer, 8, 89, *[90] * 30)
    assert batches.next_part(1, 0, 1) is None
    land_groups(buffer, 1, 89, *[90] * 30)
    assert len(batches.next_part(1, 0, 1) or []) == 9 * 30


@pytest.mark.parametrize(("total", "oldest", "alone"), [(9, 1, False), (2, 1, True), (9, 0, True)])
def test_a_late_member_is_no_micro_batch_by_itself(total: int, oldest: int, alone: bool) -> None:
    """It goes with the next batch; unless there is none, or it would be stale by then."""
    keys = {"group_policy": "partial", "group_deadline": 5.0, "episodes_per_group": 3, "groups_per_batch": 1}
    buffer, batches = make(total_groups=total, max_staleness=1, **keys)
    buffer.committed = 1
    admit(buffer, 1)
    run(buffer, "0.2")
    land(buffer, "0.0", version=1), land(buffer, "0.1", version=1)
    buffer.settle_overdue(5.0)
    assert batches.next_part(2, 0, 1) == ["0.0", "0.1"]
    land(buffer, "0.2", version=oldest, now=6.0)
    assert batches.next_part(2, 1, 1) == (["0.2"] if alone else [])
    if not alone:
        batches.commit_batch(2, ["0.0", "0.1"])
        admit(buffer, 1)
        land(buffer, "1.0"), land(buffer, "1.1"), land(buffer, "1.2")
        assert sorted(batches.next_part(3, 0, 1) or []) == ["0.2", "1.0", "1.1", "1.2"]


def test_what_is_counted_does_not_grow_with_the_steps() -> None:
    """Each turn of the loop looks at all of it."""
    buffer, batches = make()
    for step in range(20):
        admit(buffer, 2)
        land_group(buffer, 2 * step, 1.0, 1.0), land_group(buffer, 2 * step + 1, 1.0, 1.0)
        train(batches)
    assert len(buffer.tally.groups_by_step) <= 2


def test_forgetting_plans_looks_at_each_of_them_once() -> None:
    """Many may be kept: a batch goes in each turn of the loop."""

    class Counted(dict[Any, Any]):
        looks = 0

        def __iter__(self) -> Any:
            for key in super().__iter__():
                Counted.looks += 1
                yield key

        def values(self) -> Any:
            return [self[key] for key in self]

        def __contains__(self, key: object) -> bool:
            Counted.looks += 1
            return super().__contains__(key)

    buffer, batches = make()
    for step in range(40):
        admit(buffer, 2)
        land_group(buffer, 2 * step, 1.0, 1.0), land_group(buffer, 2 * step + 1, 1.0, 1.0)
        train(batches)
    batches.planned_episodes, batches.by_step = Counted(batches.planned_episodes), Counted(batches.by_step)
    for step in range(1, 31):
        assert len(batches.forget_covered_plans(step)) == 4
    assert Counted.looks <= 30 * (4 * 2 + 4)
    assert batches.baselines.keys() == set(range(60, 80)) and len(batches.planned_episodes) == 40


def test_drop_mode_drops_by_token_age() -> None:
    buffer, batches = make(on_stale="drop", max_staleness=1, groups_per_batch=1, target_staleness=1)
    admit(buffer, 2)
    land(buffer, "0.0", version=0), land(buffer, "0.1", version=0)
    train(batches)
    buffer.committed = 2
    land(buffer, "1.0", version=0), land(buffer, "1.1", version=1)
    assert batches.next_part(3, 0, 1) == ["1.1"]
    assert buffer.reasons[f"{State.DROPPED}/{DropReason.STALE}"] == 1


def test_hold_waits_for_the_straggler_that_would_cross_the_bound() -> None:
    buffer, batches = make(on_stale="hold", max_staleness=1, groups_per_batch=1, target_staleness=1)
    admit(buffer, 2)
    for uid in ("0.0", "0.1", "1.0", "1.1"):
        buffer.assign(buffer.episodes[uid], "w", 1, 0, 0.0)
    land(buffer, "1.0"), land(buffer, "1.1")
    # Step 1 may take group 1: group 0 (version 0) is still within the bound in step 2.
    assert sorted(train(batches)) == ["1.0", "1.1"]
    admit(buffer, 1)
    land(buffer, "2.0", version=1), land(buffer, "2.1", version=1)
    assert batches.next_part(2, 0, 1) is None  # taking group 2 now would leave group 0 over the bound
    land(buffer, "0.0"), land(buffer, "0.1")
    assert sorted(train(batches)) == ["0.0", "0.1"]
    assert sorted(train(batches)) == ["2.0", "2.1"]


def test_a_restarted_trainer_is_given_the_same_plans() -> None:
    buffer, batches = make()
    admit(buffer, 2)
    for uid in ("0.0", "0.1", "1.0", "1.1"):
        land(buffer, uid)
    first = train(batches)
    again = [batches.next_part(1, micro, 1) for micro in range(2)]
    assert again == [first, []]
    assert sorted(batches.forget_covered_plans(1)) == sorted(first)
    assert not batches.by_step and not batches.planned_episodes


def test_a_commit_that_is_repeated_leaves_the_refills_of_the_next_batch() -> None:
    buffer, batches = make(filter_zero_variance=True)
    admit(buffer, 3)
    land_group(buffer, 0, 1.0, 0.0), land_group(buffer, 1, 1.0, 0.0)
    trained_uids = train(batches)
    land_group(buffer, 2, 1.0, 1.0)

    batches.commit_batch(1, trained_uids)
    assert (buffer.committed, buffer.refills) == (1, 1)


def test_an_episode_that_the_trainer_lost_is_dropped_as_corrupt() -> None:
    buffer, batches = make()
    admit(buffer, 2)
    land_group(buffer, 0, 1.0, 0.0), land_group(buffer, 1, 1.0, 0.0)
    lost_uid, *trained_uids = batches.next_part(1, 0, 1) or []

    with pytest.raises(ProtocolError, match=f"these episodes differ: {lost_uid}"):
        batches.commit_batch(1, trained_uids)
    for _ in range(2):  # a restarted trainer repeats the commit
        batches.commit_batch(1, trained_uids, lost_uids=[lost_uid])
        states = {uid: batches.planned_episodes[uid].state for uid in (lost_uid, *trained_uids)}
        assert states == {lost_uid: State.DROPPED, **dict.fromkeys(trained_uids, State.TRAINED)}
    assert buffer.committed == 1


def test_a_refused_commit_changes_nothing() -> None:
    buffer, batches = make()
    admit(buffer, 2)
    for group in range(2):
        land_group(buffer, group, 1.0, 0.0)
    lost_uid, *trained_uids = batches.next_part(1, 0, 1) or []
    batches.pop_changes()

    for trained, lost, differing in (
        (trained_uids[1:], [lost_uid], trained_uids[0]),
        (trained_uids, [lost_uid, "9.9"], "9.9"),
        ([lost_uid, *trained_uids], [lost_uid], lost_uid),
    ):
        with pytest.raises(ProtocolError, match=f"these episodes differ: {differing}$"):
            batches.commit_batch(1, trained, lost_uids=lost)
        assert not batches.by_step[1].lost
        assert not batches.pop_changes()
    assert buffer.committed == 0


def test_of_skipped_steps_no_plan_is_left_and_no_episode_is_taken() -> None:
    """The checkpoint of step 1 has trained three of its four episodes; the payload of the fourth was lost."""
    buffer, batches = make()
    admit(buffer, 2)
    land_group(buffer, 0, 1.0, 0.0), land_group(buffer, 1, 1.0, 0.0)
    planned_uids = batches.next_part(1, 0, 1) or []
    buffer.mark_trained([buffer.episodes[uid] for uid in planned_uids[:3]])

    batches.skip_to(1)
    assert not batches.by_step and buffer.committed == 1
    account = buffer.account()
    assert (account.trained, account.dropped, account.taken) == (3, 1, 0) and account.conserved


def test_a_plan_is_stored_with_the_ranks_and_the_budget_that_it_was_last_handed_out_for() -> None:
    """Also where it was committed before: who trains it again deals and cuts it so."""
    buffer, batches = make()
    admit(buffer, 2)
    for uid in ("0.0", "0.1", "1.0", "1.1"):
        land(buffer, uid)
    train(batches)
    batches.pop_changes()
    stored = []
    for ranks, budget in ((2, 100), (2, 100), (2, 50)):
        batches.next_part(1, 0, ranks, budget)
        stored.append([(batch.ranks, batch.budget) for batch in batches.pop_changes()])
    assert stored == [[(2, 100)], [], [(2, 50)]]


def land_groups(buffer: ReplayBuffer, groups: int, prompt: int, *tokens: int) -> None:
    first = buffer.next_group
    admit(buffer, groups)
    for group in range(first, first + groups):
        for member, count in enumerate(tokens):
            episode = land(buffer, f"{group}.{member}")
            episode.tokens = count
            episode.stats = EpisodeStats(1, longest_row=count, prompt=prompt)


def test_ranks_are_given_what_is_ready_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some micro-batches for each, of whole groups, the oldest first."""
    monkeypatch.setattr(module, "MAX_MICRO_BATCHES_PER_PART", 2)
    buffer, batches = make(groups_per_batch=8)
    batches.micro_batch_tokens = 100
    land_groups(buffer, 8, 0, 40, 40)
    plans = [batches.next_part(1, micro, 2) for micro in range(3)]
    assert plans == [[f"{g}.{m}" for g in some for m in (0, 1)] for some in (range(5), range(5, 8), ())]


def test_a_batch_that_is_left_out_leaves_nothing_of_its_groups() -> None:
    """A late member would hold its group's place among the live ones, and be a part of no batch."""
    buffer, batches = make(
        total_groups=2, episodes_per_group=3, group_policy="partial", group_deadline=1.0, groups_per_batch=2
    )
    admit(buffer, 2)
    for group in (0, 1):
        land_group(buffer, group, 0.0, 1.0)
        run(buffer, f"{group}.2")
    buffer.settle_overdue(2.0)
    assert not buffer.has_room
    planned_uids = batches.next_part(1, 0, 1)
    assert planned_uids == ["0.0", "0.1", "1.0", "1.1"] and batches.next_part(1, 1, 1) == []
    assert [episode.uid for episode in batches.leave_out_batch(DropReason.SPIKE)] == ["0.2", "1.2"]
    assert buffer.reasons == {"dropped/spike": 6} and not buffer.live_groups and buffer.account().conserved
    assert batches.by_step[1].uids == [] and buffer.has_room
    count_again(buffer)
    admit(buffer, 2)
    for group in (2, 3):
        land_group(buffer, group, 0.0, 1.0, 0.0)
    assert len(train(batches)) == 6
