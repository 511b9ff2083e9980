"""Plans batches: which trajectories a step trains, in which order and in which parts.

A plan is stored before any rank sees it, and kept until a checkpoint covers it. A repeated request gets the
same plan, so a retry, or a step that a restarted trainer repeats, is a look-up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile

import msgspec

from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.buffer.shifts import Outlook
from asyncrl.buffer.staleness import oldest_version_of, upcoming_slots
from asyncrl.config import Packing
from asyncrl.errors import ProtocolError
from asyncrl.types import NO_STEP, DropReason, EpisodeResult, start_version

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

    step: the step that trains this batch, from 1 on.
    parts: uids of each part. The ranks partition each part, and cut their shares into micro-batches.
    groups: ids of the groups that count towards the batch.
    closed: no further part will be added.
    lost: episodes whose turns could not be read; from the commit on, those that the commit names as lost.
        Lost episodes stay in `parts`, so that the partition of the other episodes does not change.
    ranks, budget: number of ranks and tokens of a micro-batch when the plan was last handed out.
    """

    step: int
    parts: list[list[str]] = []
    groups: set[int] = set()
    closed: bool = False
    lost: set[str] = set()
    ranks: int = 1
    budget: int = 0

    @property
    def planned(self) -> list[str]:
        return [uid for part in self.parts for uid in part]

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
        flush_at_end: train a short batch when the data has run out, instead of dropping the rest.
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
            (step for step, batch in self.by_step.items() if batch.closed), default=0
        )

    def next_part(self, step: int, part_index: int, ranks: int, token_budget: int = 0) -> list[str] | None:
        """Return the uids of a part of the plan; [] if the batch is complete, None if the caller must wait.

        The caller refuses a `step` later than the buffer's `current_step`.

        Args:
            ranks: number of ranks among which the part is partitioned.
            token_budget: tokens of a micro-batch; 0: `micro_batch_tokens`.
        """
        batch = self.by_step.setdefault(step, Batch(step))

        if part_index < len(batch.parts):  # a retry, or a step that a restarted trainer repeats
            uids = batch.parts[part_index]
        elif batch.closed:
            return []
        else:
            token_limit = MAX_MICRO_BATCHES_PER_PART * self.micro_batch_tokens * ranks
            episodes, _, batch_full = self._select_ready(batch, ranks, token_limit)

            if not episodes:
                if not batch_full or not batch.planned:  # a step without data is impossible
                    return None
                batch.closed = True
                self.buffer.closed_step = step
                self._changed_steps.add(step)
                return []

            for episode in episodes:
                self.buffer.take_episode(episode, step)
                self.planned_episodes[episode.uid] = episode
                group = self.buffer.live_groups[episode.group]
                if group.id not in self.baselines:
                    self.baselines[group.id] = Baseline.of_group(group, self.buffer.episodes)
                if group.step == step and not group.filtered:  # a late member does not count its group
                    batch.groups.add(group.id)

            uids = [episode.uid for episode in episodes]
            batch.parts.append(uids)
            self._changed_steps.add(step)

        token_budget = token_budget or self.micro_batch_tokens
        if (batch.ranks, batch.budget) != (ranks, token_budget):
            batch.ranks = ranks
            batch.budget = token_budget
            self._changed_steps.add(step)

        return uids

    def outlook(self, step: int, part_index: int, ranks: int) -> Outlook:
        """Return the answer that `next_part` would give now, without changing the plan."""
        batch = self.by_step.get(step, Batch(step))
        if part_index < len(batch.parts) or batch.closed or self.over:
            return Outlook(ready=True, group_fraction=1.0, batch_complete=True)

        episodes, new_groups, batch_full = self._select_ready(batch, ranks, math.inf)
        has_answer = bool(episodes) or (batch_full and bool(batch.planned))
        group_fraction = len(batch.groups | new_groups) / self.buffer.config.groups_per_batch
        return Outlook(ready=has_answer, group_fraction=group_fraction, batch_complete=batch_full)

    def _select_ready(
        self, batch: Batch, ranks: int, token_limit: float
    ) -> tuple[list[EpisodeRecord], set[int], bool]:
        """Select the trajectories that are trained next; none if the trainer should wait for more.

        Ready trajectories are trained once they fill a micro-batch on every rank. MIN_TOKEN_FRACTION of these
        tokens is enough if the trajectories come from MIN_GROUP_FRACTION of the batch's groups; any number is
        enough if nothing more can enter the batch. The time of a smaller part would be mostly spent on
        gathering weights and launching kernels.

        Example: a batch of 8 groups of 1,000 tokens each, and micro_batch_tokens 8192. On one rank 3 ready
        groups are trained at once, as 3,000 > 8192 * MIN_TOKEN_FRACTION; on two ranks 5 groups.

        Args:
            token_limit: no further group is selected once the selected groups have this many tokens.

        Returns:
            the trajectories, the untaken groups among all candidates, and whether these fill the batch.
        """
        buffer = self.buffer
        config = buffer.config
        oldest_trainable = start_version(batch.step) - config.max_staleness  # tokens before it are stale

        # The candidates are ready members, oldest groups first. Each new group takes a slot of the batch.
        # With on_stale=hold, slots are kept free for groups that would be stale in a later batch.
        slots = upcoming_slots(buffer)
        candidates: list[EpisodeRecord] = []
        new_groups: set[int] = set()
        tokens = 0  # estimate of the tokens that ranks compute

        for group_id in sorted(buffer.tally.groups_by_state[State.READY]):
            group = buffer.live_groups[group_id]
            members = buffer.trainable_members(group)
            for member in members:
                is_stale = 0 <= member.oldest < oldest_trainable
                if is_stale and member.state is State.READY and config.on_stale == "drop":
                    buffer.drop_episode(member, DropReason.STALE)
            if not (ready_members := [member for member in members if member.state is State.READY]):
                continue

            if group.step == NO_STEP and not group.filtered:  # late members need no slot
                oldest_version = oldest_version_of(buffer, group)
                if not slots.may_take(oldest_version):
                    continue
                slots.take_slot(oldest_version)
                new_groups.add(group.id)

            candidates += ready_members
            tokens += sum(member.tokens for member in ready_members)
            if self.packing == "tree":  # the prompt of a group is computed once
                tokens -= sum(member.stats.prompt for member in ready_members[:-1])
            if tokens >= token_limit:
                break

        # The batch is full when nothing more can enter. A short batch is trained if so many groups were
        # filtered that `max_refill` is reached, or at the end of the data; an empty batch is begun there only
        # with `flush_at_end`.
        tally = buffer.tally
        has_unfinished = bool(tally.groups_by_state[State.PENDING] or tally.groups_by_state[State.RUNNING])
        data_exhausted = buffer.prompts.over and not has_unfinished and tally.untaken_groups <= new_groups
        refill_limit_reached = buffer.refills >= config.max_refill * config.groups_per_batch
        batch_full = (
            len(batch.groups | new_groups) >= config.groups_per_batch
            or (data_exhausted and (self.flush_at_end or bool(batch.planned)))
            or (refill_limit_reached and slots.may_close)
        )

        # A full batch leaves a few late members to the next batch, if there is one and none will be stale.
        last_batch = buffer.prompts.over or batch.step >= buffer.total_groups // config.groups_per_batch
        may_join_next = not last_batch and all(
            member.group not in new_groups
            and member.member not in buffer.live_groups[member.group].baseline
            and member.oldest > oldest_trainable
            for member in candidates
        )
        many_groups = len(new_groups) >= MIN_GROUP_FRACTION * config.groups_per_batch
        min_tokens = (MIN_TOKEN_FRACTION if many_groups else 1) * self.micro_batch_tokens * ranks
        if tokens < min_tokens and (not batch_full or may_join_next):
            candidates = []
        return candidates, new_groups, batch_full

    def drop_remainder(self) -> list[EpisodeRecord]:
        """Drop groups that cannot fill a batch, as the data has run out. Return their running members."""
        batch = self.by_step.get(self.buffer.current_step)
        has_begun = batch is not None and bool(batch.planned)
        if has_begun or len(self.buffer.tally.untaken_groups) >= self.buffer.config.groups_per_batch:
            return []
        return self.buffer.drop_all(DropReason.END_OF_DATA)

    @property
    def committed(self) -> int:
        """Return the number of committed batches."""
        return self.buffer.committed

    @property
    def over(self) -> bool:
        """True if the data has run out and no trajectory is left to train."""
        return self.buffer.prompts.over and not self.buffer.live_groups

    # -- commit, rollback, retention -----------------------------------------------------------------

    def commit_batch(
        self, step: int, trained_uids: Collection[str], *, lost_uids: Collection[str] = ()
    ) -> None:
        """Record that the batch of `step` was applied, perhaps again by a restarted trainer.

        Args:
            lost_uids: episodes that were not trained, as their turns or images could not be read. They are
                dropped as corrupt.

        Raises:
            ProtocolError: `trained_uids` and `lost_uids` are not together the plan, each episode once.
                Nothing has changed.
        """
        batch = self.by_step[step]
        expected_trained = set(batch.planned).symmetric_difference(lost_uids)
        mismatched_uids = expected_trained.symmetric_difference(trained_uids)
        if mismatched_uids:
            raise ProtocolError(
                f"the commit for step {step} does not match the step's plan; these episodes differ: "
                f"{' '.join(sorted(mismatched_uids))}"
            )

        if batch.lost != set(lost_uids):
            batch.lost = set(lost_uids)
            self._changed_steps.add(batch.step)

        trained_episodes = [self.planned_episodes[uid] for uid in batch.uids]
        self.buffer.mark_trained([episode for episode in trained_episodes if episode.state is State.TAKEN])
        for uid in batch.lost:
            self.buffer.drop_corrupt(self.planned_episodes[uid])

        if step > self.committed:
            self.buffer.note_commit(step)

    def leave_out_batch(self, reason: DropReason) -> list[EpisodeRecord]:
        """Drop the current batch and begin another batch for the same step.

        The remaining members of its groups are dropped, too, as no other batch could take them. Returns the
        members that were running.
        """
        step = self.buffer.current_step
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
        self.buffer.closed_step = self.committed

        return running_episodes

    def mark_lost(self, step: int, uid: str) -> None:
        """Note that the turns of a planned trajectory cannot be read, so that the plan goes on without it.

        A rank may have received the payload from an earlier coordinator. The commit tells whether it was
        trained.
        """
        self.by_step[step].lost.add(uid)
        self._changed_steps.add(step)

    def skip_to(self, step: int) -> None:
        """Count all steps up to `step` as committed, as checkpoints show, although this store did not know.

        Their plans are forgotten. Episodes that are still taken by these plans are dropped as corrupt.
        """
        skipped_steps = [number for number in self.by_step if self.committed < number <= step]
        for number in skipped_steps:
            for uid in self.by_step[number].planned:
                if self.planned_episodes[uid].state is State.TAKEN:
                    self.buffer.drop_corrupt(self.planned_episodes[uid])

        self._forget_plans(skipped_steps)
        self.buffer.note_commit(step)

    def forget_covered_plans(self, step: int) -> list[str]:
        """Forget the plans of the steps up to `step`, which a checkpoint covers. Return their uids."""
        return self._forget_plans(list(takewhile(lambda number: number <= step, self.by_step)))

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
