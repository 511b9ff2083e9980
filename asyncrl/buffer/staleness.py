"""Staleness of tokens: the arithmetic by which no token older than max_staleness is trained.

The rules are in docs/background/staleness.md, the proofs in docs/dev/proofs.md.

V is the version that the step in training starts from (completed optimizer batches), s the version that
sampled a token, and lag = V - s. Versions of a branch that a rollback has left can be ahead of V; their
distance counts.

With `on_stale=hold` a group whose oldest token was sampled by version s may be trained until the step that
starts from version s + max_staleness, where the group is due. While at most as many groups are due by each
batch as slots are left until then, every group can be taken in time (proof: docs/dev/proofs.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from asyncrl.buffer.records import NEVER_STALE, EpisodeRecord, GroupRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.types import DropReason, VersionSpan


def lag(current_version: int, version: int) -> int:
    """Return the distance in optimizer batches between the policy in training and the policy that sampled."""
    return abs(current_version - version)


def token_lags(spans: Iterable[VersionSpan], current_version: int) -> list[int]:
    """Return the lag of every token of the spans, in order, behind the version in training."""
    lags: list[int] = []
    for span in spans:
        lags += [lag(current_version, span.version)] * (span.end - span.start)
    return lags


def stale_mask(lags: Iterable[int], max_staleness: int) -> list[bool]:
    """Mark the stale tokens, which never contribute to a gradient."""
    return [value > max_staleness for value in lags]


class LagHistogram:
    """Counts tokens by lag, exact. All figures are 0 without tokens."""

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self.tokens_by_lag = {value: count for value, count in sorted(tokens.items()) if count > 0}
        self.token_count = sum(self.tokens_by_lag.values())

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in self.tokens_by_lag.items()) / max(self.token_count, 1)

    @property
    def max(self) -> int:
        return max(self.tokens_by_lag, default=0)

    def quantile(self, fraction: float) -> int:
        """Return the smallest lag that at least this fraction of the tokens does not exceed."""
        counted_tokens = 0
        for value, count in self.tokens_by_lag.items():
            counted_tokens += count
            if counted_tokens >= fraction * self.token_count:
                return value
        return 0


def length_bucket(tokens: int) -> int:
    """Return the lower edge of the power-of-two bucket of a response length, for reports; 0 below 32."""
    return 0 if tokens < 32 else 1 << (tokens.bit_length() - 1)


def masked_by_quarter(stale: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (masked, all) tokens in each quarter of one response's model tokens, first quarter first."""
    token_count = len(stale)
    edges = [token_count * quarter // 4 for quarter in range(5)]
    return [(sum(stale[start:end]), end - start) for start, end in pairwise(edges)]


# -- starts of episodes, and slots of batches --------------------------------------------------------------


class GroupSlots:
    """Slots for groups in the current batch and the coming batches.

    `slots_left[j]`: slots of all batches up to the j-th after the current batch, less the groups due by then;
    j = 0 … max_staleness.

    Args:
        current_version: number of committed batches, V.
        free_slots: slots left in the current batch.
        slots_per_batch: slots of each later batch.
        max_staleness: largest lag of a trained token, in batches.
        oldest_versions: the oldest version of a token, for each live group that is not taken.

    Example: V = 7, max_staleness 1, two slots a batch, the oldest versions 6, 6 and 7. Two groups are due in
    the current batch, the third in the next: `slots_left` is [0, 1]. Another group may start on version 7,
    not on version 6.
    """

    def __init__(
        self,
        current_version: int,
        free_slots: int,
        slots_per_batch: int,
        max_staleness: int,
        oldest_versions: Iterable[int],
    ) -> None:
        self.free_slots = free_slots
        self._oldest_trainable = current_version - max_staleness  # tokens before this version are stale
        self.slots_left = [free_slots + ahead * slots_per_batch for ahead in range(max_staleness + 1)]
        for oldest_version, groups in Counter(oldest_versions).items():
            self._reserve(oldest_version, groups)

    def may_take(self, oldest_version: int) -> bool:
        """Return True if a group may take a slot of the current batch.

        Groups that are due before this group must still find slots.
        """
        return self.free_slots > 0 and all(
            left > 0 for left in self.slots_left[: self._batches_until_due(oldest_version)]
        )

    def take_slot(self, oldest_version: int) -> None:
        self._reserve(oldest_version, -1)
        self.free_slots -= 1
        self.slots_left = [left - 1 for left in self.slots_left]

    def min_start_version(self, oldest_version: int) -> int:
        """Return the oldest version on which an episode of a group may start so that no group is late."""
        full_batches = [
            ahead
            for ahead, left in enumerate(self.slots_left[: self._batches_until_due(oldest_version)])
            if left <= 0
        ]
        return self._oldest_trainable + (full_batches[-1] + 1 if full_batches else 0)

    def move_group(self, before: int, after: int) -> None:
        """Note that the oldest version of a group has changed."""
        self._reserve(before, -1)
        self._reserve(after, 1)

    @property
    def may_close(self) -> bool:
        """True if the current batch may be trained without its free slots."""
        return all(left >= self.free_slots for left in self.slots_left)

    def _reserve(self, oldest_version: int, group_count: int) -> None:
        for ahead in range(self._batches_until_due(oldest_version), len(self.slots_left)):
            self.slots_left[ahead] -= group_count

    def _batches_until_due(self, oldest_version: int) -> int:
        """Return the number of batches until a group with this oldest version is due."""
        return max(0, oldest_version - self._oldest_trainable)


def assignable_episodes(buffer: ReplayBuffer) -> Iterator[tuple[int, EpisodeRecord]]:
    """Yield the pending episodes with the oldest version that each may start on, oldest groups first.

    The caller may assign each episode before the next is requested.

    Rule 2: the tokens will not be stale when they are trained. If groups are taken in order, a group with
    `older_groups` older groups is trained by a step that starts from version
    `committed + older_groups // groups_per_batch` or later. With on_stale=hold the slots of the coming
    batches give the exact step.
    """
    slots = upcoming_slots(buffer)
    waiting_groups = sorted(buffer.tally.groups_by_state[State.PENDING])
    counts_of_older = buffer.tally.count_older(waiting_groups, buffer.committed)

    for group_id, older_groups in zip(waiting_groups, counts_of_older, strict=True):
        group = buffer.live_groups[group_id]
        oldest_version = oldest_version_of(buffer, group)

        for uid in group.members:
            if buffer.episodes[uid].state is not State.PENDING:
                continue

            if buffer.config.on_stale == "hold":
                min_version = slots.min_start_version(oldest_version)
            else:
                # With 20 older groups and 8 groups per batch, the episode is trained in the second batch
                # after the current one.
                batches_ahead = older_groups // buffer.config.groups_per_batch
                min_version = buffer.committed + batches_ahead - buffer.max_start_staleness
            yield min_version, buffer.episodes[uid]

            # The caller may have assigned the episode, which changes the group's oldest version.
            new_oldest = oldest_version_of(buffer, group)
            slots.move_group(oldest_version, new_oldest)
            oldest_version = new_oldest


def oldest_version_of(buffer: ReplayBuffer, group: GroupRecord) -> int:
    """Return the oldest version of a token that the group has, or may still get from running episodes.

    NEVER_STALE unless on_stale=hold, as no other mode waits for the group.
    """
    if buffer.config.on_stale != "hold":
        return NEVER_STALE

    if group.id not in buffer.oldest_versions:
        group_members = buffer.trainable_members(group)
        buffer.oldest_versions[group.id] = min(
            (member.oldest_possible_version for member in group_members if not member.state.over),
            default=NEVER_STALE,
        )
    return buffer.oldest_versions[group.id]


def upcoming_slots(buffer: ReplayBuffer) -> GroupSlots:
    """Return the slots of the current batch and the next batches, less the groups that need them."""
    groups_per_batch = buffer.config.groups_per_batch
    taken_groups = len(buffer.tally.groups_by_step[buffer.current_step])
    # A closed batch may be short.
    free_slots = 0 if buffer.closed_step == buffer.current_step else groups_per_batch - taken_groups
    oldest_versions = (oldest_version_of(buffer, group) for group in _untaken_groups(buffer))

    return GroupSlots(
        buffer.committed, free_slots, groups_per_batch, buffer.config.max_staleness, oldest_versions
    )


def drop_overdue(buffer: ReplayBuffer) -> list[EpisodeRecord]:
    """With on_stale=hold, drop untaken groups with a stale token, which no batch can take in time.

    Such groups exist only in a resumed run with a lower max_staleness, or with another rule before. Returns
    the members that were running.
    """
    oldest_trainable = buffer.committed - buffer.config.max_staleness
    overdue_groups = [
        group for group in _untaken_groups(buffer) if oldest_version_of(buffer, group) < oldest_trainable
    ]
    return [episode for group in overdue_groups for episode in buffer.drop_group(group, DropReason.STALE)]


def _untaken_groups(buffer: ReplayBuffer) -> list[GroupRecord]:
    """Return the groups that a batch may still take. Empty unless on_stale=hold."""
    holds_stale = buffer.config.on_stale == "hold"
    return (
        [buffer.live_groups[number] for number in sorted(buffer.tally.untaken_groups)] if holds_stale else []
    )
