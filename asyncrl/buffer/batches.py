"""Batches and their plans: which trajectories a step trains, in which micro-batches.

A plan is stored before it is sent, and kept until a checkpoint covers it; who asks again gets the same one.
A retry of a request, and a step that a restarted trainer repeats, are therefore a look-up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec

from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.shifts import Outlook
from asyncrl.buffer.staleness import GroupSlots, oldest_version_of, upcoming_slots
from asyncrl.config import Packing
from asyncrl.errors import ProtocolError
from asyncrl.types import DropReason, EpisodeResult

# Micro-batches' worth of trajectories that ranks are given at once: more are cut better, a stop waits longer.
MAX_MICRO_BATCHES_PER_PART = 4
# Worth a micro-batch of its own: this share of the batch's groups, with this share of micro_batch_tokens.
MIN_GROUP_FRACTION = MIN_TOKEN_FRACTION = 1 / 4


class Baseline(msgspec.Struct, frozen=True):
    """Holds the rewards that those of a group are compared with.

    members: numbers within the group, of those whose `results` the others are compared with.
    late: a late member is compared with the first `late` of them.
    issued: members that the group was issued with, landed or not.
    greedy: reward of its greedy episode, where there is one.
    """

    members: tuple[int, ...]
    results: tuple[EpisodeResult, ...]
    late: int
    issued: int
    greedy: float | None = None

    @classmethod
    def of(cls, group: GroupRecord, episodes: Mapping[str, EpisodeRecord]) -> Baseline:
        """The baseline of a settled group. Results do not change any more: a restart computes the same."""
        results = tuple(episodes[group.members[number]].result for number in group.baseline)
        last_member = episodes[group.members[-1]]
        issued = len(group.members) - last_member.greedy
        greedy = last_member.result.reward if last_member.greedy else None
        return cls(group.baseline, results, len(group.late_siblings), issued, greedy)

    def siblings(self, episode: EpisodeRecord) -> tuple[tuple[EpisodeResult, ...], int]:
        """The results that an episode is compared with (its own may be among them), and the place of its own;
        -1: it is late, and not among them."""
        if episode.member in self.members:
            return self.results, self.members.index(episode.member)
        return self.results[: self.late], -1


class Batch(msgspec.Struct):
    """The plan of one optimizer batch. `micros`: the uids of each part, which the ranks deal and cut into
    micro-batches. `closed`: no more come. `lost`: those whose payload could not be read, as far as no
    commit says that they were trained nevertheless. They keep their places, so that others keep theirs.
    `ranks`, `budget`: among how many it was dealt, and cut into micro-batches of how many tokens, when it was
    last handed out."""

    step: int  # 0-based: committed batches before it
    micros: list[list[str]] = []
    groups: set[int] = set()
    closed: bool = False
    lost: set[str] = set()
    ranks: int = 1
    budget: int = 0

    @property
    def planned(self) -> list[str]:
        return [uid for micro in self.micros for uid in micro]

    @property
    def uids(self) -> list[str]:
        """Returns the episodes that are trained."""
        return [uid for uid in self.planned if uid not in self.lost]

    @property
    def plan_hash(self) -> str:
        return hashlib.blake2b("\n".join(self.planned).encode(), digest_size=16).hexdigest()


class Batches:
    """Plans of all batches that no retained checkpoint covers, and the current one.

    Args:
        buffer: where trajectories are taken from.
        micro_tokens: tokens of one micro-batch on one rank, padding included.
        flush: train a short batch when the data has run out, rather than drop it.
        packing: padded: rows as long as the longest. tree: a group stays together, and shares its prompt.
    """

    def __init__(
        self, buffer: ReplayBuffer, micro_batch_tokens: int, flush: bool, packing: Packing = "padded"
    ) -> None:
        self.buffer = buffer
        self.micro_batch_tokens = micro_batch_tokens
        self.flush_at_end = flush
        self.packing = packing
        self.batches: dict[int, Batch] = {}  # by step, in order
        self.planned_episodes: dict[str, EpisodeRecord] = {}  # by uid: all episodes of the kept plans
        self.baselines: dict[int, Baseline] = {}  # of their groups
        self._changed_steps: set[int] = set()

    def pop_changes(self) -> list[Batch]:
        changed_batches = [self.batches[step] for step in sorted(self._changed_steps)]
        self._changed_steps = set()
        return changed_batches

    def restore_plans(
        self,
        batches: Iterable[Batch],
        planned_episodes: Iterable[EpisodeRecord],
        baselines: Mapping[int, Baseline],
    ) -> None:
        """Take over the plans of a store, in place of all plans before. Episodes that are still in the buffer
        stay the buffer's objects."""
        self._changed_steps = set()
        self.batches = {batch.step: batch for batch in batches}
        self.planned_episodes = {e.uid: self.buffer.episodes.get(e.uid, e) for e in planned_episodes}
        self.baselines = dict(baselines)

        self.buffer.closed_step = max(
            (step for step, batch in self.batches.items() if batch.closed), default=-1
        )

    def plan(self, step: int, part_index: int, ranks: int, token_budget: int = 0) -> list[str] | None:
        """Uids of the next part for so many ranks, which cut it by `budget` (0: `micro_tokens`); [] when the
        batch is complete; None: the caller must wait.

        The caller refuses a `step` greater than `committed`.
        """
        batch = self.batches.get(step)
        if batch is None:
            batch = self.batches[step] = Batch(step)

        if part_index < len(batch.micros):
            uids: list[str] | None = batch.micros[part_index]
        else:
            uids = [] if batch.closed else self._add_part(batch, ranks)

        how = (ranks, token_budget or self.micro_batch_tokens)
        if uids and how != (batch.ranks, batch.budget):
            batch.ranks, batch.budget = how
            self._changed_steps.add(step)

        return uids

    def outlook(self, step: int, part_index: int, ranks: int) -> Outlook:
        """Say what a `plan` would find now."""
        batch = self.batches.get(step, Batch(step))
        if part_index < len(batch.micros) or batch.closed or self.over:
            return Outlook(ready=True, group_fraction=1.0, batch_complete=True)

        ready_episodes, new_groups, batch_full = self._select_ready(batch, ranks, math.inf)
        group_fraction = len(batch.groups | new_groups) / self.buffer.config.groups_per_batch
        return Outlook(
            bool(ready_episodes) or (batch_full and bool(batch.planned)), group_fraction, batch_full
        )

    def _add_part(self, batch: Batch, ranks: int) -> list[str] | None:
        """Add what is ready; without it, close the batch if it is full."""
        ready_episodes, _, batch_full = self._select_ready(
            batch, ranks, MAX_MICRO_BATCHES_PER_PART * self.micro_batch_tokens * ranks
        )
        if not ready_episodes:
            return self._close_batch(batch) if batch_full else None

        for episode in ready_episodes:
            self.buffer.take_episode(episode, batch.step)
            self.planned_episodes[episode.uid] = episode
            group = self.buffer.live[episode.group]
            if group.id not in self.baselines:
                self.baselines[group.id] = Baseline.of(group, self.buffer.episodes)
            if group.step == batch.step and not group.filtered:  # a late member does not count its group
                batch.groups.add(group.id)

        batch.micros.append([episode.uid for episode in ready_episodes])
        self._changed_steps.add(batch.step)
        return batch.micros[-1]

    def _select_ready(
        self, batch: Batch, ranks: int, token_limit: float
    ) -> tuple[list[EpisodeRecord], set[int], bool]:
        """Find what is ready, up to so many tokens, once it is enough or nothing more can enter the batch;
        its new groups; and whether the batch is full with them. Late members that are not enough by
        themselves are left to the next batch, if there is one."""
        slots = upcoming_slots(self.buffer)
        ready_episodes, new_groups = self._collect_ready(batch, slots, token_limit)

        groups_per_batch = self.buffer.config.groups_per_batch
        batch_full = len(batch.groups | new_groups) >= groups_per_batch
        batch_full = (
            batch_full
            or self._is_last_batch(batch, new_groups)
            or (self._refill_limit_reached and slots.may_close)
        )

        worth_training = self._worth_training(ready_episodes, new_groups, ranks)
        last_chance = (
            self.buffer.prompts.over or batch.step + 1 >= self.buffer.total_groups // groups_per_batch
        )
        leave_to_next = not (worth_training or last_chance) and all(
            self._may_wait(episode, batch.step) for episode in ready_episodes
        )

        return (
            ([] if leave_to_next or not (worth_training or batch_full) else ready_episodes),
            new_groups,
            batch_full,
        )

    def _may_wait(self, episode: EpisodeRecord, step: int) -> bool:
        """True for a late member of a group that was taken or filtered, if none of its tokens is over the
        bound in the next batch."""
        group = self.buffer.live[episode.group]
        is_late = (group.step >= 0 or group.filtered) and episode.member not in group.baseline
        return is_late and episode.oldest > step - self.buffer.config.max_staleness

    def _worth_training(
        self, ready_episodes: Sequence[EpisodeRecord], new_groups: set[int], ranks: int
    ) -> bool:
        """The trainer waits, so it is given what is ready, if that is a full micro-batch for each rank; or
        MIN_SHARE_OF_GROUPS of the batch's, new ones, with MIN_FILL of those tokens. A smaller one would be
        mostly costs that do not depend on its tokens (gathering weights, launching kernels).

        Of 8 groups of 1,000 tokens each, with micro_batch_tokens 8192: 3 ready ones are trained at once, as
        3,000 > 8192 * MIN_FILL; with two ranks 5, as each gets half of them.
        """
        many_groups = len(new_groups) >= MIN_GROUP_FRACTION * self.buffer.config.groups_per_batch
        min_tokens = (MIN_TOKEN_FRACTION if many_groups else 1) * self.micro_batch_tokens * ranks
        return self._count_tokens(ready_episodes) >= min_tokens

    def _count_tokens(self, episodes: Sequence[EpisodeRecord]) -> int:
        """Estimate what ranks compute: the prompt of a group once, where its members share it."""
        tokens = sum(episode.tokens for episode in episodes)
        if self.packing == "tree":
            prompt_tokens = {episode.group: episode.stats.prompt for episode in episodes}
            tokens += sum(prompt_tokens.values()) - sum(episode.stats.prompt for episode in episodes)
        return tokens

    def _close_batch(self, batch: Batch) -> list[str] | None:
        """Nothing more will be added. An empty batch is not closed: it would be a step without data."""
        if not batch.planned:
            return None

        batch.closed = True
        self.buffer.closed_step = batch.step
        self._changed_steps.add(batch.step)
        return []

    def _is_last_batch(self, batch: Batch, new_groups: set[int]) -> bool:
        """The data is over, and nothing but these groups can become ready: late members, too, are waited for,
        or each would be a batch. One that has begun is then trained short; another only with `flush`."""
        tally = self.buffer.tally
        unfinished_groups = tally.groups_by_state[State.PENDING] | tally.groups_by_state[State.RUNNING]
        return (
            (self.flush_at_end or bool(batch.planned))
            and self.buffer.prompts.over
            and not unfinished_groups
            and tally.untaken_groups <= new_groups
        )

    def drop_remainder(self) -> list[EpisodeRecord]:
        """The data is over: give up the groups that cannot fill a batch any more. Returns those running."""
        has_begun = bool(self.batches.get(self.committed, Batch(self.committed)).planned)
        if has_begun or len(self.buffer.tally.untaken_groups) >= self.buffer.config.groups_per_batch:
            return []
        return self.buffer.drop_all(DropReason.END_OF_DATA)

    @property
    def _refill_limit_reached(self) -> bool:
        """`max_refill` is reached: so many groups were filtered that the batch is trained short."""
        config = self.buffer.config
        return self.buffer.refills >= config.max_refill * config.groups_per_batch

    @property
    def committed(self) -> int:
        """Return the number of committed batches."""
        return self.buffer.committed

    @property
    def over(self) -> bool:
        """The data is exhausted and nothing is left that could be trained."""
        return self.buffer.prompts.over and not self.buffer.live

    # -- what may be taken ---------------------------------------------------------------------------

    def _collect_ready(
        self, batch: Batch, slots: GroupSlots, token_limit: float
    ) -> tuple[list[EpisodeRecord], set[int]]:
        """Ready trajectories that may enter the batch now, oldest group first, up to so many tokens; and
        their new groups, which take their `places`."""
        ready_episodes: list[EpisodeRecord] = []
        new_groups: set[int] = set()

        for group in [
            self.buffer.live[number] for number in sorted(self.buffer.tally.groups_by_state[State.READY])
        ]:
            usable_members = self._usable_members(group, batch.step)
            if not usable_members:
                continue

            if group.step < 0 and not group.filtered:  # late members need no room
                oldest_version = oldest_version_of(self.buffer, group)
                if not slots.may_take(oldest_version):
                    continue
                slots.take_slot(oldest_version)
                new_groups.add(group.id)

            ready_episodes += usable_members
            token_limit -= self._count_tokens(usable_members)
            if token_limit <= 0:
                break

        return ready_episodes, new_groups

    def _usable_members(self, group: GroupRecord, step: int) -> list[EpisodeRecord]:
        """The ready members of a group; under on_stale=drop the stale ones are dropped here."""
        ready_members = [
            episode for episode in self.buffer.trainable_members(group) if episode.state is State.READY
        ]
        if self.buffer.config.on_stale != "drop":
            return ready_members

        min_version = step - self.buffer.config.max_staleness
        for episode in [episode for episode in ready_members if 0 <= episode.oldest < min_version]:
            ready_members.remove(episode)
            self.buffer.drop_episode(episode, DropReason.STALE)

        return ready_members

    # -- commit, rollback, retention -----------------------------------------------------------------

    def commit(self, step: int, trained_uids: Collection[str]) -> None:
        """Batch number `step` (1-based) was applied, perhaps again by a restarted trainer. What it has not
        trained of the plan, as its payload could not be read, is dropped by name. ProtocolError when that is
        more than the plan goes on without, or when others were trained."""
        batch = self.batches[step - 1]
        if mismatched_uids := set(trained_uids).symmetric_difference(batch.uids) - batch.lost:
            raise ProtocolError(
                f"commit of step {step} does not fit its plan: {' '.join(sorted(mismatched_uids))}"
            )

        if batch.lost:
            batch.lost.difference_update(trained_uids)
            self._changed_steps.add(batch.step)

        self.buffer.mark_trained(
            [
                self.planned_episodes[uid]
                for uid in batch.uids
                if self.planned_episodes[uid].state is State.TAKEN
            ]
        )
        for uid in batch.lost:
            self.buffer.drop_corrupt(self.planned_episodes[uid])

        if step > self.committed:
            self.buffer.note_commit(step)

    def leave_out_batch(self, reason: DropReason) -> list[EpisodeRecord]:
        """Drop what the batch under way has taken, and the rest of its groups, which could be a part of no
        other; the step gets another batch. Returns what was running."""
        step = self.committed
        for uid in self.batches[step].planned:
            self.buffer.drop_episode(self.planned_episodes[uid], reason)

        taken_groups = [
            self.buffer.live[number] for number in self.buffer.tally.groups_by_step[step]
        ]  # of late members
        running_episodes = [
            episode for group in taken_groups for episode in self.buffer.drop_group(group, reason)
        ]

        self._forget_plans([step])
        self.batches[step] = Batch(step)  # written over the plan in the store
        self._changed_steps.add(step)
        self.buffer.closed_step = step - 1

        return running_episodes

    def mark_lost(self, step: int, uid: str) -> None:
        """The payload of a planned trajectory cannot be read: the plan goes on without it. A rank may hold it
        already, though, and the answer have been another coordinator's: the commit tells."""
        self.batches[step].lost.add(uid)
        self._changed_steps.add(step)

    def skip_to(self, step: int) -> None:
        """Batches up to `step` were committed, as others know. Their plans are not needed any more, and what
        is still taken by them was lost."""
        skipped_steps = [number for number in self.batches if self.committed <= number < step]
        for episode in [
            self.planned_episodes[uid] for number in skipped_steps for uid in self.batches[number].planned
        ]:
            if episode.state is State.TAKEN:
                self.buffer.drop_corrupt(episode)

        self._forget_plans(skipped_steps)
        self.buffer.note_commit(step)

    def retain(self, step: int) -> list[str]:
        """A checkpoint covers the first `step` batches: forget their plans. Returns their uids."""
        return self._forget_plans(list(takewhile(lambda number: number < step, self.batches)))

    def _forget_plans(self, steps: list[int]) -> list[str]:
        forgotten_batches = [self.batches.pop(number) for number in steps]
        self._changed_steps -= set(steps)
        forgotten_episodes = [
            self.planned_episodes.pop(uid, None) for batch in forgotten_batches for uid in batch.planned
        ]

        for group in {episode.group for episode in forgotten_episodes if episode is not None}:
            if not any(
                f"{group}.{member}" in self.planned_episodes for member in range(self.buffer.group_size)
            ):
                self.baselines.pop(group, None)

        return [uid for batch in forgotten_batches for uid in batch.uids]
