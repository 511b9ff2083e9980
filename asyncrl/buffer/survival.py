"""How long things last, while some of them still run: the Kaplan-Meier estimate of the survival function.

Only those that have ended would give too short an estimate: what takes long still runs. One that runs counts
as censored: all that is known is that it lasts longer than until now (Kaplan and Meier, JASA 53, 1958). One
that began before the window of observation counts only from the age that it had when the window began
(delayed entry): of those that began with it, the short ones have left the window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike


class SurvivalCurve:
    """S(a): the share of the weight that lasts longer than a. With nothing known, S = 1 everywhere.

    Args:
        durations: [things] seconds until the end, or until now.
        weights: [things] 1, or tokens; what has weight 0 does not count.
        ended: [things] False for what still runs.
        entries: [things] the age, in seconds, from which each was observed; empty: all from 0.

    Example: durations 1, 2, 3 of weight 1, the second still runs: S falls to 2/3 at 1 and to 0 at 3.
    """

    def __init__(
        self, durations: ArrayLike, weights: ArrayLike, ended: ArrayLike, entries: ArrayLike = ()
    ) -> None:
        until, weight = np.asarray(durations, np.float64), np.asarray(weights, np.float64)
        since = np.asarray(entries, np.float64)
        since = since if since.size else np.full_like(until, -1.0)
        events = np.asarray(ended, np.bool_) & (since < until)
        self.longest = float(until.max(initial=0.0))  # duration, of what has ended or still runs
        self.times, place = np.unique(until[events], return_inverse=True)
        dying = np.bincount(place, weight[events], self.times.size).astype(np.float64)
        at_risk = _not_less(until, weight, self.times) - _not_less(since, weight, self.times)
        share = np.divide(dying, at_risk, out=np.zeros_like(dying), where=dying > 0)
        curve = np.cumprod(np.maximum(0.0, 1.0 - share))
        self.survival = np.where(curve < 1e-12, 0.0, curve)  # rounding

    def quantile(self, q: float) -> float:
        """The smallest duration, in seconds, that at least a share q does not exceed; inf if too much still
        runs to know it. The 0.9 quantile of 1, 2 … 10 is 9."""
        found = np.flatnonzero(self.survival <= 1.0 - q + 1e-9)
        return float(self.times[found[0]]) if found.size else math.inf

    def restricted_mean(self, limit: float) -> float:
        """Mean of min(duration, limit), in seconds: the area under S from 0 to `limit`."""
        inside = self.times < limit
        edges = np.concatenate(([0.0], self.times[inside], [limit]))
        heights = np.concatenate(([1.0], self.survival[inside]))
        return float(np.diff(edges)[heights > 0] @ heights[heights > 0])


def _not_less(values: np.ndarray, weight: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """For each of `ages`: the total weight of the values that are not less than it."""
    order = np.argsort(values, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(weight[order])))
    return total[-1] - total[np.searchsorted(values[order], ages)]


class RecentLifetimes:
    """Durations of the newest `size` things that have ended, so that the estimate follows a change of the
    workload. Times are of the caller's clock, in seconds. One entry may stand for many things that end
    together: `began` and `weight` are then arrays of the same length."""

    def __init__(self, size: int = 512) -> None:
        self.size = size
        self._ended: deque[tuple[np.ndarray, np.ndarray, float]] = deque()  # began, weight, ended
        self._since = -math.inf  # when the window begins: the newest end that is not in it any more

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, began: ArrayLike, ended: float, weight: ArrayLike = 1.0) -> None:
        self._ended.append((np.atleast_1d(began), np.atleast_1d(weight), ended))
        if len(self._ended) > self.size:
            self._since = self._ended.popleft()[-1]

    def curve(self, running: Iterable[tuple[ArrayLike, ArrayLike]], now: float) -> SurvivalCurve:
        """The estimate, from the window and from `running`: (began, weight) of what has not ended."""
        runs = [(np.atleast_1d(began), np.atleast_1d(weight), math.inf) for began, weight in running]
        rows = [*self._ended, *runs]
        if not rows:
            return SurvivalCurve((), (), ())
        starts, weights = [row[0] for row in rows], [row[1] for row in rows]
        ends = np.repeat([end for *_, end in rows], [start.size for start in starts])
        began, weight = np.concatenate(starts), np.concatenate(weights)
        entries = np.where(began < self._since, self._since - began, -1.0)  # -1: from the beginning
        return SurvivalCurve(np.minimum(ends, now) - began, weight, ends <= now, entries)
