"""Plan batches: which trajectories a step trains, in which order and in which parts.

A plan is stored before any rank sees it, and kept until a checkpoint covers it. A repeated request gets the
same plan, so a retry, or a step that a restarted trainer repeats, is a look-up.
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

# Largest part of a plan, in micro-batches per rank. Larger parts are cut better, but delay a stop.
MAX_MICRO_BATCHES_PER_PART = 4
# Smallest part that is trained at once although no micro-batch is full: this fraction of the batch's groups,
# with this fraction of micro_batch_tokens.
MIN_GROUP_FRACTION = MIN_TOKEN_FRACTION = 1 / 4


class Baseline(msgspec.Struct, frozen=True):
    """The baseline of a settled group: the rewards with which the reward of each member is compared.

    members: numbers within the group of the baseline's episodes.
    results: results of these episodes, in the same order.
    late: a member that lands late is compared with the first `late` results.
    issued: episodes that the group was issued with, whether they landed or not.
    greedy: reward of the group's greedy episode, if there is one.
    """

    members: tuple[int, ...]
    results: tuple[EpisodeResult, ...]
    late: int
    issued: int
    greedy: float | None = None

    @classmethod
    def of_group(cls, group: GroupRecord, episodes: Mapping[str, EpisodeRecord]) -> Baseline:
        """Compute the baseline of a settled group. Results are final, so a restart computes the same."""
        results = tuple(episodes[group.members[number]].result for number in group.baseline)
        last_member = episodes[group.members[-1]]
        issued = len(group.members) - last_member.greedy
        greedy = last_member.result.reward if last_member.greedy else None
        return cls(group.baseline, results, len(group.late_siblings), issued, greedy)

    def siblings(self, episode: EpisodeRecord) -> tuple[tuple[EpisodeResult, ...], int]:
        """Return the results that an episode is compared with, and the index of the episode's own result.

        The index is -1 for a late episode, whose result is not part of the baseline.
        """
        if episode.member in self.members:
            return self.results, self.members.index(episode.member)
        return self.results[: self.late], -1


class Batch(msgspec.Struct):
    """The plan of one optimizer batch, as stored.

    step: number of committed batches before this batch.
    micros: uids of each part. The ranks partition a part and cut their shares into micro-batches.
    groups: ids of the groups that count towards the batch.
    closed: no further part will be added.
    lost: episodes whose payload could not be read, unless a commit has reported them as trained. Lost
        episodes stay in `micros`, so that the partition of the other episodes does not change.
    ranks, budget: number of ranks and tokens of a micro-batch when the plan was last handed out.
    """

    step: int  # 0-based: number of committed batches before
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
        """Return the planned episodes without the lost ones."""
        return [uid for uid in self.planned if uid not in self.lost]

    @property
    def plan_hash(self) -> str:
        return hashlib.blake2b("\n".join(self.planned).encode(), digest_size=16).hexdigest()


class Batches:
    """Plans of the current batch and of all batches that no retained checkpoint covers.

    Args:
        buffer: source of the trajectories.
        micro_batch_tokens: tokens of one micro-batch on one rank, padding included.
        flush: train a short batch when the data has run out, instead of dropping the rest.
        packing: "padded": all sequences are padded to the longest. "tree": a group shares one prompt.
    """

    def __init__(
        self, buffer: ReplayBuffer, micro_batch_tokens: int, flush_at_end: bool, packing: Packing = "padded"
    ) -> None:
        self.buffer = buffer
        self.micro_batch_tokens = micro_batch_tokens
        self.flush_at_end = flush_at_end
        self.packing = packing
        self.by_step: dict[int, Batch] = {}  # plans by step, in order
        self.planned_episodes: dict[str, EpisodeRecord] = {}  # episodes of all plans, by uid
        self.baselines: dict[int, Baseline] = {}  # baselines of their groups, by group id
        self._changed_steps: set[int] = set()

    def pop_changes(self) -> list[Batch]:
        changed_batches = [self.by_step[step] for step in sorted(self._changed_steps)]
        self._changed_steps = set()
        return changed_batches

    def restore_plans(
        self,
        batches: Iterable[Batch],
        planned_episodes: Iterable[EpisodeRecord],
        baselines: Mapping[int, Baseline],
    ) -> None:
        """Replace all plans by the plans of a store. Episodes of the buffer stay the buffer's objects."""
        self._changed_steps = set()
        self.by_step = {batch.step: batch for batch in batches}
        self.planned_episodes = {e.uid: self.buffer.episodes.get(e.uid, e) for e in planned_episodes}
        self.baselines = dict(baselines)

        self.buffer.closed_step = max(
            (step for step, batch in self.by_step.items() if batch.closed), default=-1
        )

    def next_part(self, step: int, part_index: int, ranks: int, token_budget: int = 0) -> list[str] | None:
        """Return the uids of a part of the plan; [] if the batch is complete, None if the caller must wait.

        The caller refuses a `step` greater than `committed`.

        Args:
            ranks: number of ranks among which the part is partitioned.
            token_budget: tokens of a micro-batch; 0: `micro_batch_tokens`.
        """
        batch = self.by_step.get(step)
        if batch is None:
            batch = self.by_step[step] = Batch(step)

        if part_index < len(batch.micros):
            uids: list[str] | None = batch.micros[part_index]
        else:
            uids = [] if batch.closed else self._add_part(batch, ranks)

        token_budget = token_budget or self.micro_batch_tokens
        if uids and (batch.ranks, batch.budget) != (ranks, token_budget):
            batch.ranks = ranks
            batch.budget = token_budget
            self._changed_steps.add(step)

        return uids

    def outlook(self, step: int, part_index: int, ranks: int) -> Outlook:
        """Return the answer that `next_part` would give now, without changing the plan."""
        batch = self.by_step.get(step, Batch(step))
        if part_index < len(batch.micros) or batch.closed or self.over:
            return Outlook(ready=True, group_fraction=1.0, batch_complete=True)

        ready_episodes, new_groups, batch_full = self._select_ready(batch, ranks, math.inf)
        group_fraction = len(batch.groups | new_groups) / self.buffer.config.groups_per_batch
        return Outlook(
            bool(ready_episodes) or (batch_full and bool(batch.planned)), group_fraction, batch_full
        )

    def _add_part(self, batch: Batch, ranks: int) -> list[str] | None:
        """Add the ready trajectories as a part. If there are none, close the batch if it is full."""
        ready_episodes, _, batch_full = self._select_ready(
            batch, ranks, MAX_MICRO_BATCHES_PER_PART * self.micro_batch_tokens * ranks
        )
        if not ready_episodes:
            return self._close_batch(batch) if batch_full else None

        for episode in ready_episodes:
            self.buffer.take_episode(episode, batch.step)
            self.planned_episodes[episode.uid] = episode
            group = self.buffer.live_groups[episode.group]
            if group.id not in self.baselines:
                self.baselines[group.id] = Baseline.of_group(group, self.buffer.episodes)
            if group.step == batch.step and not group.filtered:  # a late member does not count its group
                batch.groups.add(group.id)

        batch.micros.append([episode.uid for episode in ready_episodes])
        self._changed_steps.add(batch.step)
        return batch.micros[-1]

    def _select_ready(
        self, batch: Batch, ranks: int, token_limit: float
    ) -> tuple[list[EpisodeRecord], set[int], bool]:
        """Select the trajectories of the next part, at most `token_limit` tokens.

        Nothing is selected until the trajectories are worth training or the batch is full. Late members that
        are not worth a part alone are left to the next batch, if there is one.

        Returns:
            the trajectories, their new groups, and whether the batch is full with these groups.
        """
        slots = upcoming_slots(self.buffer)
        ready_episodes, new_groups = self._collect_ready(batch, slots, token_limit)

        groups_per_batch = self.buffer.config.groups_per_batch
        batch_full = (
            len(batch.groups | new_groups) >= groups_per_batch
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

        if leave_to_next or not (worth_training or batch_full):
            ready_episodes = []
        return ready_episodes, new_groups, batch_full

    def _may_wait(self, episode: EpisodeRecord, step: int) -> bool:
        """Return True for a late member of a taken or filtered group that is not stale in the next batch."""
        group = self.buffer.live_groups[episode.group]
        is_late = (group.step >= 0 or group.filtered) and episode.member not in group.baseline
        return is_late and episode.oldest > step - self.buffer.config.max_staleness

    def _worth_training(
        self, ready_episodes: Sequence[EpisodeRecord], new_groups: set[int], ranks: int
    ) -> bool:
        """Return True if the ready trajectories should be trained now, without waiting for more.

        That holds for a full micro-batch per rank, and for MIN_TOKEN_FRACTION of these tokens if they come
        from MIN_GROUP_FRACTION of the batch's groups. The time of a smaller part would be mostly spent on
        gathering weights and launching kernels.

        Example: a batch of 8 groups of 1,000 tokens each, and micro_batch_tokens 8192. On one rank 3 ready
        groups are trained at once, as 3,000 > 8192 * MIN_TOKEN_FRACTION; on two ranks 5 groups.
        """
        many_groups = len(new_groups) >= MIN_GROUP_FRACTION * self.buffer.config.groups_per_batch
        min_tokens = (MIN_TOKEN_FRACTION if many_groups else 1) * self.micro_batch_tokens * ranks
        return self._count_tokens(ready_episodes) >= min_tokens

    def _count_tokens(self, episodes: Sequence[EpisodeRecord]) -> int:
        """Estimate the tokens that ranks compute. With tree packing a group's prompt is computed once."""
        tokens = sum(episode.tokens for episode in episodes)
        if self.packing == "tree":
            prompt_tokens = {episode.group: episode.stats.prompt for episode in episodes}
            tokens += sum(prompt_tokens.values()) - sum(episode.stats.prompt for episode in episodes)
        return tokens

    def _close_batch(self, batch: Batch) -> list[str] | None:
        """Close a batch. An empty batch stays open, as a step without data is impossible."""
        if not batch.planned:
            return None

        batch.closed = True
        self.buffer.closed_step = batch.step
        self._changed_steps.add(batch.step)
        return []

    def _is_last_batch(self, batch: Batch, new_groups: set[int]) -> bool:
        """Return True if the data has run out and no trajectory outside of `new_groups` can become ready.

        Late members are waited for, as each of them would become a batch otherwise. A batch that has begun is
        trained short; an empty batch is begun only with `flush_at_end`.
        """
        tally = self.buffer.tally
        unfinished_groups = tally.groups_by_state[State.PENDING] | tally.groups_by_state[State.RUNNING]
        return (
            (self.flush_at_end or bool(batch.planned))
            and self.buffer.prompts.over
            and not unfinished_groups
            and tally.untaken_groups <= new_groups
        )

    def drop_remainder(self) -> list[EpisodeRecord]:
        """Drop groups that cannot fill a batch, as the data has run out. Return their running members."""
        has_begun = bool(self.by_step.get(self.committed, Batch(self.committed)).planned)
        if has_begun or len(self.buffer.tally.untaken_groups) >= self.buffer.config.groups_per_batch:
            return []
        return self.buffer.drop_all(DropReason.END_OF_DATA)

    @property
    def _refill_limit_reached(self) -> bool:
        """True if `max_refill` is reached: so many groups were filtered that the batch is trained short."""
        config = self.buffer.config
        return self.buffer.refills >= config.max_refill * config.groups_per_batch

    @property
    def committed(self) -> int:
        """Return the number of committed batches."""
        return self.buffer.committed

    @property
    def over(self) -> bool:
        """True if the data has run out and no trajectory is left to train."""
        return self.buffer.prompts.over and not self.buffer.live_groups

    # -- selection -----------------------------------------------------------------------------------

    def _collect_ready(
        self, batch: Batch, slots: GroupSlots, token_limit: float
    ) -> tuple[list[EpisodeRecord], set[int]]:
        """Collect ready trajectories that may enter the batch, oldest group first, until `token_limit`.

        Each new group takes one of the `slots`. Returns the trajectories and the new groups.
        """
        ready_episodes: list[EpisodeRecord] = []
        new_groups: set[int] = set()

        for group in [
            self.buffer.live_groups[number]
            for number in sorted(self.buffer.tally.groups_by_state[State.READY])
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
        """Return the ready members of a group. With on_stale=drop, stale members are dropped here."""
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

    def commit_batch(self, step: int, trained_uids: Collection[str]) -> None:
        """Record that batch number `step` (1-based) was applied, perhaps again by a restarted trainer.

        Planned episodes that were not trained, as their payload could not be read, are dropped as corrupt.

        Raises:
            ProtocolError: `trained_uids` is not the plan without its lost episodes.
        """
        batch = self.by_step[step - 1]
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
        """Drop the current batch and begin another batch for the same step.

        The remaining members of its groups are dropped, too, as no other batch could take them. Returns the
        members that were running.
        """
        step = self.committed
        for uid in self.by_step[step].planned:
            self.buffer.drop_episode(self.planned_episodes[uid], reason)

        # Groups are still live if late members are left.
        taken_groups = [self.buffer.live_groups[number] for number in self.buffer.tally.groups_by_step[step]]
        running_episodes = [
            episode for group in taken_groups for episode in self.buffer.drop_group(group, reason)
        ]

        self._forget_plans([step])
        self.by_step[step] = Batch(step)  # written over the plan in the store
        self._changed_steps.add(step)
        self.buffer.closed_step = step - 1

        return running_episodes

    def mark_lost(self, step: int, uid: str) -> None:
        """Note that the payload of a planned trajectory cannot be read, so that the plan goes on without it.

        A rank may have received the payload from an earlier coordinator. The commit tells whether it was
        trained.
        """
        self.by_step[step].lost.add(uid)
        self._changed_steps.add(step)

    def skip_to(self, step: int) -> None:
        """Count batches up to `step` as committed, as checkpoints show, although this store did not know.

        Their plans are forgotten. Episodes that are still taken by these plans are dropped as corrupt.
        """
        skipped_steps = [number for number in self.by_step if self.committed <= number < step]
        for episode in [
            self.planned_episodes[uid] for number in skipped_steps for uid in self.by_step[number].planned
        ]:
            if episode.state is State.TAKEN:
                self.buffer.drop_corrupt(episode)

        self._forget_plans(skipped_steps)
        self.buffer.note_commit(step)

    def forget_covered_plans(self, step: int) -> list[str]:
        """Forget the plans of the first `step` batches, which a checkpoint covers. Return their uids."""
        return self._forget_plans(list(takewhile(lambda number: number < step, self.by_step)))

    def _forget_plans(self, steps: list[int]) -> list[str]:
        forgotten_batches = [self.by_step.pop(number) for number in steps]
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
