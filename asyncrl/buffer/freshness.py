"""On which weights an episode may start, and what the coming batches must take (docs/staleness.md)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.buffer.hold import Places
from asyncrl.buffer.records import NEVER, EpisodeRecord, GroupRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.types import DropReason


def pending(buffer: ReplayBuffer) -> Iterator[tuple[int, EpisodeRecord]]:
    """(oldest version that it may be started on, episode to be assigned), oldest groups first. The caller may
    assign each before it asks for the next one.

    Rule 2: its tokens will be within the bound when they are trained. After `rank` older groups that is at
    step `committed + rank // groups_per_batch` or later, if groups are taken in order; with on_stale=hold the
    places of the coming batches say it exactly.
    """
    places, waiting = places_of(buffer), sorted(buffer.tally.groups[State.PENDING])
    for number, rank in zip(waiting, buffer.tally.ranks(waiting, buffer.committed), strict=True):
        group = buffer.live[number]
        floor = floor_of(buffer, group)
        for uid in group.members:
            if buffer.episodes[uid].state is State.PENDING:
                holds = buffer.config.on_stale == "hold"
                needed = places.needed(floor) if holds else _usable_from(buffer, rank)
                yield needed, buffer.episodes[uid]
                places.move(floor, floor := floor_of(buffer, group))


def _usable_from(buffer: ReplayBuffer, rank: int = 0) -> int:
    """The oldest version within the bound in the batch that follows `rank` older groups: with 20 of them and
    8 groups per batch in the second after this one."""
    config = buffer.config
    return buffer.committed + rank // config.groups_per_batch - config.max_staleness


def floor_of(buffer: ReplayBuffer, group: GroupRecord) -> int:
    """The oldest version of a token that the group has, or may still get from what runs; NEVER unless
    on_stale=hold, the only mode that waits for it."""
    if buffer.config.on_stale != "hold":
        return NEVER
    if group.id not in buffer.floors:
        members = buffer.members(group)
        buffer.floors[group.id] = min((e.floor for e in members if not e.state.over), default=NEVER)
    return buffer.floors[group.id]


def places_of(buffer: ReplayBuffer) -> Places:
    """Places of the current batch and the next ones, and the groups that need them."""
    size = buffer.config.groups_per_batch
    taken = len(buffer.tally.steps[buffer.committed])
    free = 0 if buffer.closed == buffer.committed else size - taken  # closed: it may be short
    floors = (floor_of(buffer, group) for group in _untaken(buffer))
    return Places(buffer.committed, free, size, buffer.config.max_staleness, floors)


def drop_overdue(buffer: ReplayBuffer) -> list[EpisodeRecord]:
    """on_stale=hold: drop untaken groups with a token over the bound, which no batch can take in time. There
    are none unless a resumed run has a lower bound, or had another rule before. Returns what was running."""
    first = _usable_from(buffer)
    overdue = [group for group in _untaken(buffer) if floor_of(buffer, group) < first]
    return [episode for group in overdue for episode in buffer.drop_group(group, DropReason.STALE)]


def _untaken(buffer: ReplayBuffer) -> list[GroupRecord]:
    """Those that a batch may still take, where they are waited for."""
    holds = buffer.config.on_stale == "hold"
    return [buffer.live[number] for number in sorted(buffer.tally.steps[-1])] if holds else []
