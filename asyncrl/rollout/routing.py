"""Which engine samples a turn: the one that holds the episode's prefix, within a bound, or the least loaded.

Of n engines that may be used, with m requests among them, one that is stuck to holds at most
max(2, ceil(1.25 * (m + 1) / n)) with the next request. The least loaded always has room under that bound: it
holds at most floor(m / n), and floor(m / n) + 1 <= ceil((m + 1) / n).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

BOUND = 1.25
"""Load that sticking to an engine may cause, relative to the mean."""
FEW = 2
"""Requests side by side that are no overload: with fewer requests than engines the mean says nothing, and
moving would cost a prefix for nothing."""


class Place(msgspec.Struct, frozen=True):
    """An engine as routing sees it. A restarted engine has lost its prefixes and is another place: `id` is
    unique to its incarnation."""

    id: str
    version: int
    healthy: bool


class Router:
    """Requests under way per place, and where each session's prefix is."""

    def __init__(self) -> None:
        self._places: tuple[Place, ...] = ()
        self._load: Counter[str] = Counter()
        self._homes: dict[str, str] = {}

    def update(self, places: Iterable[Place]) -> None:
        """The places from now on. Requests under way at others go on until `end`; a place that comes back
        still has its prefixes."""
        self._places = tuple(places)

    def eligible(self, oldest: int, avoid: Collection[str] = ()) -> list[Place]:
        """Healthy places whose weights are not older than `oldest`, without those to `avoid`."""
        return [
            place
            for place in self._places
            if place.healthy and place.version >= oldest and place.id not in avoid
        ]

    def begin(self, session: str, oldest: int, avoid: Collection[str] = ()) -> str | None:
        """Start a request: the place to send it to, whose load includes it until `end`. None: no place is
        eligible."""
        ids = [place.id for place in self.eligible(oldest, avoid)]
        if not ids:
            return None
        chosen = self._choose(session, ids)
        self._homes[session] = chosen
        self._load[chosen] += 1
        return chosen

    def end(self, place: str) -> None:
        """A request that was begun at `place` is over."""
        self._load[place] -= 1
        if not self._load[place]:
            del self._load[place]

    def forget(self, session: str) -> None:
        """The episode is over."""
        self._homes.pop(session, None)

    def _choose(self, session: str, ids: list[str]) -> str:
        home = self._homes.get(session)
        if home in ids and self._load[home] + 1 <= bound(sum(self._load[id] for id in ids), len(ids)):
            return home
        prefixes = Counter(self._homes.values())
        return min(ids, key=lambda id: (self._load[id], prefixes[id]))  # ties: the first


def bound(requests: int, places: int) -> int:
    """Requests that one of `places` may hold once one more than `requests` has started."""
    return max(FEW, math.ceil(BOUND * (requests + 1) / places))
