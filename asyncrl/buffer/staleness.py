"""Staleness of tokens: the arithmetic behind the promise that no token over the bound is trained, and what
the bound asks of episodes that start and of the coming batches (docs/staleness.md).

V is the step being trained (completed optimizer batches), s the version that sampled a token, and
lag = V - s. Versions of a branch that a rollback has left can be ahead of V; their distance counts.

With `on_stale=hold` a group whose oldest token was sampled by version s is within the bound until batch
s + max_staleness, so it is due then at the latest. While no batch owes more places than there are until then,
every group can be taken in time (proof: docs/staleness.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from asyncrl.buffer.records import NEVER, EpisodeRecord, GroupRecord, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.types import DropReason, VersionSpan


def lag(step: int, version: int) -> int:
    """Return the distance in optimizer batches between the policy in training and the one that sampled."""
    return abs(step - version)


def token_lags(spans: Iterable[VersionSpan], step: int) -> list[int]:
    """The lag of every token of the spans, in order."""
    return [value for span in spans for value in [lag(step, span.version)] * (span.end - span.start)]


def stale_mask(lags: Iterable[int], bound: int) -> list[bool]:
    """Marks the tokens over the bound: these never contribute to a gradient."""
    return [value > bound for value in lags]


class LagHistogram:
    """Counts tokens by lag, exact. All figures are 0 without tokens."""

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self.tokens = {value: count for value, count in sorted(tokens.items()) if count > 0}
        self.total = sum(self.tokens.values())

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in self.tokens.items()) / max(self.total, 1)

    @property
    def max(self) -> int:
        return max(self.tokens, default=0)

    def quantile(self, q: float) -> int:
        """The smallest lag that at least a share `q` of the tokens do not exceed."""
        seen = 0
        for value, count in self.tokens.items():
            seen += count
            if seen >= q * self.total:
                return value
        return 0


def length_bucket(tokens: int) -> int:
    """Lower edge of the power-of-two bucket that a response length falls in, for reports; 0 below 32."""
    return 0 if tokens < 32 else 1 << (tokens.bit_length() - 1)


def masked_by_quarter(stale: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (masked, all) tokens in each quarter of one response's model tokens, first quarter first."""
    n = len(stale)
    edges = [n * quarter // 4 for quarter in range(5)]
    return [(sum(stale[a:b]), b - a) for a, b in pairwise(edges)]


# -- starts and places -------------------------------------------------------------------------------------


class Places:
    """`left[j]`: places up to the batch j after the current one, less the groups due by then; j = 0 … bound.

    Args:
        step: number of committed batches, V.
        free: places left in the current batch.
        per_batch: places of each batch after it.
        bound: max_staleness.
        floors: of each live group that is not taken, the oldest version of its tokens.

    Example: V = 7, a bound of 1, two places a batch, the floors 6, 6 and 7. Two groups are due in batch 7,
    the third in batch 8: `left` is [0, 1]. Another group may start on version 7, but not on version 6.
    """

    def __init__(self, step: int, free: int, per_batch: int, bound: int, floors: Iterable[int]) -> None:
        self.free = free
        self._oldest = step - bound
        self.left = [free + ahead * per_batch for ahead in range(bound + 1)]
        for floor, groups in Counter(floors).items():
            self._owe(floor, groups)

    def may_take(self, floor: int) -> bool:
        """A group takes a place of the current batch. Those due before it must still find theirs."""
        return self.free > 0 and all(left > 0 for left in self.left[: self._due(floor)])

    def take(self, floor: int) -> None:
        self._owe(floor, -1)
        self.free -= 1
        self.left = [left - 1 for left in self.left]

    def needed(self, floor: int) -> int:
        """The oldest version on which an episode of a group may start: all are still taken in time."""
        full = [ahead for ahead, left in enumerate(self.left[: self._due(floor)]) if left <= 0]
        return self._oldest + (full[-1] + 1 if full else 0)

    def move(self, before: int, after: int) -> None:
        """The floor of a group has changed."""
        self._owe(before, -1)
        self._owe(after, 1)

    @property
    def may_close(self) -> bool:
        """The current batch may be trained without its free places."""
        return all(left >= self.free for left in self.left)

    def _owe(self, floor: int, groups: int) -> None:
        for ahead in range(self._due(floor), len(self.left)):
            self.left[ahead] -= groups

    def _due(self, floor: int) -> int:
        """Counts the batches until a group with this floor is due at the latest."""
        return max(0, floor - self._oldest)


def pending(buffer: ReplayBuffer) -> Iterator[tuple[int, EpisodeRecord]]:
    """(oldest version that it may be started on, episode to be assigned), oldest groups first. The caller may
    assign each before it asks for the next one.

    Rule 2: its tokens will be within the bound when they are trained. After `rank` older groups that is at
    step `committed + rank // groups_per_batch` or later, if groups are taken in order; with on_stale=hold the
    places of the coming batches say it exactly.
    """
    places = places_of(buffer)
    waiting = sorted(buffer.tally.groups[State.PENDING])

    for number, rank in zip(waiting, buffer.tally.ranks(waiting, buffer.committed), strict=True):
        group = buffer.live[number]
        floor = floor_of(buffer, group)
        for uid in group.members:
            if buffer.episodes[uid].state is State.PENDING:
                holds = buffer.config.on_stale == "hold"
                # Fresh enough in the batch that follows `rank` older groups: with 20 of them and 8 groups
                # per batch in the second after this one.
                later = buffer.committed + rank // buffer.config.groups_per_batch - buffer.fresh
                needed = places.needed(floor) if holds else later
                yield needed, buffer.episodes[uid]
                places.move(floor, floor := floor_of(buffer, group))


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
    first = buffer.committed - buffer.config.max_staleness
    overdue = [group for group in _untaken(buffer) if floor_of(buffer, group) < first]
    return [episode for group in overdue for episode in buffer.drop_group(group, DropReason.STALE)]


def _untaken(buffer: ReplayBuffer) -> list[GroupRecord]:
    """Returns the groups that a batch may still take; none unless they are waited for (on_stale=hold)."""
    holds = buffer.config.on_stale == "hold"
    return [buffer.live[number] for number in sorted(buffer.tally.untaken)] if holds else []
