"""The order of the samples: a pure function of the position, so that a restart needs only the position."""

from __future__ import annotations

import random


class Prompts:
    """`samples` of them, shuffled anew each epoch by `seed`; `epochs` 0 is without end."""

    def __init__(self, samples: int, seed: int, shuffle: bool, epochs: int) -> None:
        self.samples, self.seed, self.shuffle = samples, seed, shuffle
        self.limit = samples * epochs if epochs else None
        self._epoch = -1
        self._order: list[int] = []

    def exhausted(self, position: int) -> bool:
        """True when there is no sample at this position."""
        return self.limit is not None and position >= self.limit

    def draw(self, position: int) -> int:
        """Index of the sample at a position."""
        epoch, place = divmod(position, self.samples)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.samples))
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self._order[place]
