"""Which sample a group gets: a pure function of the group's number, so that the cursor is the number."""

from __future__ import annotations

import random


class Prompts:
    """`rows` samples, shuffled anew each epoch by `seed`; `epochs` 0 is without end."""

    def __init__(self, rows: int, seed: int, shuffle: bool, epochs: int) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.limit = rows * epochs if epochs else None
        self._epoch = -1
        self._order: list[int] = []

    def exhausted(self, group: int) -> bool:
        """True when there is no sample for this group number."""
        return self.limit is not None and group >= self.limit

    def draw(self, group: int) -> tuple[int, int]:
        """(epoch, row) of a group number."""
        epoch, position = divmod(group, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.rows))
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return epoch, self._order[position]
