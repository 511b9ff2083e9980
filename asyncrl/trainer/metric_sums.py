"""Numbers that add up: the same result for any cut of a batch into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncrl.algorithms.normalise import Moments


class MetricSums(msgspec.Struct):
    """Ratios (numerator and denominator apart), totals, and extremes, by metric name; `moments`, by names of
    their own, are for what divides by the batch and are no metrics."""

    ratios: dict[str, tuple[float, float]] = {}
    totals: dict[str, float] = {}
    highest: dict[str, float] = {}
    lowest: dict[str, float] = {}
    moments: dict[str, Moments] = {}

    def ratio(self, name: str, numerator: float, denominator: float) -> None:
        a, b = self.ratios.get(name, (0.0, 0.0))
        self.ratios[name] = (a + numerator, b + denominator)

    def scale(self, name: str, factor: float) -> None:
        """Multiply a ratio."""
        a, b = self.ratios[name]
        self.ratios[name] = (a * factor, b)

    def total(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def high(self, name: str, value: float) -> None:
        self.highest[name] = max(value, self.highest.get(name, value))

    def low(self, name: str, value: float) -> None:
        self.lowest[name] = min(value, self.lowest.get(name, value))

    def summary(self, name: str, values: Iterable[float]) -> None:
        """`name`/mean, /max and /min of the values; nothing without values."""
        for value in values:
            self.ratio(f"{name}/mean", value, 1.0)
            self.high(f"{name}/max", value)
            self.low(f"{name}/min", value)

    def moment(self, name: str, part: Moments) -> None:
        self.moments[name] = self.moments.get(name, Moments()) + part

    def merge(self, other: MetricSums) -> None:
        for name, (a, b) in other.ratios.items():
            self.ratio(name, a, b)
        for name, value in other.totals.items():
            self.total(name, value)
        for name, value in other.highest.items():
            self.high(name, value)
        for name, value in other.lowest.items():
            self.low(name, value)
        for name, part in other.moments.items():
            self.moment(name, part)

    def metrics(self) -> dict[str, float]:
        """One number per name. A ratio with denominator 0 is left out."""
        means = {name: a / b for name, (a, b) in self.ratios.items() if b}
        return {**means, **self.totals, **self.highest, **self.lowest}


def merged(parts: Iterable[MetricSums]) -> MetricSums:
    """Add the sums of all parts, in order."""
    whole = MetricSums()
    for part in parts:
        whole.merge(part)
    return whole
