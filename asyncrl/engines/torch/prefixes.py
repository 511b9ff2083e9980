"""Finds the slot that computed the beginning of a prompt already: members of a group, and prompts with the
same examples in front, are prefilled once and copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.engines.torch.sessions import Slot

BLOCK = 32  # ids; a prompt is known by its whole blocks


class Source(NamedTuple):
    """The KV of the leading `length` ids is, or will be, in `slot`."""

    slot: Slot
    length: int


class Prefixes:
    """Slots by the blocks of the prompts that they were given; the last one of each block is known."""

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
