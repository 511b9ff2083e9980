"""Scaling of advantages by their batch, from sums that add up over micro-batches and ranks.

    advantages ──of──► AdvantageSums ──+ over ranks──► end_factor: one number, on the gradient at the end
                                                  └──► Whitening: per token, before the backward

Division by a number of the batch is exact at the end of a streamed batch. Subtraction of a batch mean is not:
whitening waits for the whole batch, or takes statistics of earlier ones. Every std has ddof 1, and is over
model tokens (or episodes) before any staleness or correction mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from asyncrl.algorithms.credit import EPSILON, Scale

DECAY = 0.9  # what running statistics keep per batch: they are those of about the last ten
TOTAL = "_advantage/"  # names of the sums among a batch's totals
MEAN, STD = "advantage_mean", "advantage_std"  # names of running statistics in a checkpoint


@dataclass(frozen=True)
class AdvantageSums:
    """Numbers of tokens and episodes, sums of their advantages and of the squares.

    An episode's advantage is the mean of its tokens'; `nonzero` counts episodes with a token whose is not 0.
    """

    tokens: float = 0.0
    token_sum: float = 0.0
    token_squares: float = 0.0
    episodes: float = 0.0
    episode_sum: float = 0.0
    episode_squares: float = 0.0
    nonzero: float = 0.0

    @classmethod
    def of(cls, advantages: Sequence[np.ndarray]) -> AdvantageSums:
        """Of episodes, [T_i] float64 each. Those without model tokens do not count."""
        filled = [a for a in advantages if len(a)]
        flat = np.concatenate([*filled, np.zeros(0)])
        means = np.array([a.mean() for a in filled])
        return cls(
            *(float(len(flat)), float(flat.sum()), float((flat**2).sum())),
            *(float(len(means)), float(means.sum()), float((means**2).sum())),
            nonzero=float(sum(bool(a.any()) for a in filled)),
        )

    def totals(self) -> dict[str, float]:
        """By name, for a tally; totals of parts of a batch add up to those of the batch."""
        return {TOTAL + name: value for name, value in asdict(self).items()}

    @classmethod
    def from_totals(cls, totals: Mapping[str, float]) -> AdvantageSums:
        """From all totals of a batch. What is missing is 0."""
        return cls(*(totals.get(TOTAL + field.name, 0.0) for field in fields(cls)))

    @property
    def episode_std(self) -> float:
        return _std(self.episodes, self.episode_sum, self.episode_squares)

    @property
    def token_std(self) -> float:
        return _std(self.tokens, self.token_sum, self.token_squares)


def end_factor(scale: Scale, sums: AdvantageSums) -> float:
    """The one number that multiplies every advantage of the batch.

    `batch_std`: 1 / (std over episodes + 1e-6) (ScaleRL, arXiv 2510.13786). `nonzero`: episodes / those whose
    advantage is not 0 (GPG, arXiv 2504.02546). 1 for other scales, and where all advantages are equal or 0.
    """
    if scale == "batch_std" and sums.episode_std > EPSILON:
        return 1 / (sums.episode_std + EPSILON)
    if scale == "nonzero" and sums.nonzero:
        return sums.episodes / sums.nonzero
    return 1.0


@dataclass(frozen=True)
class Whitening:
    """A -> (A - mean) / (std + 1e-6), statistics over tokens. std 0: not known."""

    mean: float
    std: float

    @classmethod
    def of(cls, sums: AdvantageSums) -> Whitening:
        """By the batch's own statistics; advantages that are all equal become 0."""
        return cls(sums.token_sum / max(sums.tokens, 1.0), sums.token_std)

    @classmethod
    def updated(cls, earlier: Whitening | None, sums: AdvantageSums) -> Whitening:
        """Running statistics after one more batch: mean and variance of a mixture, 0.9 earlier and 0.1 new.

        A batch in which all advantages are equal says nothing of their spread and changes nothing.
        """
        new = cls.of(sums)
        if new.std <= EPSILON:
            return earlier or cls(0.0, 0.0)
        if earlier is None:
            return new
        mean = DECAY * earlier.mean + (1 - DECAY) * new.mean
        variance = sum(
            share * (part.std**2 + (part.mean - mean) ** 2)
            for share, part in ((DECAY, earlier), (1 - DECAY, new))
        )
        return cls(mean, math.sqrt(variance))

    def apply(self, advantage: np.ndarray) -> np.ndarray:
        """[T] -> [T]."""
        return (advantage - self.mean) / (self.std + EPSILON)

    def state(self) -> dict[str, float]:
        """For a checkpoint; nothing while not known."""
        return {MEAN: self.mean, STD: self.std} if self.std else {}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Whitening | None:
        """From all numbers of a checkpoint; None while not known."""
        return cls(state[MEAN], state[STD]) if STD in state else None


def _std(count: float, total: float, squares: float) -> float:
    """ddof 1; 0 for fewer than two, and where the spread is within rounding of the sums."""
    spread = squares - total**2 / max(count, 1.0)
    return math.sqrt(spread / (count - 1)) if count > 1 and spread > 1e-12 * squares else 0.0
