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

    def __init__(
        self, sample_count: int, sample_order: Callable[[int], Sequence[int]], epochs: int = 0
    ) -> None:
        self.sample_count = sample_count
        self._sample_order = sample_order
        self.max_draws = sample_count * epochs if epochs else None
        self.cursor = 0
        self.retired_samples: set[int] = set()
        self.order_error = ""  # why there is no order for the rest of the run; its ConfigError
        self._epoch = -1
        self._epoch_order: Sequence[int] = []

    def exhausted(self, position: int) -> bool:
        """True when there is no sample at this position."""
        return self.max_draws is not None and position >= self.max_draws

    @property
    def over(self) -> bool:
        """No sample will ever be drawn again."""
        return len(self.retired_samples) >= self.sample_count or self.exhausted(self.position)

    @property
    def position(self) -> int:
        """The cursor, moved past samples that have retired. Not all have. If none has, nothing is drawn: a
        run that ends with an epoch needs no order of the next one."""
        while (
            self.retired_samples
            and not self.exhausted(self.cursor)
            and self.draw_sample(self.cursor) in self.retired_samples
        ):
            self.cursor += 1
        return self.cursor

    def draw_sample(self, position: int) -> int:
        """Number of the sample at a position; -1 if the order has `failed`."""
        epoch, epoch_position = divmod(position, self.sample_count)

        if epoch != self._epoch and not self.order_error:
            try:
                self._epoch_order = self._sample_order(epoch)
                self._epoch = epoch
            except ConfigError as error:
                self.order_error = str(error)

        return -1 if self.order_error else self._epoch_order[epoch_position]


def shuffled(numbers: Sequence[int], key: str) -> list[int]:
    """The numbers in an order that only the key decides."""
    shuffled_numbers = list(numbers)
    random.Random(key).shuffle(shuffled_numbers)
    return shuffled_numbers


# -- groups without a learning signal ----------------------------------------------------------------------


TOLERANCE = 1e-9  # rewards that differ by less differ by rounding: parts of one sum, added in another order


class ComparedParts(msgspec.Struct, frozen=True):
    """Names what the advantage reads of a member beside its reward: `turns`, the reward of each turn;
    `components`, its named parts."""

    turns: bool = False
    components: bool = False


def all_equal(results: Sequence[EpisodeResult], greedy: float | None, compared: ComparedParts) -> bool:
    """True when the results differ in nothing that is read, nor from the `greedy` reward where there is one.

    Turn by turn, members are compared on the turns that they have before their last. With equal sums that
    is equal returns G_k for all who have a turn k, however many turns each took; discounts are left out.
    """
    if greedy is not None:  # one number for all turns: as if all of it was earned at the very end
        longest_turns = max((len(result.turn_rewards) for result in results), default=0)
        results = [*results, EpisodeResult(greedy, turn_rewards=(0.0,) * longest_turns)]

    values_by_name: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for result in results:
        for name, value in _compared_values(result, compared):
            values_by_name[name].append(value)

    return all(max(column) - min(column) <= TOLERANCE for column in values_by_name.values())


def solved(results: Sequence[EpisodeResult], pass_rate: float) -> bool:
    """True when at least the share `rate` was rewarded, shaping apart, and it is below 1: the sample is not
    drawn again (no-positive-resampling; ScaleRL, arXiv 2510.13786)."""
    return pass_rate < 1 and sum(result.score > TOLERANCE for result in results) >= pass_rate * len(results)


def _compared_values(
    result: EpisodeResult, compared: ComparedParts
) -> Iterator[tuple[tuple[object, ...], float]]:
    if result.agents:  # the sum of what they earned is not compared: 0 in a zero-sum game
        for agent, agent_result in result.parts.items():
            yield from (((agent, *name), value) for name, value in _compared_values(agent_result, compared))
        return

    yield ("reward", None), result.reward

    if compared.turns:
        for turn_index, reward in enumerate(result.turn_rewards[:-1]):
            yield ("turn", turn_index), reward
    if compared.components:
        for name, value in result.components.items():
            yield ("component", name), value
