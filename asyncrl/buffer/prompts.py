"""The order of the samples: a pure function of the position, so that a restart needs only the position."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from asyncrl.errors import ConfigError


class Prompts:
    """`samples` draws an epoch, whose numbers `order` gives; `epochs` 0 is without end. `cursor`: position of
    the next draw; samples in `retired` are passed over."""

    def __init__(self, samples: int, order: Callable[[int], Sequence[int]], epochs: int = 0) -> None:
        self.samples, self._order_of = samples, order
        self.limit = samples * epochs if epochs else None
        self.cursor = 0
        self.retired: set[int] = set()
        self.failed = ""  # why there is no order for the rest of the run; its ConfigError
        self._epoch = -1
        self._order: Sequence[int] = []

    def exhausted(self, position: int) -> bool:
        """True when there is no sample at this position."""
        return self.limit is not None and position >= self.limit

    @property
    def over(self) -> bool:
        """No sample will ever be drawn again."""
        return len(self.retired) >= self.samples or self.exhausted(self.position)

    @property
    def position(self) -> int:
        """The cursor, moved past samples that have retired. Not all have. If none has, nothing is drawn: a
        run that ends with an epoch needs no order of the next one."""
        while self.retired and not self.exhausted(self.cursor) and self.draw(self.cursor) in self.retired:
            self.cursor += 1
        return self.cursor

    def draw(self, position: int) -> int:
        """Number of the sample at a position; -1 if the order has `failed`."""
        epoch, place = divmod(position, self.samples)
        if epoch != self._epoch and not self.failed:
            try:
                self._order, self._epoch = self._order_of(epoch), epoch
            except ConfigError as error:
                self.failed = str(error)
        return -1 if self.failed else self._order[place]


def shuffled(numbers: Sequence[int], key: str) -> list[int]:
    """The numbers in an order that only the key decides."""
    order = list(numbers)
    random.Random(key).shuffle(order)
    return order
