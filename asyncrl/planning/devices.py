"""Engines and trainer on devices of their own, or by shifts on the same ones: seconds of a step. Pure.

With g and t device-seconds of a batch's sampling and training, and s seconds of two changes, N devices take
max(g / (N - k), t / k) apart, where k of them train, and (g + t) / N + s by shifts, if nothing else limits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import cache

import msgspec
from msgspec.structs import replace

from asyncrl.planning.forecast import LEAST_STEPS, MOST_EPISODES, Forecast, simulate
from asyncrl.planning.simulator import Workload

MOST_STEPS = 100  # of a simulated run: what flow control adds in the first ones is little of them
ALIKE = 0.03  # seconds of a step that differ by less are alike: then the lower lag is better


class Placed(msgspec.Struct, frozen=True):
    """One way to use devices. `formula`: seconds of a step by arithmetic, with two changes for each."""

    engines: int
    ranks: int
    formula: float
    forecast: Forecast


class Comparison(msgspec.Struct, frozen=True):
    """What so many devices do. None: there are too few, or engines do not divide them. `elastic`: no step is
    shorter where a trainer that waits lends its devices to engines, at the price of two changes each time."""

    apart: Placed | None
    shifts: Placed | None
    elastic: float = math.inf

    @property
    def fastest(self) -> float:
        return min(placed.forecast.step_s for placed in (self.apart, self.shifts) if placed)

    @property
    def best(self) -> Placed:
        """The fastest; of two that are about as fast, the one with less lag."""
        alike = [one for one in (self.apart, self.shifts) if one]
        alike = [one for one in alike if one.forecast.step_s <= self.fastest * (1 + ALIKE)]
        return min(alike, key=lambda placed: placed.forecast.lag)

    @property
    def gain(self) -> float:
        """The most that elastic devices could save, as a share of the fastest step."""
        return max(0.0, 1 - self.elastic / self.fastest)


def halves(work: Workload) -> tuple[float, float]:
    """Seconds of a batch's sampling with all slots in use, and of its training."""
    token = max(1 / work.speed, work.base + work.slots / work.rate) / work.slots
    return _tokens(work) * token, work.train + work.commit


def _tokens(work: Workload) -> float:
    """Sampled for a batch, with those of filtered groups."""
    episodes = [sum(turn.tokens for turn in episode) for group in work.recorded for episode in group]
    return work.buffer.batch_size * statistics.mean(episodes) / (1 - work.filtered)


def compare(work: Callable[[int, int], Workload], devices: int, shift: float, tp: int = 1) -> Comparison:
    """Compare ways to use devices. `work`: of so many engines and ranks, apart; `tp`: devices of an engine.
    From the best split by arithmetic it goes to better neighbours."""

    def played(engines: int, own: Workload, formula: float) -> Placed:
        steps = min(MOST_STEPS, max(LEAST_STEPS, MOST_EPISODES // own.buffer.batch_size))
        return Placed(engines, own.ranks, formula, simulate(own, steps))

    def split(engines: int) -> Workload:
        return work(engines, devices - engines * tp)

    @cache
    def apart(engines: int) -> Placed:
        own = split(engines)
        return played(engines, own, max(halves(own)))

    @cache
    def elastic(engines: int) -> float:
        """By arithmetic no device idles; in the simulated run they come and go for free."""
        own = split(engines)
        lasting = engines * tp
        free = played(engines, replace(own, lent=own.rate / lasting * own.ranks), 0.0).forecast.step_s
        used = _tokens(own) / own.rate * lasting + (own.train + own.commit + shift) * own.ranks
        return min(apart(engines).forecast.step_s, max(free, used / devices))

    def descend(seconds: Callable[[int], float], engines: int) -> int:
        near = (engines, engines - 1, engines + 1)
        best = min((n for n in near if n in possible), key=seconds)
        return best if best == engines else descend(seconds, best)

    shifts = None
    possible = range(1, (devices - 1) // tp + 1)
    if devices % tp == 0:
        own = replace(work(devices // tp, devices), shift=shift)
        shifts = played(devices // tp, own, sum(halves(own)) + shift)

    if not possible:
        return Comparison(None, shifts)
    best = descend(lambda n: apart(n).forecast.step_s, min(possible, key=lambda n: max(halves(split(n)))))
    return Comparison(apart(best), shifts, elastic(descend(elastic, best)))
