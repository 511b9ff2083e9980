"""Engines and losses that take as long as they are told, for plan_error.py. The import registers
the losses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from asyncrl.algorithms.losses import LossInput, TokenLoss, loss
from asyncrl.algorithms.token_losses import reinforce
from asyncrl.engines.base import Engine, engines

# Seconds of `paced`: a step, each episode of the step, a trained token.
BASE_S = 0.025
SHARE_S = 0.0015
TRAIN_S = 0.0015
SLOWER = 5
ASLEEP_S = 0.3  # a step of asleep


def paced(**arguments: Any) -> Engine:
    """Return the embedded engine with steps of BASE_S + SHARE_S * n seconds for n requests under way.

    The steps last longer than their computation, so a busy machine changes nothing.
    """
    return slowed(arguments, lambda batcher: BASE_S + SHARE_S * len(batcher.runs))


def asleep(**arguments: Any) -> Engine:
    """Return the embedded engine with steps of ASLEEP_S: eight such engines fit on two cores."""
    return slowed(arguments, lambda batcher: ASLEEP_S)


def slowed(arguments: dict[str, Any], seconds: Callable[[Any], float]) -> Engine:
    engine = engines.load("torch")(**arguments)

    batcher = engine._batcher  # type: ignore[attr-defined]
    step = batcher.step

    def slowly() -> Any:
        ends = time.monotonic() + seconds(batcher)
        done = step()
        time.sleep(max(0.0, ends - time.monotonic()))
        return done

    batcher.step = slowly
    return engine  # type: ignore[return-value]


@loss("paced_reinforce", ratio="prox", linear=True)
def paced_reinforce(given: LossInput) -> TokenLoss:
    """Compute `reinforce`, and sleep TRAIN_S seconds for each token."""
    time.sleep(TRAIN_S * given.logp.numel())
    return reinforce.of(given)


@loss("paced_reinforce_slow", ratio="prox", linear=True)
def paced_reinforce_slow(given: LossInput) -> TokenLoss:
    """Compute `reinforce`, and sleep SLOWER * TRAIN_S seconds for each token."""
    time.sleep(SLOWER * TRAIN_S * given.logp.numel())
    return reinforce.of(given)
