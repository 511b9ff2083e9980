"""Staleness of tokens: the arithmetic behind the promise that no token over the bound is trained.

V is the step being trained (completed optimizer batches), s the version that sampled a token, and
lag = V - s. Versions of a branch that a rollback has left can be ahead of V; their distance counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from asyncrl.types import VersionSpan


def lag(step: int, version: int) -> int:
    """Distance in optimizer batches between the policy in training and the one that sampled."""
    return abs(step - version)


def stale_ranges(spans: Iterable[VersionSpan], step: int, bound: int) -> list[tuple[int, int]]:
    """Half-open ranges of trajectory positions whose lag exceeds `bound`, touching ones merged."""
    ranges: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.end <= span.start or lag(step, span.version) <= bound:
            continue
        if ranges and ranges[-1][1] == span.start:
            ranges[-1] = (ranges[-1][0], span.end)
        else:
            ranges.append((span.start, span.end))
    return ranges


def stale_mask(spans: Iterable[VersionSpan], step: int, bound: int, length: int) -> list[bool]:
    """Per position of a trajectory of `length` tokens: over the bound. False outside all spans."""
    mask = [False] * length
    for start, end in stale_ranges(spans, step, bound):
        mask[start:end] = [True] * (end - start)
    return mask


def fresh_until(spans: Iterable[VersionSpan], bound: int) -> int | None:
    """The last step at which no token is over the bound: oldest version + bound; None without tokens."""
    oldest = min((span.version for span in spans if span.end > span.start), default=None)
    return None if oldest is None else oldest + bound


class LagHistogram:
    """Tokens by lag, exact."""

    def __init__(self, tokens: Iterable[tuple[int, int]] = ()) -> None:
        self.tokens: Counter[int] = Counter()
        for value, count in tokens:
            self.add(value, count)

    @classmethod
    def of(cls, spans: Iterable[VersionSpan], step: int) -> LagHistogram:
        return cls((lag(step, span.version), span.end - span.start) for span in spans)

    def add(self, value: int, count: int) -> None:
        if count > 0:
            self.tokens[value] += count

    def merge(self, other: LagHistogram) -> None:
        self.tokens.update(other.tokens)

    @property
    def total(self) -> int:
        return self.tokens.total()

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in self.tokens.items()) / max(self.total, 1)

    @property
    def max(self) -> int:
        return max(self.tokens, default=0)

    def quantile(self, q: float) -> int:
        """The smallest lag that at least a share `q` of the tokens do not exceed; 0 without tokens."""
        seen = 0
        for value in sorted(self.tokens):
            seen += self.tokens[value]
            if seen >= q * self.total:
                return value
        return 0

    def over(self, bound: int) -> int:
        """Tokens with a lag above `bound`."""
        return sum(count for value, count in self.tokens.items() if value > bound)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self.tokens.items()))


def length_bucket(tokens: int) -> int:
    """Lower edge of the power-of-two bucket that a response length falls in, for reports; 0 below 32."""
    return 0 if tokens < 32 else 1 << (tokens.bit_length() - 1)


def masked_by_quarter(stale: Sequence[bool]) -> list[tuple[int, int]]:
    """(masked, all) tokens in each quarter of one response's model tokens, first quarter first."""
    n = len(stale)
    edges = [n * quarter // 4 for quarter in range(5)]
    return [(sum(stale[a:b]), b - a) for a, b in pairwise(edges)]
