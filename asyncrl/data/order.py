"""Draws the samples of an epoch in an order: a function of the epoch alone, also after a restart.

An epoch has as many draws as there are samples. Without weights each sample is drawn once. With weights a
source gets its share of the draws, exactly up to rounding, and goes through its own samples again and again.
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
from asyncrl.registry import Call, load_object, make, single
from asyncrl.types import Sample

Hook = Callable[[Sequence[Sample], list[int], int], Sequence[int]]
CALL = Call("def order(samples, drawn, epoch)", ("samples", "drawn", "epoch"))


class EpochOrder:
    """Gives the numbers of the samples of an epoch. What a hook gave for the epochs under way is kept in
    `directory`: a run that goes on has the same order even if the hook would give another. ConfigError for
    weights or a hook that cannot be used."""

    def __init__(
        self, samples: Samples, config: DataConfig, seed: int, directory: Path | None = None
    ) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = config.shuffle
        self.directory = directory
        weights = [one.weight for one in config.train if isinstance(one, WeightedSource)]
        self.shares = shares(weights, samples.sizes) if weights else None
        self._hook_name, options = single(config.order, "data.order")
        self._hook: Hook | None = None
        if self._hook_name:
            found = load_object(self._hook_name, "order")
            self._hook = make(found, options, f"data.order.{self._hook_name}", CALL)

    def __call__(self, epoch: int) -> Sequence[int]:
        if self.directory is None or self._hook is None:
            return self._ordered(epoch)
        path = self.directory / f"order-{epoch}"
        with ConfigError.instead_of(OSError, text=f"{path}: the order of the data cannot be kept"):
            if not path.exists():
                with path.with_suffix(".tmp").open("wb") as file:
                    file.write(array("Q", self._ordered(epoch)))
                    os.fsync(file.fileno())
                os.replace(file.name, path)
                # a crash goes back by one epoch at most
                (self.directory / f"order-{epoch - 2}").unlink(missing_ok=True)
            return array("Q", path.read_bytes())

    def _ordered(self, epoch: int) -> Sequence[int]:
        everything = range(len(self.samples))
        drawn = list(everything) if self.shares is None else self._mixed(epoch, self.shares)
        drawn = shuffled(drawn, f"{self.seed}/{epoch}") if self.shuffle else drawn
        if self._hook is None:
            return drawn
        where = f"data.order: {self._hook_name} of epoch {epoch}"
        try:
            with users_code():
                order = [int(number) for number in self._hook(self.samples, list(drawn), epoch)]
        except Exception as error:
            raise ConfigError(
                f"{where} failed: {describe(error)}; it must give the numbers in `drawn` in another order"
            ) from error
        if sorted(order) != sorted(drawn):
            raise ConfigError(
                f"{where} gives {len(order)} numbers, not the {len(drawn)} drawn ones in another order; each "
                "must be there as often as in `drawn`"
            )
        return order

    def _mixed(self, epoch: int, counts: Sequence[int]) -> list[int]:
        """Take as many of each source as its share, evenly spread."""
        sizes = self.samples.sizes
        starts = accumulate(sizes, initial=0)
        placed: list[tuple[float, int]] = []
        for source, (start, size, count) in enumerate(zip(starts, sizes, counts, strict=False)):
            numbers = self._passes(source, size, epoch * count, (epoch + 1) * count)
            placed += [((at + 0.5) / count, start + number) for at, number in enumerate(numbers)]
        return [number for _, number in sorted(placed)]

    def _passes(self, source: int, size: int, first: int, end: int) -> list[int]:
        """Numbers `first` to `end` of one source's samples, gone through again and again."""
        found: list[int] = []
        for turn in range(first // size, -(-end // size)):
            everything = range(size)
            order = shuffled(everything, f"{self.seed}/{source}/{turn}") if self.shuffle else list(everything)
            found += order[max(0, first - turn * size) : end - turn * size]
        return found


def shares(weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Draws of each source in an epoch: weight / sum of weights of as many as there are samples, rounded by
    the largest remainder. ConfigError where one gets none."""
    total = sum(sizes)
    sum_of_weights = sum(weights)
    exact = [weight / sum_of_weights * total for weight in weights]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda at: counts[at] - exact[at])
    for at in order[: total - sum(counts)]:
        counts[at] += 1
    if 0 in counts:
        raise ConfigError(
            f"data.train: source {counts.index(0)} has the weight {weights[counts.index(0)]:g} of "
            f"{sum_of_weights:g}, less than one of the {total} draws of an epoch; raise it, or leave it out"
        )
    return counts
