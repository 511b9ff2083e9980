from __future__ import annotations

import enum
import math
from collections import Counter, deque
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.buffer.batches import Baseline
from asyncrl.buffer.payloads import cut_back
from asyncrl.buffer.records import MAX_LOSSES, EpisodeRecord, GroupRecord, State
from asyncrl.buffer.replay import ReplayBuffer, running_attempt
from asyncrl.buffer.staleness import assignable_episodes, oldest_version_of
from asyncrl.types import DropReason, EpisodeResult, EpisodeStats, FailReason
from tests.unit.buffer.machine import admit, count_again, give_up, land, land_group, make, run, train


def test_the_version_that_a_start_needs_grows_with_the_groups_before_it() -> None:
    """Two groups per batch: the third is in the second batch at the earliest."""
    buffer, _ = make(max_staleness=1, target_staleness=1)
    admit(buffer, 4)
    buffer.committed = 3
    assert [(needed, e.uid) for needed, e in assignable_episodes(buffer) if e.member == 0] == [
        (2, "0.0"),
        (2, "1.0"),
        (3, "2.0"),
        (3, "3.0"),
    ]


def test_a_lost_worker_keeps_the_durable_turns() -> None:
    buffer, _ = make()
    admit(buffer, 1)
    episode = buffer.episodes["0.0"]
    buffer.assign(episode, "w", 1, 0, 0.0)
    episode.add_turn(20, 10, 0, 0)
    buffer.mark_changed(episode)
    buffer.fail_attempt(episode, FailReason.WORKER_LOST, 0.0)
    assert (episode.state, episode.attempt, episode.turns) == (State.PENDING, 1, 1)
    assert running_attempt(buffer.episodes, "0.0", 0) is None  # the old attempt is fenced


def test_the_versions_of_an_episode_are_the_oldest_and_the_newest_of_all_its_turns() -> None:
    """The second turn is sampled by a server that has older weights."""
    episode = EpisodeRecord("0.0", 0, 0)
    episode.add_turn(tokens=20, model_tokens=10, oldest=3, newest=5)
    episode.add_turn(tokens=20, model_tokens=10, oldest=2, newest=4)
    assert (episode.oldest, episode.newest) == (2, 5)


@pytest.mark.parametrize(
    ("reason", "turns"),
    [(FailReason.SETUP_FAILED, 1), (FailReason.TESTS_FAILED_TO_RUN, 1), (FailReason.REWARD_ERROR, 0)],
)
def test_tests_that_could_not_judge_are_tried_again_on_the_same_turns(reason: FailReason, turns: int) -> None:
    buffer, _ = make()
    admit(buffer, 1)
    run(buffer, "0.0")
    episode = buffer.episodes["0.0"]
    episode.add_turn(20, 10, 0, 0)
    buffer.fail_attempt(episode, reason, 0.0)
    assert (episode.state, episode.turns, episode.failures) == (State.PENDING, turns, 1)


@pytest.mark.parametrize("reason", [FailReason.WORKER_LOST, FailReason.ENGINE_LOST, FailReason.NOT_REPEATED])
def test_what_was_lost_uses_up_no_retries(reason: FailReason) -> None:
    """After three resumes all that had been under way was given up: most of it long episodes."""
    buffer, _ = make()
    admit(buffer, 1)
    episode = buffer.episodes["0.0"]
    for _ in range(MAX_LOSSES):
        run(buffer, "0.0")
        buffer.fail_attempt(episode, reason, 0.0)
    assert (episode.state, episode.failures) == (State.PENDING, 0)
    run(buffer, "0.0")
    buffer.fail_attempt(episode, reason, 0.0)  # one that takes its worker along each time ends, too
    assert episode.state is State.FAILED


@pytest.mark.parametrize("in_time", [[], [1]])
def test_where_too_few_land_in_time_the_first_two_are_compared_and_later_ones_with_the_first(
    in_time: list[int],
) -> None:
    buffer, batches = make(
        group_policy="partial", group_deadline=5.0, episodes_per_group=4, groups_per_batch=1
    )
    admit(buffer, 1)
    for member in range(4):
        run(buffer, f"0.{member}")
    for member in in_time:
        land(buffer, f"0.{member}", float(member))
    buffer.settle_overdue(now=5.0)
    order = [*in_time, *(member for member in (2, 0, 3, 1) if member not in in_time)]
    for position, member in enumerate(order[len(in_time) :], len(in_time)):
        assert buffer.live_groups[0].settled is (position > 1)
        land(buffer, f"0.{member}", float(member), now=6.0)
    assert (buffer.live_groups[0].baseline, buffer.live_groups[0].late_siblings) == (
        tuple(order[:2]),
        (order[0],),
    )
    train(batches)
    (baseline,) = batches.baselines.values()
    rewards = {
        member: [result.reward for result in baseline.siblings(batches.planned_episodes[f"0.{member}"])[0]]
        for member in range(4)
    }
    first, second = map(float, order[:2])
    assert rewards == {m: [first, second] if m in order[:2] else [first] for m in range(4)}


def test_late_members_are_compared_with_all_members_that_landed_in_time_if_two_did() -> None:
    buffer, _ = make(group_policy="partial", group_deadline=5.0, episodes_per_group=3)
    admit(buffer, 1)
    run(buffer, "0.1")
    land(buffer, "0.0", 1.0), land(buffer, "0.2", 0.0)
    buffer.settle_overdue(now=5.0)
    assert buffer.live_groups[0].late_siblings == (0, 2)


def test_who_lands_after_the_deadline_is_late_though_no_tick_has_come() -> None:
    buffer, _ = make(group_policy="partial", group_deadline=5.0, episodes_per_group=3, groups_per_batch=1)
    admit(buffer, 1)
    land(buffer, "0.0", 1.0), land(buffer, "0.1", 0.0), land(buffer, "0.2", 1.0, now=5.0)
    assert buffer.live_groups[0].baseline == (0, 1)


def test_the_deadline_counts_from_the_start_and_is_what_half_of_the_groups_need() -> None:
    buffer, _ = make(group_policy="partial", groups_per_batch=2)
    admit(buffer, 2)
    assert [group.patience for group in buffer.live_groups.values()] == [math.inf] * 2  # nothing is known yet
    for uid, now in (("0.0", 1.0), ("0.1", 2.0), ("1.0", 3.0), ("1.1", 9.0)):
        land(buffer, uid, now=now)  # both began at 0
    group = buffer.admit_group(now=50.0)
    assert (group.patience, group.deadline) == (2.0, math.inf)
    for uid in group.members:
        buffer.assign(buffer.episodes[uid], "w", 1, 0, 60.0 + float(uid[-1]))
    assert (group.started, group.deadline) == (60.0, 62.0)
    slow = buffer.admit_group(now=70.0)
    assert slow.patience == 9.0  # of three, the one that has run for ten seconds counts


def test_groups_that_leave_untrained_are_counted_in_a_row() -> None:
    buffer, batches = make(groups_per_batch=1)
    admit(buffer, 3)
    for uid in ("0.0", "0.1"):
        buffer.assign(buffer.episodes[uid], "w", 1, 0, 0.0)
        buffer.fail_attempt(buffer.episodes[uid], FailReason.PROMPT_TOO_LONG, 0.0)
    assert (buffer.untrained_groups, buffer.untrained_reason) == (1, "failed (prompt_too_long)")
    land(buffer, "1.0"), land(buffer, "1.1")
    train(batches)
    assert buffer.untrained_groups == 0


class FlowMachine(RuleBasedStateMachine):
    """Any order of events: nothing is lost, counted twice, or trained twice; and it always goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.part_index = 0
        self.trained: Counter[str] = Counter()

    @initialize(
        greedy=st.booleans(),
        policy=st.sampled_from(["complete", "partial"]),
        max_refill=st.sampled_from([1, 8]),
        rate=st.sampled_from([0.5, 1.0]),
    )
    def begin(self, greedy: bool, policy: str, max_refill: int, rate: float) -> None:
        keys = {"group_policy": policy, "max_refill": max_refill, "retire_pass_rate": rate}
        self.buffer, self.batches = make(
            rows=12, total_groups=20, greedy=greedy, max_staleness=2, filter_zero_variance=True, **keys
        )

    def running(self) -> list[str]:
        return [e.uid for e in self.buffer.episodes.values() if e.state is State.RUNNING]

    @rule(n=st.integers(1, 6))
    def admit(self, n: int) -> None:
        for _ in range(n):
            if self.buffer.can_admit(10, 10):
                retired_before = set(self.buffer.prompts.retired_samples)
                assert self.buffer.admit_group(self.now).sample not in retired_before

    @rule(n=st.integers(1, 6))
    def assign(self, n: int) -> None:
        for _, episode in islice(assignable_episodes(self.buffer), n):
            self.buffer.assign(episode, "w", 1, self.batches.committed, self.now)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), turns=st.integers(0, 2))
    def finish(self, data: st.DataObject, reward: float, turns: int) -> None:
        episode = self.buffer.episodes[data.draw(st.sampled_from(self.running()))]
        for _ in range(turns):
            episode.add_turn(5, 3, self.batches.committed, self.batches.committed)
            self.buffer.mark_changed(episode)
        self.buffer.finish_episode(episode, EpisodeResult(reward), EpisodeStats(1), self.now)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), reason=st.sampled_from(list(FailReason)))
    def fail(self, data: st.DataObject, reason: FailReason) -> None:
        episode = self.buffer.episodes[data.draw(st.sampled_from(self.running()))]
        self.buffer.fail_attempt(episode, reason, self.now)

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.buffer.settle_overdue(self.now)

    @rule()
    def step(self) -> None:
        """Ask for the next micro-batch; at the end of the batch, commit."""
        config = self.buffer.config
        refill_limit_reached = self.buffer.refills >= config.max_refill * config.groups_per_batch
        short = refill_limit_reached or self.buffer.prompts.over
        plan = self.batches.next_part(self.buffer.current_step, self.part_index, 1)
        if plan is None:
            return
        assert plan == self.batches.next_part(
            self.buffer.current_step, self.part_index, 1
        )  # asked again: the same
        self.part_index += 1
        if not plan:
            batch = self.batches.by_step[self.buffer.current_step]
            self.trained.update(batch.uids)
            assert len(batch.groups) == 2 or (short and len(batch.groups) < 2)
            assert all((b.greedy is not None) is self.buffer.greedy for b in self.batches.baselines.values())
            self.batches.commit_batch(batch.step, batch.uids)
            self.part_index = 0

    @invariant()
    def conserved(self) -> None:
        count_again(self.buffer)
        flow = self.buffer.account()
        assert flow.conserved, flow
        assert flow.trained == sum(self.trained.values())
        assert max(self.trained.values(), default=1) == 1
        assert self.buffer.tally.count_live(self.buffer.committed) <= self.buffer.max_live_groups
        states = {self.buffer.episodes[uid].state for uid in self.trained if uid in self.buffer.episodes}
        assert states <= {State.TRAINED}
        assert not any(e.state is State.READY for e in self.buffer.episodes.values() if e.greedy)

    def teardown(self) -> None:
        """Whatever comes after is of no use (equal rewards): what there is must still become a batch."""
        if not hasattr(self, "buffer"):
            return
        self.now += 1e6
        waiting = (State.READY, State.TAKEN)
        for _ in range(200):
            if not any(episode.state in waiting for episode in self.buffer.episodes.values()):
                return
            self.admit(6), self.assign(1000)
            for uid in self.running():
                self.buffer.finish_episode(
                    self.buffer.episodes[uid], EpisodeResult(1.0), EpisodeStats(1), self.now
                )
            self.tick(1e6)
            self.step(), self.step()
            self.conserved()
        raise AssertionError("trajectories wait for a batch that never fills")


TestFlow = FlowMachine.TestCase
TestFlow.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


# -- payloads that are gone ---------------------------------------------------------------------------------


def rewards(buffer: ReplayBuffer, group: int) -> list[float]:
    return [result.reward for result in Baseline.of_group(buffer.live_groups[group], buffer.episodes).results]


def test_who_runs_again_is_not_in_the_baseline_before_it_lands_again() -> None:
    """It had landed after the deadline, as the first; then the others land, and the group settles."""
    buffer, _ = make(episodes_per_group=3, group_policy="partial", group_deadline=4.0)
    admit(buffer, 1)
    for member in range(3):
        run(buffer, f"0.{member}")
    land(buffer, "0.0", 1.0, now=5.0)
    cut_back(buffer, buffer.episodes["0.0"], [])
    land(buffer, "0.1", 0.5, now=6.0), land(buffer, "0.2", 1.0, now=7.0)
    assert buffer.live_groups[0].settled and rewards(buffer, 0) == [0.5, 1.0]
    assert land(buffer, "0.0", 1.0, now=8.0).state is State.READY
    assert rewards(buffer, 0) == [0.5, 1.0]


def test_the_others_are_compared_with_the_reward_of_a_ready_member_that_is_dropped() -> None:
    buffer, _ = make(episodes_per_group=3)
    admit(buffer, 1)
    for member, reward in enumerate((1.0, 0.0, 0.5)):
        land(buffer, f"0.{member}", reward)
    cut_back(buffer, buffer.episodes["0.0"], [])
    assert [e.state for e in buffer.trainable_members(buffer.live_groups[0])] == [
        State.DROPPED,
        State.READY,
        State.READY,
    ]
    assert rewards(buffer, 0) == [1.0, 0.0, 0.5]


def contents(value: Any) -> Any:
    """All that an object holds, down to plain values and records, as text: NaN is not equal to itself."""
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [contents(item) for item in value]
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, enum.Enum):
        return contents(vars(value))
    return repr(value)


def test_a_buffer_that_was_in_use_is_restored_as_a_new_one_is() -> None:
    """Nothing of what was undone stays: no deadline, no time that tokens wait, no total."""
    sizes = {"groups_per_batch": 1, "group_policy": "partial", "group_deadline": 9.0, "on_stale": "hold"}
    used, batches = make(**sizes)
    admit(used, 4)
    land_group(used, 0, 1.0, 0.0)
    train(batches)
    land(used, "1.0")
    stored = msgspec.msgpack.encode((list(used.live_groups.values()), list(used.episodes.values())))

    used.waiting_tokens.begin_life("2.0", 1.0, 10)
    run(used, "2.0")
    give_up(used, "2.1")
    used.drop_group(used.live_groups[3], DropReason.STALE)
    admit(used, 1)
    land(used, "1.1")
    used.settle_overdue(99.0)
    assert oldest_version_of(used, used.live_groups[1]) == 0 and used.oldest_versions

    fresh, _ = make(**sizes)
    for buffer in (used, fresh):
        groups, episodes = msgspec.msgpack.decode(stored, type=tuple[list[GroupRecord], list[EpisodeRecord]])
        buffer.restore_groups(groups, episodes, {State.TRAINED: 2}, 100.0)
        del buffer.prompts  # the order of the data, which the coordinator restores
    assert contents(used) == contents(fresh)
    count_again(used)
