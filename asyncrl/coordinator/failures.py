"""Failed attempts at training episodes, counted since the run began."""

from __future__ import annotations

import msgspec

from asyncrl.store.runstore import RunStore
from asyncrl.types import FailReason

META = "failed_attempts"
LONGEST = 300  # characters of a cause that are kept


class FailedAttempts(msgspec.Struct):
    """Kept in the store. An attempt counts whatever became of its episode: the next one may have landed.
    `newest`: the cause of the last one that named it, with file and line where users' code raised."""

    counts: dict[str, int] = {}  # by FailReason
    newest: str = ""

    @classmethod
    def stored(cls, store: RunStore) -> FailedAttempts:
        return msgspec.json.decode(store.read.meta(META, "{}"), type=cls)

    def add(self, reason: FailReason, detail: str, store: RunStore) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.newest = " ".join(detail.split())[:LONGEST] or self.newest
        store.put_meta(META, msgspec.json.encode(self).decode())
