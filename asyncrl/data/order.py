"""Orders the samples of an epoch. The order is a function of the epoch alone, also after a restart.

An epoch has as many draws as there are samples. Without weights each sample is drawn once. With weights a
source gets draws in proportion to its weight, exactly up to rounding, and repeats its samples in passes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from asyncrl.buffer.prompts import shuffled
from asyncrl.config import DataConfig, WeightedSource
from asyncrl.data.storage import Samples
from asyncrl.errors import ConfigError, describe, users_code
from asyncrl.registry import Call, load_object, make_plugin, name_and_options
from asyncrl.types import Sample

OrderHook = Callable[[Sequence[Sample], list[int], int], Sequence[int]]
ORDER_CALL = Call("def order(samples, drawn, epoch)", ("samples", "drawn", "epoch"))


class EpochOrder:
    """Gives the numbers of the samples of an epoch. A hook's orders for the epochs under way are stored in
    `directory`, so that a resumed run has the same order even if the hook would now return another.
    ConfigError for unusable weights or an unusable hook."""

    def __init__(
        self, samples: Samples, config: DataConfig, seed: int, directory: Path | None = None
    ) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = config.shuffle
        self.directory = directory
        weights = [source.weight for source in config.train if isinstance(source, WeightedSource)]
        self.draws_per_source = draw_counts(weights, samples.sizes) if weights else None
        self._hook_name, options = name_and_options(config.order, "data.order")
        self._hook: OrderHook | None = None
        if self._hook_name:
            loaded_hook = load_object(self._hook_name, "order")
            self._hook = make_plugin(loaded_hook, options, f"data.order.{self._hook_name}", ORDER_CALL)

    def __call__(self, epoch: int) -> Sequence[int]:
        if self.directory is None or self._hook is None:
            return self._compute_order(epoch)

        path = self.directory / f"order-{epoch}"
        with ConfigError.instead_of(OSError, text=f"{path}: the order of the data cannot be saved"):
            if not path.exists():
                with path.with_suffix(".tmp").open("wb") as file:
                    file.write(array("Q", self._compute_order(epoch)))
                    os.fsync(file.fileno())

                os.replace(file.name, path)

                # A crash goes back by one epoch at most, so the order of two epochs ago is not needed.
                (self.directory / f"order-{epoch - 2}").unlink(missing_ok=True)

            return array("Q", path.read_bytes())

    def _compute_order(self, epoch: int) -> Sequence[int]:
        """Draw the samples of an epoch, shuffle the draws, and let the hook order them. ConfigError if the
        hook fails, or gives other numbers."""
        drawn_numbers = list(range(len(self.samples)))
        if self.draws_per_source is not None:
            sizes = self.samples.sizes
            starts = accumulate(sizes, initial=0)
            positioned_numbers: list[tuple[float, int]] = []  # each source evenly spread over the epoch

            draws = zip(starts, sizes, self.draws_per_source, strict=False)
            for source, (start, size, count) in enumerate(draws):
                # The source's samples are repeated pass after pass, over all epochs.
                first_draw = epoch * count
                end_draw = first_draw + count
                numbers: list[int] = []
                for pass_index in range(first_draw // size, -(-end_draw // size)):
                    pass_order = list(range(size))
                    if self.shuffle:
                        pass_order = shuffled(pass_order, f"{self.seed}/{source}/{pass_index}")
                    pass_start = pass_index * size
                    numbers += pass_order[max(0, first_draw - pass_start) : end_draw - pass_start]

                positioned_numbers += [
                    ((index + 0.5) / count, start + number) for index, number in enumerate(numbers)
                ]

            drawn_numbers = [number for _, number in sorted(positioned_numbers)]

        if self.shuffle:
            drawn_numbers = shuffled(drawn_numbers, f"{self.seed}/{epoch}")
        if self._hook is None:
            return drawn_numbers

        where = f"data.order: {self._hook_name}, epoch {epoch}"
        try:
            with users_code():
                order = [int(number) for number in self._hook(self.samples, list(drawn_numbers), epoch)]
        except Exception as error:
            raise ConfigError(
                f"{where}: {describe(error)}; the function must return the numbers in `drawn` in any order"
            ) from error

        if sorted(order) != sorted(drawn_numbers):
            raise ConfigError(
                f"{where}: the function returned {len(order)} numbers that are not a reordering of the "
                f"{len(drawn_numbers)} numbers in `drawn`; each number must occur as often as in `drawn`"
            )

        return order


def draw_counts(weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Count the draws of each source in an epoch: weight / sum of weights * number of samples, rounded by the
    largest remainder. ConfigError if a source gets no draw."""
    total = sum(sizes)
    sum_of_weights = sum(weights)
    exact_draws = [weight / sum_of_weights * total for weight in weights]
    counts = [int(value) for value in exact_draws]
    order = sorted(range(len(exact_draws)), key=lambda source: counts[source] - exact_draws[source])

    for source in order[: total - sum(counts)]:
        counts[source] += 1

    if 0 in counts:
        raise ConfigError(
            f"data.train: source {counts.index(0)} has a weight of {weights[counts.index(0)]:g} out of "
            f"{sum_of_weights:g}, which is less than one of the {total} draws in an epoch; raise the weight, "
            "or remove the source"
        )

    return counts
