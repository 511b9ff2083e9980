"""Chooses the samples of the next groups, and finds groups without a learning signal.

A group whose members all earned the same has advantages of zero. Samples that the policy has solved retire.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.types import EpisodeResult


class Prompts:
    """The samples of a run in the order in which they are drawn.

    Args:
        sample_count: number of samples of an epoch.
        sample_order: returns the numbers of the samples of an epoch, in order.
        epochs: number of epochs; 0: no end.

    `cursor` is the position of the next draw. Samples in `retired_samples` are passed over.
    """

    def __init__(
        self, sample_count: int, sample_order: Callable[[int], Sequence[int]], epochs: int = 0
    ) -> None:
        self.sample_count = sample_count
        self._sample_order = sample_order
        self.max_draws = sample_count * epochs if epochs else None
        self.cursor = 0
        self.retired_samples: set[int] = set()
        self.order_error = ""  # text of the ConfigError for which no further epoch has an order
        self._epoch = -1
        self._epoch_order: Sequence[int] = []

    def exhausted(self, position: int) -> bool:
        """Return True if the data has run out before this position."""
        return self.max_draws is not None and position >= self.max_draws

    @property
    def over(self) -> bool:
        """True if no sample will ever be drawn again."""
        return len(self.retired_samples) >= self.sample_count or self.exhausted(self.position)

    @property
    def position(self) -> int:
        """The cursor, moved past retired samples. The caller makes sure that not all samples have retired.

        Without retired samples nothing is drawn, as a run that ends with an epoch needs no order of a next
        epoch.
        """
        while (
            self.retired_samples
            and not self.exhausted(self.cursor)
            and self.draw_sample(self.cursor) in self.retired_samples
        ):
            self.cursor += 1
        return self.cursor

    def draw_sample(self, position: int) -> int:
        """Return the number of the sample at a position; -1 after an `order_error`."""
        epoch, epoch_position = divmod(position, self.sample_count)

        if epoch != self._epoch and not self.order_error:
            try:
                self._epoch_order = self._sample_order(epoch)
                self._epoch = epoch
            except ConfigError as error:
                self.order_error = str(error)

        return -1 if self.order_error else self._epoch_order[epoch_position]


def shuffled(numbers: Sequence[int], key: str) -> list[int]:
    """Return the numbers in an order that depends on the key alone."""
    shuffled_numbers = list(numbers)
    random.Random(key).shuffle(shuffled_numbers)
    return shuffled_numbers


# -- groups without a learning signal ----------------------------------------------------------------------


REWARD_TOLERANCE = 1e-9  # smaller differences of rewards are rounding: the same parts added in another order


class ComparedParts(msgspec.Struct, frozen=True):
    """The parts of a result that the advantages depend on besides the reward.

    turns: the reward of each turn.
    components: the named components of the reward.
    """

    turns: bool = False
    components: bool = False


def all_equal(results: Sequence[EpisodeResult], greedy: float | None, compared: ComparedParts) -> bool:
    """Return True if results differ neither in a compared part nor from the `greedy` reward, if there is one.

    Rewards of turns are compared for all turns but a member's last turn. With equal sums this means equal
    returns G_k for all members that have a turn k, however many turns each took; discounts are left out.
    """
    if greedy is not None:  # a single number counts as earned in the last turn
        longest_turns = max((len(result.turn_rewards) for result in results), default=0)
        results = [*results, EpisodeResult(greedy, turn_rewards=(0.0,) * longest_turns)]

    values_by_name: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for result in results:
        for name, value in _compared_values(result, compared):
            values_by_name[name].append(value)

    return all(max(column) - min(column) <= REWARD_TOLERANCE for column in values_by_name.values())


def solved(results: Sequence[EpisodeResult], pass_rate: float) -> bool:
    """Return True if at least the fraction `pass_rate` of the results was rewarded, shaping apart.

    A solved sample is not drawn again (no-positive-resampling; ScaleRL, arXiv 2510.13786). With a rate of 1
    no sample counts as solved.
    """
    return pass_rate < 1 and sum(result.score > REWARD_TOLERANCE for result in results) >= pass_rate * len(
        results
    )


def _compared_values(
    result: EpisodeResult, compared: ComparedParts
) -> Iterator[tuple[tuple[object, ...], float]]:
    if result.agents:  # the sum over agents is not compared: 0 in a zero-sum game
        for agent, agent_result in result.agent_results.items():
            yield from (((agent, *name), value) for name, value in _compared_values(agent_result, compared))
        return

    yield ("reward", None), result.reward

    if compared.turns:
        for turn_index, reward in enumerate(result.turn_rewards[:-1]):
            yield ("turn", turn_index), reward
    if compared.components:
        for name, value in result.components.items():
            yield ("component", name), value
