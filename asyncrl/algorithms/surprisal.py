"""A sequential test of sampled tokens: their surprisal must have the mean and variance of their distribution.

A token x that was sampled from p has the surprisal -log p(x), with mean H (the entropy of p) and variance
V = Σ p·(log p + H)². A sampler that leaves out unlikely tokens (top_p, top_k, min_p), or samples at another
temperature, has another mean. Its log-probs need not show that: a sampler may report the log-probs that it
should have used.
"""

from __future__ import annotations

import math

SCALE = 500.0  # nats²; the limit is tightest, relative to the deviation, near a spread of this size


class SurprisalTest:
    """Tests cumulatively whether tokens were sampled from the distributions that score them.

    With ξ = -log p(x) - H of each token, `deviation` is M = Σ ξ, a martingale if p has sampled the tokens,
    and `spread` is Q = (Σ ξ² + 2 Σ V) / 3. exp(λM - λ²Q/2) is then a supermartingale for every λ, whatever
    the size of ξ: B. Delyon, "Exponential inequalities for sums of weakly dependent variables", Electronic
    Journal of Probability 14 (2009), from exp(x - x²/6) <= 1 + x + x²/3. Its mean over λ from a normal
    distribution of variance 1 / SCALE (H. Robbins, "Statistical methods related to the law of the iterated
    logarithm", 1970; S. Howard et al., "Time-uniform, nonparametric, nonasymptotic confidence sequences",
    2021) and Ville's inequality bound the chance that |M| ever reaches `limit` by `alarm_rate`, however often
    the test is repeated.

    Example: after 1,024 tokens with V = 1, Q is about 1,024. At an alarm rate of 1e-5, |M| must stay below
    sqrt((1024 + 500) * (2 * ln(1e5) + ln(1 + 1024 / 500))) = 192 nats. Sampling with top_p = 0.9 gives
    M = -400 or so.
    """

    def __init__(self, alarm_rate: float) -> None:
        self._alarm_rate = alarm_rate
        self.tokens = 0
        self.deviation = 0.0  # nats
        self.spread = 0.0  # nats²
        self._variance = 0.0  # nats²

    def add(self, *, tokens: int, deviation: float, squares: float, variance: float) -> None:
        """Add Σ ξ, Σ ξ² and Σ V of some tokens."""
        self.tokens += tokens
        self.deviation += deviation
        self.spread += (squares + 2 * variance) / 3
        self._variance += variance

    @property
    def z(self) -> float:
        """Return the deviation in standard deviations; about normal if p has sampled the tokens. The result
        is inf if a sum is not finite."""
        if not math.isfinite(self.deviation + self.spread):
            return math.inf
        return self.deviation / math.sqrt(self.spread) if self.spread > 0 else 0.0

    @property
    def limit(self) -> float:
        """Return the limit on |M|, in nats."""
        scaled_spread = 1 + self.spread / SCALE
        return math.sqrt(
            SCALE * scaled_spread * (2 * math.log(1 / self._alarm_rate) + math.log(scaled_spread))
        )

    def rounding_allowance(self, rounding: float) -> float:
        """Return how far, in nats, M may drift if the sampler's log-probs are off by `rounding` nats.

        A sampler with the log-probs log p + δ shifts the mean of ξ by Cov(δ, -log p), which is at most
        sd(δ)·√V, and the sum over n tokens by at most sd(δ)·√(n·Σ V), by the Cauchy-Schwarz inequality.
        """
        return rounding * math.sqrt(self.tokens * self._variance)

    def has_failed(self, rounding: float) -> bool:
        """Return True if neither chance nor rounding explains the deviation."""
        if not math.isfinite(self.deviation + self.spread):
            return True
        return abs(self.deviation) >= self.limit + self.rounding_allowance(rounding)
