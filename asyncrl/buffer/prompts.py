"""Chooses the samples of the next groups, and finds groups that teach nothing: equal members have advantages
of zero. Samples that are solved retire.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.types import EpisodeResult


class Prompts:
    """`samples` draws an epoch, whose numbers `order` gives; `epochs` 0 is without end. `cursor`: position of
    the next draw; samples in `retired` are passed over."""

    def __init__(self, samples: int, order: Callable[[int], Sequence[int]], epochs: int = 0) -> None:
        self.samples = samples
        self._order_of = order
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
                self._order = self._order_of(epoch)
                self._epoch = epoch
            except ConfigError as error:
                self.failed = str(error)

        return -1 if self.failed else self._order[place]


def shuffled(numbers: Sequence[int], key: str) -> list[int]:
    """The numbers in an order that only the key decides."""
    order = list(numbers)
    random.Random(key).shuffle(order)
    return order


# -- groups without a learning signal ----------------------------------------------------------------------


TOLERANCE = 1e-9  # rewards that differ by less differ by rounding: parts of one sum, added in another order


class ComparedParts(msgspec.Struct, frozen=True):
    """Names what the advantage reads of a member beside its reward: `turns`, the reward of each turn;
    `components`, its named parts."""

    turns: bool = False
    components: bool = False


def all_equal(results: Sequence[EpisodeResult], greedy: float | None, reads: ComparedParts) -> bool:
    """True when the results differ in nothing that is read, nor from the `greedy` reward where there is one.

    Turn by turn, members are compared on the turns that they have before their last. With equal sums that
    is equal returns G_k for all who have a turn k, however many turns each took; discounts are left out.
    """
    if greedy is not None:  # one number for all turns: as if all of it was earned at the very end
        longest = max((len(result.turn_rewards) for result in results), default=0)
        results = [*results, EpisodeResult(greedy, turn_rewards=(0.0,) * longest)]

    columns: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for result in results:
        for name, value in _values(result, reads):
            columns[name].append(value)

    return all(max(column) - min(column) <= TOLERANCE for column in columns.values())


def solved(results: Sequence[EpisodeResult], rate: float) -> bool:
    """True when at least the share `rate` was rewarded, shaping apart, and it is below 1: the sample is not
    drawn again (no-positive-resampling; ScaleRL, arXiv 2510.13786)."""
    return rate < 1 and sum(result.score > TOLERANCE for result in results) >= rate * len(results)


def _values(result: EpisodeResult, reads: ComparedParts) -> Iterator[tuple[tuple[object, ...], float]]:
    if result.agents:  # the sum of what they earned is not compared: 0 in a zero-sum game
        for agent, part in result.parts.items():
            yield from (((agent, *name), value) for name, value in _values(part, reads))
        return

    yield ("reward", None), result.reward

    if reads.turns:
        for k, reward in enumerate(result.turn_rewards[:-1]):
            yield ("turn", k), reward
    if reads.components:
        for name, value in result.components.items():
            yield ("component", name), value
