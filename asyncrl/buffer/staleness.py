"""Staleness of tokens: the arithmetic behind the promise that no token over the bound is trained.

V is the step being trained (completed optimizer batches), s the version that sampled a token, and
lag = V - s. Versions of a branch that a rollback has left can be ahead of V; their distance counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from asyncrl.types import VersionSpan


def lag(step: int, version: int) -> int:
    """Distance in optimizer batches between the policy in training and the one that sampled."""
    return abs(step - version)


def token_lags(spans: Iterable[VersionSpan], step: int) -> list[int]:
    """The lag of every token of the spans, in order."""
    return [value for span in spans for value in [lag(step, span.version)] * (span.end - span.start)]


def stale_mask(lags: Iterable[int], bound: int) -> list[bool]:
    """Which tokens are over the bound: these never contribute to a gradient."""
    return [value > bound for value in lags]


class LagHistogram:
    """Tokens by lag, exact. All figures are 0 without tokens."""

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self.tokens = {value: count for value, count in sorted(tokens.items()) if count > 0}
        self.total = sum(self.tokens.values())

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in self.tokens.items()) / max(self.total, 1)

    @property
    def max(self) -> int:
        return max(self.tokens, default=0)

    def quantile(self, q: float) -> int:
        """The smallest lag that at least a share `q` of the tokens do not exceed."""
        seen = 0
        for value, count in self.tokens.items():
            seen += count
            if seen >= q * self.total:
                return value
        return 0


def length_bucket(tokens: int) -> int:
    """Lower edge of the power-of-two bucket that a response length falls in, for reports; 0 below 32."""
    return 0 if tokens < 32 else 1 << (tokens.bit_length() - 1)


def masked_by_quarter(stale: Sequence[bool]) -> list[tuple[int, int]]:
    """(masked, all) tokens in each quarter of one response's model tokens, first quarter first."""
    n = len(stale)
    edges = [n * quarter // 4 for quarter in range(5)]
    return [(sum(stale[a:b]), b - a) for a, b in pairwise(edges)]
