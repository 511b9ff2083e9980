"""Records which session owns which slot, and which ids the slot still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Slot:
    """One slot of the KV cache, as the host sees it."""

    __slots__ = ("born", "busy", "held", "index", "session", "swap", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.session: str | None = None
        self.held: tuple[int, ...] = ()  # ids whose KV the slot holds
        self.born = 0  # policy version that wrote position 0: KV is written in order, so the oldest of all
        self.swap = 0  # how often weights had been swapped then
        self.busy = False
        self.used = 0

    def keep(self, ids: Sequence[int]) -> int:
        """Returns the number of leading ids that need no prefill: the common prefix with what is held, short
        of the last id (whose logits are needed). Forgets the rest."""
        limit = min(len(self.held), len(ids) - 1)
        if self.held[:limit] != tuple(ids[:limit]):
            limit = next(i for i in range(limit) if self.held[i] != ids[i])
        self.held = self.held[:limit]
        return limit


class Slots:
    """Slots by session. An idle session keeps its slot until it is needed: least recently used first."""

    def __init__(self, count: int) -> None:
        self.all = [Slot(index) for index in range(count)]
        self._owned: dict[str, Slot] = {}
        self._clock = 0

    def acquire(self, session: str) -> Slot | None:
        """The session's own slot, a free one, or that of an idle session; None when all are busy.
        Free slots are taken from below, which keeps the slots in use together."""
        slot = self._owned.get(session)
        if slot is None:
            idle = [slot for slot in self.all if not slot.busy]
            if not idle:
                return None
            slot = min(idle, key=lambda slot: slot.used if slot.session else -1)
            self._forget(slot)
            slot.session = session
            self._owned[session] = slot
        slot.busy = True
        return slot

    def move(self, sources: Sequence[int]) -> None:
        """Slot number i becomes the one that was number sources[i]."""
        self.all = [self.all[source] for source in sources]
        for index, slot in enumerate(self.all):
            slot.index = index

    def rest(self, slot: Slot, held: tuple[int, ...]) -> None:
        """The slot's turn is over and the KV of these ids may be used by the next one."""
        self._clock += 1
        slot.busy, slot.held, slot.used = False, held, self._clock

    def release(self, session: str) -> None:
        """Forget a session that is not busy."""
        slot = self._owned.get(session)
        if slot is not None:
            self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        if slot.session is not None:
            del self._owned[slot.session]
        slot.session, slot.held = None, ()


BLOCK = 32  # ids; a prompt is known by its whole blocks


class Source(NamedTuple):
    """The KV of the leading `length` ids is, or will be, in `slot`."""

    slot: Slot
    length: int


class Prefixes:
    """Finds the slot that has computed the beginning of a prompt: members of a group, and prompts with the
    same examples in front, are prefilled once and copied. It knows the last slot of each block."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}  # by the hash of all ids up to a block's end
        self._blocks: dict[Slot, list[int]] = {}

    def enter(self, slot: Slot, ids: Sequence[int]) -> Source | None:
        """`slot` is given a prompt. Returns the longest beginning of it that another slot was given before;
        by its hash, so the ids are to be compared."""
        for block in self._blocks.pop(slot, ()):
            if self._slots.get(block) is slot:
                del self._slots[block]
        source, blocks, last = None, [], 0
        for end in range(BLOCK, len(ids), BLOCK):  # the last id is computed in any case, for its logits
            last = hash((last, tuple(ids[end - BLOCK : end])))
            blocks.append(last)
            if last in self._slots:
                source = Source(self._slots[last], end)
        self._slots |= dict.fromkeys(blocks, slot)
        self._blocks[slot] = blocks
        return source
