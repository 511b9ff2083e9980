"""Detects spikes of the gradient norm.

A batch spikes if its gradient norm is not finite, or if it is more than `trainer.spike_factor` times the
median of the batches before (up to WINDOW, from LEAST on). The policy loss would not do: its advantages have
mean zero, so it is small and of either sign while a run diverges.
"""

from __future__ import annotations

import math
from statistics import median

from asyncrl.errors import AsyncrlError

WINDOW, LEAST = 32, 8  # batches
NORM = "grad_norm/"  # in a learner's state, so that repeated steps are judged as they were


class SpikeError(AsyncrlError):
    """The batch of a step (1-based) spiked, and is to be left out: its gradient `norm` exceeds `limit`."""

    def __init__(self, step: int, norm: float, limit: float) -> None:
        over = f", over {limit:g} (trainer.spike_factor)" if math.isfinite(norm) else ""
        super().__init__(f"step {step} spiked: its gradient norm is {norm:g}{over}")


def norm_limit(state: dict[str, float], factor: float) -> float:
    """The largest norm that is no spike."""
    norms = [norm for name, norm in state.items() if name.startswith(NORM)]
    return factor * median(norms) if factor and len(norms) >= LEAST else math.inf


def note_norm(state: dict[str, float], step: int, norm: float) -> None:
    """The norm of a step that was taken."""
    state[f"{NORM}{step % WINDOW}"] = norm
