"""Counts of groups and episodes by state, kept up to date with each change.

A turn of the coordinator's loop must not look at all episodes: there are ten thousand of them in a large run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict

from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State


class Tally:
    """Counts over all groups in memory.

    states: episodes in each state.
    groups: by state, ids of the groups with a member in it.
    untaken: ids of the groups of which no batch has taken a member yet. Without the filtered ones.
    steps: by batch, ids of the groups whose first member it took. Without the filtered ones.
    filtered: ids of the groups that were filtered. Only late members of them may still be trained, which take
        no place of a batch.
    """

    def __init__(self) -> None:
        self.states: Counter[State] = Counter()
        self.groups: defaultdict[State, set[int]] = defaultdict(set)
        self.untaken: set[int] = set()
        self.steps: defaultdict[int, set[int]] = defaultdict(set)
        self.filtered: set[int] = set()
        self._members: defaultdict[int, Counter[State]] = defaultdict(Counter)
        self._order: list[int] = []  # ids of all groups, ascending

    def join(self, group: GroupRecord, members: list[EpisodeRecord]) -> None:
        """A group that is newer than all others."""
        self._order.append(group.id)
        self._join_step(group)
        for episode in members:
            self._count(group.id, episode.state, 1)

    def leave(self, group: GroupRecord) -> None:
        self._order.pop(bisect_left(self._order, group.id))
        self._leave_step(group)
        for state, count in self._members.pop(group.id).items():
            self.states[state] -= count
            self.groups[state].discard(group.id)

    def move(self, episode: EpisodeRecord, state: State) -> None:
        """The only place where the state of an episode of a live group is set."""
        self._count(episode.group, episode.state, -1)
        self._count(episode.group, state, 1)
        episode.state = state

    def take(self, group: GroupRecord, step: int) -> None:
        """The first member of a group goes into a batch."""
        self._leave_step(group)
        group.step = step
        self._join_step(group)

    def filter(self, group: GroupRecord) -> None:
        """Count the landed members of a group as filtered."""
        self._leave_step(group)
        group.filtered = True
        self._join_step(group)

    def open(self, committed: int) -> int:
        """Number of live groups: neither filtered, nor taken by a batch that is committed."""
        return len(self._order) - len(self._closed(committed))

    def ranks(self, groups: list[int], committed: int) -> list[int]:
        """For each of these groups: the number of live groups that are older."""
        closed = sorted(self._closed(committed))
        return [bisect_left(self._order, group) - bisect_left(closed, group) for group in groups]

    def over(self, group: GroupRecord) -> bool:
        """True when no member changes any more."""
        return all(state.over for state, count in self._members[group.id].items() if count)

    def _closed(self, committed: int) -> set[int]:
        return self.filtered.union(*(ids for step, ids in self.steps.items() if step < committed))

    def _join_step(self, group: GroupRecord) -> None:
        taken = self.untaken if group.step < 0 else self.steps[group.step]
        (self.filtered if group.filtered else taken).add(group.id)

    def _leave_step(self, group: GroupRecord) -> None:
        for ids in (self.filtered, self.untaken, self.steps[group.step]):
            ids.discard(group.id)
        if not self.steps[group.step]:
            del self.steps[group.step]

    def _count(self, group: int, state: State, change: int) -> None:
        self.states[state] += change
        members = self._members[group]
        members[state] += change
        if not members[state]:
            self.groups[state].discard(group)
        elif members[state] == change:  # the first one
            self.groups[state].add(group)
