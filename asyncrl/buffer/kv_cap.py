"""How many groups may be live, so that the servers' KV caches hold the episodes under way.

Pure arithmetic, once per committed batch; docs/staleness.md, section 1, says why.
"""

from __future__ import annotations

from collections import defaultdict

HIGH, LOW = 0.8, 0.6  # share of a KV cache in use: over HIGH the cap shrinks, under LOW it grows
FACTOR = 1.25  # less than HIGH / LOW: a change of the cap does not lead from one side to the other


class KvCap:
    """`limit`: live groups that the servers have room for.

    Readings of the time since the last commit are given to `read` and added to `retracted`.

    Args:
        groups: groups per batch, G: the cap is never less.
        bound: max_staleness, in batches, η: the cap is never more than (1 + η) * groups.
    """

    def __init__(self, groups: int, bound: int) -> None:
        self.groups, self.most = groups, (1 + bound) * groups
        self.level = float(self.most)
        self.retracted = 0  # requests of which a server took the KV memory away
        self._uses: defaultdict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))  # sum, count
        self._wait = 0  # commits until what is read shows the last change

    @property
    def limit(self) -> int:
        return int(self.level)

    @property
    def use(self) -> float | None:
        """Of the fullest server, in the mean over what was read; None: nothing was."""
        return max((total / count for total, count in self._uses.values()), default=None)

    def read(self, server: str, use: float) -> None:
        """A server's share of KV memory in use, in [0, 1]."""
        total, count = self._uses[server]
        self._uses[server] = total + use, count + 1

    def update(self, live: int, counts: bool = True) -> None:
        """After a commit, before which `live` groups were live. `counts`: what was read since the one before
        is of a plain step, not of a validation."""
        use, retracted = self.use, self.retracted
        self._uses.clear()
        self.retracted = 0
        self._wait -= 1
        if self._wait >= 0 or not counts:
            return
        before = self.level
        if retracted or (use is not None and use > HIGH):
            self.level = max(self.groups, min(before, live) / FACTOR)
        elif use is not None and use < LOW:
            self.level = min(self.most, before * FACTOR)
        if self.level != before:
            self._wait = -(-self.limit // self.groups)  # the steps for which a group is live
