"""Compares engines and trainer on separate devices with shifts on the same devices: seconds of a step. Pure.

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

from asyncrl.planning.forecast import MAX_EPISODES, MIN_STEPS, Forecast, simulate
from asyncrl.planning.simulator import Workload

# Steps of a simulated run; the lag that flow control adds in the first steps hardly counts among so many.
MAX_STEPS = 100
SIMILAR_FRACTION = 0.03  # Seconds of a step that differ by less count as equal; then the lower lag is better.


class Placed(msgspec.Struct, frozen=True):
    """One way to use devices. `formula`: seconds of a step by arithmetic, including both changes of the
    devices."""

    engines: int
    ranks: int
    formula: float
    forecast: Forecast


class Comparison(msgspec.Struct, frozen=True):
    """Forecasts for a number of devices. None: there are too few devices, or engines do not divide them.
    `elastic`: a lower bound of a step's seconds if a waiting trainer lends its devices to engines, at the
    cost of two changes each time."""

    apart: Placed | None
    shifts: Placed | None
    elastic: float = math.inf

    @property
    def fastest(self) -> float:
        return min(placed.forecast.step_s for placed in (self.apart, self.shifts) if placed)

    @property
    def best(self) -> Placed:
        """The fastest way; of two about equally fast ways, the one with less lag."""
        placements = [placed for placed in (self.apart, self.shifts) if placed]
        placements = [
            placed for placed in placements if placed.forecast.step_s <= self.fastest * (1 + SIMILAR_FRACTION)
        ]
        return min(placements, key=lambda placed: placed.forecast.lag)

    @property
    def gain(self) -> float:
        """The largest saving by elastic devices, as a fraction of the fastest step."""
        return max(0.0, 1 - self.elastic / self.fastest)


def batch_seconds(work: Workload) -> tuple[float, float]:
    """Return the seconds of a batch's sampling with all slots in use, and of its training."""
    token_seconds = max(1 / work.speed, work.base + work.slots / work.rate) / work.slots
    return _batch_tokens(work) * token_seconds, work.train + work.commit


def _batch_tokens(work: Workload) -> float:
    """Return the tokens that are sampled for a batch, including filtered groups."""
    episodes = [sum(turn.tokens for turn in episode) for group in work.recorded for episode in group]
    return work.buffer.batch_size * statistics.mean(episodes) / (1 - work.filtered)


def compare(
    workload_for: Callable[[int, int], Workload], devices: int, shift_seconds: float, tp: int = 1
) -> Comparison:
    """Compare ways to use devices. `workload_for`: the workload for numbers of engines and ranks, apart;
    `tp`: devices of an engine. The search starts from the best split by arithmetic and descends to better
    neighbours."""

    def simulate_engines(engines: int, workload: Workload, formula: float) -> Placed:
        steps = min(MAX_STEPS, max(MIN_STEPS, MAX_EPISODES // workload.buffer.batch_size))
        return Placed(
            engines=engines, ranks=workload.ranks, formula=formula, forecast=simulate(workload, steps)
        )

    def split(engine_count: int) -> Workload:
        return workload_for(engine_count, devices - engine_count * tp)

    @cache
    def apart(engine_count: int) -> Placed:
        workload = split(engine_count)
        return simulate_engines(engine_count, workload, max(batch_seconds(workload)))

    @cache
    def elastic(engine_count: int) -> float:
        """Return the seconds of a step by arithmetic, where no device idles, and by a simulated run in which
        lending costs nothing."""
        workload = split(engine_count)
        engine_devices = engine_count * tp
        lent_step_seconds = simulate_engines(
            engine_count, replace(workload, lent=workload.rate / engine_devices * workload.ranks), 0.0
        ).forecast.step_s
        device_seconds = (
            _batch_tokens(workload) / workload.rate * engine_devices
            + (workload.train + workload.commit + shift_seconds) * workload.ranks
        )
        return min(apart(engine_count).forecast.step_s, max(lent_step_seconds, device_seconds / devices))

    def descend(seconds: Callable[[int], float], engine_count: int) -> int:
        neighbours = (engine_count, engine_count - 1, engine_count + 1)
        best = min((neighbour for neighbour in neighbours if neighbour in engine_counts), key=seconds)
        return best if best == engine_count else descend(seconds, best)

    shifts = None
    engine_counts = range(1, (devices - 1) // tp + 1)
    if devices % tp == 0:
        shifted_workload = replace(workload_for(devices // tp, devices), shift=shift_seconds)
        shifts = simulate_engines(
            devices // tp, shifted_workload, sum(batch_seconds(shifted_workload)) + shift_seconds
        )

    if not engine_counts:
        return Comparison(apart=None, shifts=shifts)

    best_split = descend(
        lambda count: apart(count).forecast.step_s,
        min(engine_counts, key=lambda count: max(batch_seconds(split(count)))),
    )
    best_elastic = elastic(descend(elastic, best_split))
    return Comparison(apart=apart(best_split), shifts=shifts, elastic=best_elastic)
