"""How far a run is, and when its last step will be done. Pure: the caller passes the time in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

BATCH = "async/batch_share"  # of the step under way, 0 to 1: an estimate, see `Reporter.batch_share`
LEVELS = "▁▂▃▄▅▆▇█"


@dataclass
class Progress:
    """`steps` are those done and the share of the next one, so that something is known before the first."""

    began: float
    steps: float = 0.0
    origin: tuple[float, float] | None = None  # (time, steps) at which this launch began to train

    def update(self, steps: float, training: bool, now: float) -> None:
        self.steps = steps
        if training and self.origin is None:
            self.origin = now, steps

    def remaining(self, total: int, now: float) -> float | None:
        """Seconds to the last step, at the mean speed of this launch; None before its first step is done. For
        example 1.5 of 10 steps in 30 s leave 8.5 of them for 170 s."""
        since, before = self.origin or (now, self.steps)
        done = self.steps - before
        return (total - self.steps) * (now - since) / done if done >= 1 else None

    def line(self, total: int, now: float) -> str:
        left = self.remaining(total, now)
        eta = "" if left is None or self.steps >= total else f", ETA {clock(left)}"
        return f"elapsed {clock(now - self.began)}{eta}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters, each the mean of as many values as the others (within one), between the
    least and the largest of these means. Values that are not finite are left out."""
    known = [value for value in values if math.isfinite(value)]
    count = min(width, len(known))
    edges = [len(known) * at // count for at in range(count + 1)] if count else []
    means = [sum(known[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    least, most = min(means, default=0.0), max(means, default=0.0)
    span = most - least
    return "".join(
        LEVELS[min(len(LEVELS) - 1, int((mean - least) / span * len(LEVELS)))] if span else LEVELS[0]
        for mean in means
    )
