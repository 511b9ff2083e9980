"""Scaling of advantages by their batch, from numbers that add up over micro-batches and ranks.

    advantages ──► Moments ──+ over ranks──► end_factor: one number, on the gradient at the end
                                        └──► Whitening: per token, before the backward

Division by a number of the batch is exact at the end of a streamed batch. Subtraction of a batch mean is not:
whitening waits for the whole batch, or takes statistics of earlier ones. Every std has ddof 1, and is over
model tokens (or episodes) before any staleness or correction mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncrl.algorithms.credit import EPSILON, Scale

DECAY = 0.9  # what running statistics keep per batch: they are those of about the last ten
# names of running statistics in a checkpoint
MEAN = "advantage_mean"
STD = "advantage_std"


def end_factor(scale: Scale, episodes: Moments, varied: float) -> float:
    """The one number that multiplies every advantage of the batch.

    `episodes`: of the episodes' advantages, each the mean of its tokens'; `varied`: how many of them have a
    group whose rewards differ. `batch_std`: 1 / (std over episodes + 1e-6) (ScaleRL, arXiv 2510.13786).
    `nonzero`: episodes / `varied` (GPG, arXiv 2504.02546). 1 for other scales, and where nothing differs.
    """
    if scale == "batch_std" and episodes.std > EPSILON:
        return 1 / (episodes.std + EPSILON)
    if scale == "nonzero" and varied:
        return episodes.count / varied
    return 1.0


@dataclass(frozen=True)
class Whitening:
    """A -> (A - mean) / (std + 1e-6), statistics over tokens. std 0: not known, or no spread; then A -> 0."""

    mean: float
    std: float

    @classmethod
    def of(cls, tokens: Moments) -> Whitening:
        """By the batch's own statistics; advantages that are equal up to rounding become 0."""
        return cls(tokens.mean, tokens.std)

    @classmethod
    def updated(cls, earlier: Whitening | None, tokens: Moments) -> Whitening:
        """Running statistics after one more batch: mean and variance of a mixture, 0.9 earlier and 0.1 new.

        A batch in which all advantages are equal says nothing of their spread and changes nothing.
        """
        batch_statistics = cls.of(tokens)
        if batch_statistics.std <= EPSILON:
            return earlier or cls(0.0, 0.0)
        if earlier is None:
            return batch_statistics
        mixed_mean = DECAY * earlier.mean + (1 - DECAY) * batch_statistics.mean
        mixed_variance = sum(
            fraction * (part.std**2 + (part.mean - mixed_mean) ** 2)
            for fraction, part in ((DECAY, earlier), (1 - DECAY, batch_statistics))
        )

        return cls(mixed_mean, math.sqrt(mixed_variance))

    def apply(self, advantage: np.ndarray) -> np.ndarray:
        """[T] -> [T]."""
        return (advantage - self.mean) / (self.std + EPSILON) if self.std else np.zeros_like(advantage)

    def state(self) -> dict[str, float]:
        """For a checkpoint; nothing while not known."""
        return {MEAN: self.mean, STD: self.std} if self.std else {}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Whitening | None:
        """From all numbers of a checkpoint; None while not known."""
        return cls(state[MEAN], state[STD]) if STD in state else None


ROUNDING = 1e-12  # share of Σ x² under which a spread is rounding, of values that were float32 once


class Moments(msgspec.Struct, frozen=True):
    """`count` values, their `mean`, and `spread`, the sum of their squared distances from it.

    Nothing cancels, neither here nor when parts are added, however far the mean is from 0 (Chan, Golub and
    LeVeque, Algorithms for Computing the Sample Variance, 1983).
    """

    count: float = 0.0
    mean: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Return moments of values [n], in float64."""
        if not len(values):
            return cls()
        mean = float(values.mean(dtype=np.float64))
        return cls(float(len(values)), mean, float(((values - mean) ** 2).sum()))

    def __add__(self, addend: Moments) -> Moments:
        """Return moments of the values of both."""
        count = self.count + addend.count
        if not count:
            return self
        mean_difference = addend.mean - self.mean
        other_fraction = addend.count / count
        spread = self.spread + addend.spread + mean_difference**2 * self.count * other_fraction
        return Moments(count, self.mean + mean_difference * other_fraction, spread)

    @property
    def varies(self) -> bool:
        """The values differ by more than rounding."""
        return self.spread > ROUNDING * (self.spread + self.count * self.mean**2)

    @property
    def std(self) -> float:
        """ddof 1; 0 for fewer than two values, and where they differ by rounding only."""
        return math.sqrt(self.spread / (self.count - 1)) if self.count > 1 and self.varies else 0.0


def explained_variance(returns: Moments, errors: Moments) -> float | None:
    """1 − Var(G − V)/Var(G) over the batch's tokens. None where returns do not vary: nothing to explain."""
    return 1 - errors.spread / returns.spread if returns.varies else None
