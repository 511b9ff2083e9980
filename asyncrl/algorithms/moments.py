"""Mean and spread of values that come in parts, of several micro-batches or ranks."""

from __future__ import annotations

import math

import msgspec
import numpy as np

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
        """Moments of values [n], in float64."""
        if not len(values):
            return cls()
        mean = float(values.mean(dtype=np.float64))
        return cls(float(len(values)), mean, float(((values - mean) ** 2).sum()))

    def __add__(self, other: Moments) -> Moments:
        """Moments of the values of both."""
        count = self.count + other.count
        if not count:
            return self
        step, share = other.mean - self.mean, other.count / count
        spread = self.spread + other.spread + step**2 * self.count * share
        return Moments(count, self.mean + step * share, spread)

    @property
    def varies(self) -> bool:
        """The values differ by more than rounding."""
        return self.spread > ROUNDING * (self.spread + self.count * self.mean**2)

    @property
    def std(self) -> float:
        """ddof 1; 0 for fewer than two values, and where they differ by rounding only."""
        return math.sqrt(self.spread / (self.count - 1)) if self.count > 1 and self.varies else 0.0
