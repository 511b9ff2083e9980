"""From admission to the batch: what becomes of groups, by what happens to their members (`machine.play`)."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.records import EpisodeAccount, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.staleness import oldest_version_of
from asyncrl.types import DropReason, FilterReason
from tests.unit.buffer.machine import admit, count_again, give_up, land, land_group, make, play, run, train

LATE = {"group_policy": "partial", "group_deadline": 5.0, "groups_per_batch": 1}
FILTER = {"filter_zero_variance": True, "max_refill": 3, "max_staleness": 8, "target_staleness": 8}
GREEDY = {"greedy": True, "groups_per_batch": 1, "max_staleness": 4}
DATA = {"epochs": 1, "max_staleness": 4}
PAIR = ["0.0", "0.1"]
NEXT = ["1.0", "1.1"]

CASES: dict[str, tuple[dict[str, Any], str, dict[str, int], list[list[str]]]] = {
    # admission
    "as many groups as the target allows; those that landed are live until their batch is committed": (
        {"max_staleness": 4, "target_staleness": 1},
        *("a4 0e 1e a0 T a2", {"trained": 4, "in_flight": 8}, [PAIR + NEXT]),
    ),
    "no more groups than the run trains": (
        {"total_groups": 3, "max_staleness": 4, "target_staleness": 4},
        *("a3", {"in_flight": 6}, []),
    ),
    "a late member takes up no admission: a whole batch of groups follows, and not one less": (
        {"total_groups": 4, "episodes_per_group": 3, **LATE, "groups_per_batch": 2, "max_staleness": 0},
        "+2 0.0=1 0.1=1 0.2~ 1e @5 T a2",
        {"trained": 5, "in_flight": 7},
        [[*PAIR, *NEXT, "1.2"]],
    ),
    # batches
    "micro-batches stream in; a group that is ready goes before an older one that is not": (
        {"micro_batch_tokens": 40},
        *("+3 0.0=1 ? 0.1=1 M ? 2e T", {"trained": 4, "in_flight": 2}, [[*PAIR, "2.0", "2.1"]]),
    ),
    "the oldest groups that are ready go first": (
        {"max_staleness": 4, "target_staleness": 4},
        "+4 3e 2e 0e T",
        {"trained": 4, "ready": 2, "in_flight": 2},
        [[*PAIR, "2.0", "2.1"]],
    ),
    "a short batch is flushed when the data ends": (
        {"rows": 3, **DATA},
        *("+3 0e 1e 2e T T ?", {"trained": 6}, [PAIR + NEXT, ["2.0", "2.1"]]),
    ),
    "late members are one batch when the data ends": (
        {"rows": 1, "episodes_per_group": 4, **DATA, **LATE},
        "+1 0.2~ 0.3~ 0.0=1 0.1=1 @5 T @6 0.2=1 ? @7 0.3=1 T ?",
        {"trained": 4},
        [PAIR, ["0.2", "0.3"]],
    ),
    "with at_end=drop a batch that has begun is trained, though it can never fill": (
        {"rows": 2, "flush_at_end": False, "micro_batch_tokens": 40, "filter_zero_variance": True, **DATA},
        *("+2 0m M 1e T", {"trained": 2, "filtered": 2}, [PAIR]),
    ),
    # settlement
    "a failed member is issued again, once": (
        {},
        *("+1 0.0~ 0.0x 0.0~ 0.0x 0.1=1", {"failed": 1, "dropped": 1}, []),
    ),
    "one usable member of two is no group": ({}, "+1 0.0! 0.1=1", {"failed": 1, "dropped": 1}, []),
    "a group of equal rewards is filtered": (
        {"filter_zero_variance": True},
        *("+2 0e 1m", {"filtered": 2, "ready": 2}, []),
    ),
    "rewards that differ by rounding are equal": (
        FILTER,
        f"+2 0.0={0.1 + 0.2} 0.1=0.3 1.0=0.3 1.1=0.3001",
        {"filtered": 2, "ready": 2},
        [],
    ),
    "a late member is trained later": (
        {"episodes_per_group": 3, **LATE},
        *("+1 0.0=1 0.1=0 ? @5 T @6 0.2=1", {"trained": 2, "ready": 1}, [PAIR]),
    ),
    "a partial group leaves when its late member fails": (
        {"episodes_per_group": 3, **LATE},
        *("+1 0.0=1 0.1=1 0.2~ @5 T 0.2!", {"trained": 2, "failed": 1}, [PAIR]),
    ),
    "of a filtered group a late member is trained that earned something else; it is no batch by itself": (
        {"episodes_per_group": 4, "target_staleness": 0, "filter_zero_variance": True, **LATE},
        "+1 0.2~ 0.3~ 0.0=1 0.1=1 @5 @6 0.2=1 0.3=0 ? a1 1m T",
        {"filtered": 3, "trained": 5},
        [["0.3", *NEXT, "1.2", "1.3"]],
    ),
    "such a late member takes no place of a batch": (
        {"episodes_per_group": 3, **FILTER, **LATE, "groups_per_batch": 2},
        "+3 0.2~ 0.0=1 0.1=1 1.2~ 1.0=1 1.1=0 2.2~ 2.0=1 2.1=0 @5 @6 0.2=0 T",
        {"filtered": 2, "trained": 5, "in_flight": 2},
        [["0.2", *NEXT, "2.0", "2.1"]],
    ),
    "nor of one that streams in": (
        {"episodes_per_group": 3, **FILTER, **LATE, "groups_per_batch": 2, "micro_batch_tokens": 20},
        "+3 0.2~ 0.0=1 0.1=1 @5 @6 0.2=0 M 1m M ? 2m T",
        {"filtered": 2, "trained": 7},
        [["0.2", *NEXT, "1.2", "2.0", "2.1", "2.2"]],
    ),
    "such a late member is trained when the data is over": (
        {"rows": 1, "episodes_per_group": 3, **FILTER, **LATE, "epochs": 1},
        *("+1 0.2~ 0.0=1 0.1=1 @5 ? @6 0.2=0 T ?", {"filtered": 2, "trained": 1}, [["0.2"]]),
    ),
    # refilling: six filtered groups are the most that a batch waits for
    "a batch takes what there is once the cap is reached, and the count begins anew": (
        FILTER,
        "+9 0m 1e 2e 3e 4e 5e ? 6e T 7m ? 8m T",
        {"filtered": 12, "trained": 6},
        [PAIR, ["7.0", "7.1", "8.0", "8.1"]],
    ),
    "a batch of nothing is not taken: the first group that can be trained ends the search": (
        FILTER,
        *("+8 0e 1e 2e 3e 4e 5e 6e ? 7m T", {"filtered": 14, "trained": 2}, [["7.0", "7.1"]]),
    ),
    "a capped batch that was taken in part closes": (
        {**FILTER, "micro_batch_tokens": 40},
        *("+7 0m M ? 1e ? 2e ? 3e ? 4e ? 5e ? 6e T", {"filtered": 12, "trained": 2}, [PAIR]),
    ),
    "groups that are short do not count as refills": (
        FILTER,
        "+8 0m " + " ".join(f"{k}.0=1 {k}.1!" for k in range(1, 8)) + " ?",
        {"ready": 2, "failed": 7, "dropped": 7},
        [],
    ),
    # the greedy member, the third one
    "the greedy member is waited for, and leaves as filtered": (
        GREEDY,
        *("+2 0.0=1 0.1=0 ? 0.2=0.25 T", {"trained": 2, "filtered": 1, "in_flight": 3}, [PAIR]),
    ),
    "another try of the greedy member": (GREEDY, "+2 0.0~ 0.2~ 0.2x", {"in_flight": 6}, []),
    "a short group takes its greedy member along": (
        GREEDY,
        *("+2 0.2=1 0.0=1 0.1!", {"failed": 1, "dropped": 2, "in_flight": 3}, []),
    ),
    "all three earned the same": (
        {**GREEDY, "filter_zero_variance": True},
        *("+1 0.0=1 0.1=1 0.2=1", {"filtered": 3}, []),
    ),
    "equal rewards teach where the greedy one differs": (
        {**GREEDY, "filter_zero_variance": True},
        *("+1 0.0=1 0.1=1 0.2=0", {"filtered": 1, "ready": 2}, []),
    ),
}


@pytest.mark.parametrize(("keys", "events", "flow", "trained"), CASES.values(), ids=CASES)
def test_groups(keys: dict[str, Any], events: str, flow: dict[str, int], trained: list[list[str]]) -> None:
    """`flow`: episodes by state, those of other states are none."""
    keys = dict(keys)
    batch_settings = {name: keys.pop(name) for name in ("micro_batch_tokens", "flush_at_end") if name in keys}
    buffer, batches = make(**keys)
    for name, value in batch_settings.items():
        setattr(batches, name, value)
    assert play(buffer, batches, events) == trained
    account = msgspec.structs.asdict(buffer.account())
    assert account.pop("issued") == sum(account.values())
    assert {state: count for state, count in account.items() if count} == flow
    assert batches.over is (buffer.prompts.over and not buffer.live_groups)
    count_again(buffer)


# -- the greedy episode: compared with, never trained, counted like any other -------------------------------


def world(groups: int = 2, **keys: object) -> tuple[ReplayBuffer, Batches]:
    """Groups of two and a greedy one: 0.0, 0.1, 0.2; one group per batch."""
    buffer, batches = make(greedy=True, groups_per_batch=1, max_staleness=4, **keys)
    admit(buffer, groups)
    return buffer, batches


def flow(buffer: ReplayBuffer) -> EpisodeAccount:
    account = buffer.account()
    assert account.conserved
    return account


def test_a_group_has_one_member_more() -> None:
    buffer, _ = world(target_staleness=4)
    assert [buffer.episodes[uid].greedy for uid in buffer.live_groups[0].members] == [False, False, True]
    assert flow(buffer).issued == 6
    assert [buffer.can_admit(free_slots, total_slots=100) for free_slots in (2, 3)] == [False, True]


def test_its_reward_is_the_baseline_and_it_leaves_as_filtered() -> None:
    buffer, batches = world()
    land_group(buffer, 0, 1.0, 0.0)
    assert batches.next_part(1, 0, 1) is None  # without it there is no baseline
    land(buffer, "0.2", 0.25)
    assert flow(buffer).filtered == 1
    assert buffer.reasons[f"{State.FILTERED}/{FilterReason.BASELINE}"] == 1
    assert sorted(train(batches)) == ["0.0", "0.1"]
    baseline = batches.baselines[0]
    assert baseline.greedy == 0.25
    assert [
        (member, r.reward, r.turn_rewards)
        for member, r in zip(baseline.members, baseline.results, strict=True)
    ] == [
        (0, 1.0, (1.0,)),
        (1, 0.0, (0.0,)),
    ]
    assert (flow(buffer).trained, flow(buffer).filtered, list(buffer.live_groups)) == (2, 1, [1])


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
    account = flow(buffer)
    failed = states.count("failed")
    assert [episode.member for episode in running] == [i for i in (0, 1) if states[i] == "running"]
    assert (account.failed, account.dropped, list(buffer.live_groups)) == (1 + failed, 2 - failed, [1])
    assert buffer.reasons[f"{State.DROPPED}/{DropReason.GROUP_SHORT}"] == 2 - failed
    assert batches.next_part(1, 0, 1) is None and buffer.settled_counts[State.DROPPED] == 1


@pytest.mark.parametrize("greedy", [False, True])
def test_a_baseline_counts_all_members_that_were_issued_but_the_greedy_one(greedy: bool) -> None:
    """Two of three members land, and the third fails: dr_grpo divides by three."""
    buffer, batches = make(greedy=greedy, groups_per_batch=1, episodes_per_group=3)
    admit(buffer, 1)
    land_group(buffer, 0, 1.0, 0.0)
    if greedy:
        land(buffer, "0.3", 0.25)
    give_up(buffer, "0.2")

    assert batches.next_part(1, 0, 1) == ["0.0", "0.1"]
    assert (len(batches.baselines[0].results), batches.baselines[0].issued) == (2, 3)


def test_it_is_not_what_hold_waits_for() -> None:
    buffer, _ = world(on_stale="hold", target_staleness=4)
    for uid in ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2"):
        buffer.assign(buffer.episodes[uid], "w", 1, 4 if uid != "0.2" else 0, 0.0)
    assert oldest_version_of(buffer, buffer.live_groups[0]) == 4
