"""The replay buffer: admission of groups, states of their episodes, and settlement.

A group is admitted (`admit_group`), and its episodes are assigned to workers, where they land or fail. When
all have ended, or the deadline has passed, the group settles: its members become ready, or are filtered or
dropped. Batches (batches.py) take ready members and commit them.

The buffer has no sockets, no clock (`now` is passed in) and no payloads. The coordinator stores
`pop_changes()` before any message about a change is sent. The rules are in docs/background/staleness.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from asyncrl.buffer.lifetimes import Deadlines, Lifetimes
from asyncrl.buffer.prompts import ComparedParts, Prompts, all_equal, solved
from asyncrl.buffer.records import (
    FINAL_STATES,
    IN_FLIGHT,
    EpisodeAccount,
    EpisodeRecord,
    GroupRecord,
    State,
    Tally,
)
from asyncrl.config import BufferConfig
from asyncrl.types import NO_STEP, DropReason, EpisodeResult, EpisodeStats, FailReason, FilterReason

USABLE = "usable"  # a possible outcome of a group, besides State.FILTERED and State.DROPPED


def running_attempt(episodes: Mapping[str, EpisodeRecord], uid: str, attempt: int) -> EpisodeRecord | None:
    """Return the running episode of an attempt, or None for an outdated attempt, which is to be fenced."""
    episode = episodes.get(uid)
    if episode is None or episode.attempt != attempt or episode.state is not State.RUNNING:
        return None
    return episode


class ReplayBuffer:
    """All groups with a member that is not over, in order of admission, and totals of groups that left.

    Args:
        config: limits and policies.
        prompts: order of the samples.
        total_groups: groups that the run will train in all; admission exceeds them only by `spare_groups`.
        retries: new attempts of an episode whose failure was not the policy's.
        group_bytes: bytes of the largest possible payload of a group.
        greedy: each group has a further member, sampled at temperature 0, for the baseline alone.
        compared: parts of a result that must be equal for a group to count as zero-variance.
        publish_every: engines get the weights of every k-th step.
    """

    def __init__(
        self,
        config: BufferConfig,
        prompts: Prompts,
        total_groups: int,
        retries: int,
        group_bytes: int,
        greedy: bool = False,
        compared: ComparedParts = ComparedParts(),
        publish_every: int = 1,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.total_groups = total_groups
        self.retries = retries
        self.greedy = greedy
        self.compared = compared

        holds_stale = config.on_stale == "hold"
        # A turn may start on weights that are at most this many steps old. With on_stale=hold every version
        # up to max_staleness will be trained.
        self.max_start_staleness = (
            config.max_staleness if holds_stale else max(config.usual_staleness, publish_every - 1)
        )

        self.group_size = config.episodes_per_group + greedy
        self._max_groups_in_memory = max(1, config.max_bytes // max(1, group_bytes))
        self.live_limit = int((1 + config.target) * config.groups_per_batch)  # moved by flow control
        self.spare_groups = 0  # set by flow control, so that no run ends with a wait for its slowest groups

        self._reset()

    def _reset(self) -> None:
        """Set all fields that groups, episodes and batches change to the state of a new run."""
        has_deadlines = self.config.group_policy == "partial" and not self.greedy
        self.deadlines = Deadlines(self.config.group_deadline if has_deadlines else math.inf)
        self.waiting_tokens = Lifetimes(4096)  # from the end of a turn until a batch may take the episode

        # Groups with a member that is not over. `has_room` counts fewer groups.
        self.live_groups: dict[int, GroupRecord] = {}
        self.episodes: dict[str, EpisodeRecord] = {}
        self.tally = Tally()
        # Cached values of staleness.oldest_version_of by group, until a member changes.
        self.oldest_versions: dict[int, int] = {}

        self.next_group = 0
        self.committed = 0  # number of committed batches
        self.closed_step = 0  # newest step whose batch is closed; 0: none
        self.departed_counts: Counter[State] = Counter()  # episodes that have left memory, by state
        self.reasons: Counter[str] = Counter()
        self.untrained_groups = 0  # groups in a row that left untrained
        self.untrained_reason = ""  # why the last of these groups was not trained
        self.settled_counts: Counter[str] = Counter()  # groups by outcome, of this process
        self.refills = 0  # groups filtered since the last batch was committed
        self.abandoned_tokens = 0  # model tokens of durable turns that were given up

        self._changed_episodes: dict[str, EpisodeRecord] = {}
        self._moved_episodes: dict[str, EpisodeRecord] = {}  # episodes whose state has changed
        self._changed_groups: dict[int, GroupRecord] = {}

    @property
    def current_step(self) -> int:
        """The step under way, which trains the batch after the committed batches."""
        return self.committed + 1

    # -- persistence ---------------------------------------------------------------------------------

    def pop_changes(self) -> tuple[list[GroupRecord], list[EpisodeRecord], list[EpisodeRecord]]:
        """Return the records that changed since the last call, to be written in one transaction.

        These are groups, episodes, and episodes of which only state, reason and step have changed.
        """
        changed_groups = list(self._changed_groups.values())
        changed_episodes = list(self._changed_episodes.values())
        moved_episodes = [
            episode for uid, episode in self._moved_episodes.items() if uid not in self._changed_episodes
        ]

        self._changed_groups = {}
        self._changed_episodes = {}
        self._moved_episodes = {}

        return changed_groups, changed_episodes, moved_episodes

    def find_unwritten(self, uid: str) -> EpisodeRecord | None:
        """Return an episode that is in memory, or has left memory since the last `pop_changes`."""
        return self.episodes.get(uid) or self._changed_episodes.get(uid) or self._moved_episodes.get(uid)

    def mark_changed(self, episode: EpisodeRecord) -> None:
        """Mark an episode of which more than state, reason and step has changed."""
        self._changed_episodes[episode.uid] = episode
        self.oldest_versions.pop(episode.group, None)

    def restore_groups(
        self,
        groups: Iterable[GroupRecord],
        episodes: Iterable[EpisodeRecord],
        departed_counts: dict[State, int],
        now: float,
    ) -> None:
        """Take over live groups and their episodes from a store, and the counts of episodes that have left.

        All state before is forgotten, also the totals, which the caller sets afterwards.
        """
        self._reset()

        self.live_groups = {group.id: group for group in sorted(groups, key=lambda group: group.id)}
        self.episodes = {episode.uid: episode for episode in episodes}
        self.departed_counts = Counter(departed_counts)

        for group in self.live_groups.values():
            self.deadlines.restore_group(group, now)
            self.tally.add_group(group, [self.episodes[uid] for uid in group.members])

    # -- admission -----------------------------------------------------------------------------------

    def can_admit(self, free_slots: int, total_slots: int) -> bool:
        """Return True if a whole group may be admitted (rule 1): there is room, and members find slots."""
        return self.has_room and free_slots >= max(1, min(self.group_size, total_slots))

    @property
    def has_room(self) -> bool:
        """True if a further group may be live. A group of which only late members are left does not count."""
        return (
            self.tally.count_live(self.committed) + 1 <= self.max_live_groups
            and self.missing_groups + self.spare_groups > 0
            and self.closed_step * self.config.groups_per_batch < self.total_groups
            and not self.prompts.over
            and self.prompts.draw_sample(self.prompts.position) >= 0
        )

    @property
    def missing_groups(self) -> int:
        """Number of groups to be trained that are neither live nor in a committed batch."""
        committed_groups = self.committed * self.config.groups_per_batch
        return self.total_groups - committed_groups - self.tally.count_live(self.committed)

    @property
    def max_live_groups(self) -> int:
        """Groups that may be live: as many as flow control permits, but no more than fit into max_bytes."""
        return min(self.live_limit, self._max_groups_in_memory)

    def admit_group(self, now: float) -> GroupRecord:
        """Issue the next group, whose episodes become pending."""
        group_id = self.next_group
        position = self.prompts.position
        member_uids = [f"{group_id}.{member}" for member in range(self.group_size)]
        sample = self.prompts.draw_sample(position)
        patience = self.deadlines.patience(now)
        group = GroupRecord(group_id, sample, self.current_step, member_uids, patience, position=position)

        self.live_groups[group_id] = self._changed_groups[group_id] = group
        for member, uid in enumerate(member_uids):
            greedy = member == self.config.episodes_per_group
            self.episodes[uid] = EpisodeRecord(uid, group_id, member, greedy=greedy)
            self.mark_changed(self.episodes[uid])

        self.tally.add_group(group, [self.episodes[uid] for uid in member_uids])
        self.next_group = group_id + 1
        self.prompts.cursor = position + 1

        return group

    # -- running -------------------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """Number of episodes that are to be assigned."""
        return self.tally.state_counts[State.PENDING]

    def assign(
        self, episode: EpisodeRecord, worker: str, sequence_number: int, min_version: int, now: float
    ) -> None:
        episode.worker = worker
        episode.assign_seq = sequence_number
        episode.min_version = min_version
        self.mark_changed(episode)
        self.set_state(episode, State.RUNNING)

        group = self.live_groups[episode.group]
        if math.isnan(group.started):
            self.deadlines.start_group(group, now)
            self._changed_groups[group.id] = group

    def finish_episode(
        self, episode: EpisodeRecord, result: EpisodeResult, stats: EpisodeStats, now: float
    ) -> None:
        """Record an episode that landed. The episode's group may settle.

        In a group that has settled, this late member is ready at once, or filtered if its siblings have
        earned the same.
        """
        group = self.live_groups[episode.group]
        self._settle_if_due(group, now)  # a deadline that passed since the last pass counts first
        is_late = group.settled

        episode.result = result
        episode.stats = stats
        self.mark_changed(episode)
        self.set_state(episode, State.LANDED)

        if not is_late and now >= group.deadline:
            group.baseline += (episode.member,)
            self._changed_groups[group.id] = group
        self._settle_if_due(group, now)

        if is_late:
            siblings = [self.episodes[group.members[member]] for member in group.late_siblings]
            if self._earned_equal([episode, *siblings]):
                self.set_state(episode, State.FILTERED, FilterReason.ZERO_VARIANCE)
                self._forget_if_over(group)
            else:
                self._mark_ready(episode, now)

    def fail_attempt(self, episode: EpisodeRecord, reason: FailReason, now: float) -> list[EpisodeRecord]:
        """Issue an episode again after a failed attempt, or give the episode up.

        Returns the running members that are dropped together with the episode.
        """
        sampled_before = episode.sampled
        will_retry = episode.prepare_retry(reason, self.retries)
        self.abandoned_tokens += sampled_before - episode.sampled
        self.mark_changed(episode)

        if not will_retry:
            group = self.live_groups[episode.group]
            self.set_state(episode, State.FAILED, reason)
            running_members = self._settle_if_due(group, now)
            self._forget_if_over(group)
            return running_members

        if not episode.turns and not episode.open:
            self.waiting_tokens.forget_lives(episode.uid)
        self.set_state(episode, State.PENDING)
        return []

    # -- groups --------------------------------------------------------------------------------------

    def settle_overdue(self, now: float) -> None:
        """Settle the groups whose deadline has passed, if enough of their members have landed."""
        for group_id in self.deadlines.pop_passed(now):
            if group_id in self.live_groups and not self.live_groups[group_id].settled:
                self._settle_if_due(self.live_groups[group_id], now)

    def trainable_members(self, group: GroupRecord) -> list[EpisodeRecord]:
        """Return the members that may be trained: all but the greedy episode."""
        return [self.episodes[uid] for uid in group.members[: self.config.episodes_per_group]]

    def _settle_if_due(self, group: GroupRecord, now: float) -> list[EpisodeRecord]:
        """Settle a group once all members have ended, or enough have landed by the deadline.

        The landed members are the baseline from then on, and become ready. If they all earned the same, they
        are filtered. If too few landed, or the greedy episode failed, the group is dropped. After the end of
        the last member, even of a settled group, the group's duration and whether its sample retires are
        known.

        Returns the running members that are dropped.
        """
        members = self.trainable_members(group)
        greedy_episode = self.episodes[group.members[-1]] if self.greedy else None
        landed_members = [member for member in members if member.state is State.LANDED]
        min_group = self.config.min_group

        all_ended = all(
            self.episodes[uid].state not in (State.PENDING, State.RUNNING) for uid in group.members
        )
        if all_ended:
            self.deadlines.lifetimes.end_lives(group.id, now)
            results = [
                member.result for member in members if member.state not in (State.FAILED, State.DROPPED)
            ]
            if len(results) >= min_group and solved(results, self.config.retire_pass_rate):
                group.retires = True
                self.prompts.retired_samples.add(group.sample)
                self._changed_groups[group.id] = group

        overdue = now >= group.deadline
        enough_landed = len(landed_members) >= min_group
        greedy_failed = greedy_episode is not None and greedy_episode.state is State.FAILED
        if group.settled or not (all_ended or greedy_failed or (overdue and enough_landed)):
            return []

        # Members that landed after the deadline are in the baseline already, and stay behind the others.
        in_time = tuple(member.member for member in landed_members if member.member not in group.baseline)
        group.settled = True
        group.first_only = overdue and len(in_time) < min_group
        group.baseline = in_time + group.baseline
        self._changed_groups[group.id] = group

        if greedy_failed or not enough_landed:
            self.settled_counts[State.DROPPED] += 1
            return self.drop_group(group, DropReason.GROUP_SHORT)

        if self._earned_equal(landed_members, greedy_episode):
            self.settled_counts[State.FILTERED] += 1
            self.refills += 1
            self.tally.mark_filtered(group)
            for episode in landed_members if greedy_episode is None else [*landed_members, greedy_episode]:
                self.set_state(episode, State.FILTERED, FilterReason.ZERO_VARIANCE)
            self._forget_if_over(group)
            return []

        self.settled_counts[USABLE] += 1
        for episode in landed_members:
            self._mark_ready(episode, now)
        if greedy_episode is not None:
            self.set_state(greedy_episode, State.FILTERED, FilterReason.BASELINE)
        return []

    def _mark_ready(self, episode: EpisodeRecord, now: float) -> None:
        self.waiting_tokens.end_lives(episode.uid, now)
        self.set_state(episode, State.READY, reason="")

    def _earned_equal(
        self, compared_episodes: list[EpisodeRecord], greedy_episode: EpisodeRecord | None = None
    ) -> bool:
        """Return True if these episodes are to be filtered, as a comparison teaches nothing."""
        results = [episode.result for episode in compared_episodes]
        greedy_reward = greedy_episode.result.reward if greedy_episode else None
        return self.config.filter_zero_variance and all_equal(results, greedy_reward, self.compared)

    def drop_episode(self, episode: EpisodeRecord, reason: DropReason) -> None:
        """Give up a ready, landed or not yet running episode."""
        self.set_state(episode, State.DROPPED, reason)
        self._forget_if_over(self.live_groups[episode.group])

    def drop_corrupt(self, episode: EpisodeRecord) -> None:
        """Drop a planned episode that was not trained, as its turns or images could not be read.

        The episode may have left memory as trained, if a restarted trainer repeats steps.
        """
        if episode.state is State.DROPPED:
            return
        if episode.uid in self.episodes:
            self.drop_episode(episode, DropReason.CORRUPT)
            return
        self.correct_state(episode, State.DROPPED, DropReason.CORRUPT)

    def correct_state(self, episode: EpisodeRecord, state: State, reason: str = "") -> None:
        """Correct the final state of an episode that has left memory."""
        self.departed_counts.subtract([episode.state])
        self.departed_counts.update([state])
        episode.state = state
        episode.reason = reason

        if reason:
            self.reasons[f"{state}/{reason}"] += 1
        self._moved_episodes[episode.uid] = episode

    def drop_all(self, reason: DropReason) -> list[EpisodeRecord]:
        """Drop all untaken episodes, at the end of the run. Return the episodes that were running."""
        return [
            episode for group in list(self.live_groups.values()) for episode in self.drop_group(group, reason)
        ]

    def drop_group(self, group: GroupRecord, reason: DropReason) -> list[EpisodeRecord]:
        """Drop the members of a group that are not taken. Return the members that were running."""
        members = [self.episodes[uid] for uid in group.members]
        running_members = [episode for episode in members if episode.state is State.RUNNING]

        for episode in members:
            if episode.state in (*IN_FLIGHT, State.READY):
                self.drop_episode(episode, reason)

        return running_members

    # -- taking (used by batches.py) -----------------------------------------------------------------

    def take_episode(self, episode: EpisodeRecord, step: int) -> None:
        group = self.live_groups[episode.group]
        self.untrained_groups = 0
        if group.step == NO_STEP:
            group.settled = True  # only a group from a checkpoint's manifest is not settled yet
            self.tally.mark_taken(group, step)
            self._changed_groups[group.id] = group

        episode.step = step
        self.set_state(episode, State.TAKEN, reason="")

    def mark_trained(self, episodes: Sequence[EpisodeRecord]) -> None:
        for episode in episodes:
            self.set_state(episode, State.TRAINED, reason="")

        for group_id in {episode.group for episode in episodes}:
            self._forget_if_over(self.live_groups[group_id])

    def note_commit(self, step: int) -> None:
        """Note that all steps up to `step` are committed."""
        self.committed = step
        self.refills = 0

    def set_state(self, episode: EpisodeRecord, state: State, reason: str | None = None) -> None:
        """Set the state of a live episode. All counts follow, as no other method sets this state.

        Args:
            reason: why the episode ended. None leaves the reason unchanged: until an episode is ready, its
                record tells why the last attempt failed.
        """
        if episode.state in (State.PENDING, State.RUNNING) and state in (State.FAILED, State.DROPPED):
            self.abandoned_tokens += episode.sampled

        self.tally.move_episode(episode, state)
        if reason is not None:
            episode.reason = reason
        if reason:
            self.reasons[f"{state}/{reason}"] += 1

        self._moved_episodes[episode.uid] = episode
        self.oldest_versions.pop(episode.group, None)
        if state in FINAL_STATES:
            self.waiting_tokens.forget_lives(episode.uid)

    def _forget_if_over(self, group: GroupRecord) -> None:
        """Forget a group when all its episodes are over. Its payloads stay in the store."""
        if group.id not in self.live_groups or not self.tally.is_over(group):
            return

        if group.step == NO_STEP:
            self.untrained_groups += 1
            self.untrained_reason = self.trainable_members(group)[-1].ending

        del self.live_groups[group.id]
        self.deadlines.lifetimes.forget_lives(group.id)  # a group dropped while running gives no duration
        self._changed_groups[group.id] = group  # written as over
        self.tally.remove_group(group)
        self.oldest_versions.pop(group.id, None)

        for uid in group.members:
            self.departed_counts[self.episodes.pop(uid).state] += 1

    # -- numbers -------------------------------------------------------------------------------------

    def state_counts(self) -> Counter[State]:
        """Count episodes by state, including episodes that have left memory."""
        return self.departed_counts + self.tally.state_counts

    def account(self) -> EpisodeAccount:
        """Return the account of all episodes. `issued` is counted from the data cursor alone."""
        return EpisodeAccount.from_counts(self.next_group * self.group_size, self.state_counts())
