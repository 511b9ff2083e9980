"""A batch behind a barrier: what the ranks exchange about its episodes before the first backward.

    scored ──compared──► advantages ──prepared──► what the loss prepares ──deal──► mini-batches

Several optimizer steps per batch need it (prox is the policy before the first), and so does whatever
compares an episode with the whole batch. `compared` and `prepared` are collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from asyncrl.algorithms.credit import Trace
from asyncrl.algorithms.losses import Loss
from asyncrl.algorithms.normalise import Whitening
from asyncrl.algorithms.recipe import Recipe
from asyncrl.trainer.batch import Example
from asyncrl.trainer.credit import (
    credit,
    penalised,
    rescaled,
    share_penalties,
    share_traces,
    with_penalised_siblings,
)
from asyncrl.trainer.report import MetricSums, advantage_factor, advantage_tokens, merged, tally_credit
from asyncrl.trainer.world import World


def compared(
    world: World,
    examples: Sequence[Example],
    recipe: Recipe,
    kl_penalty: float | None,
    whitening: Whitening | None,
) -> tuple[list[Example], MetricSums]:
    """The examples with their advantages, compared with and divided by the whole batch, and the tally of all
    ranks' advantages.

    `kl_penalty`: coefficient of the KL in the reward, None without. `whitening`: of earlier batches.
    """
    if kl_penalty is not None:
        pairs = [penalised(e, kl_penalty, recipe.kl_estimator) for e in examples]
        penalties = share_penalties(world, pairs)
        examples = [with_penalised_siblings(e, penalties) for e, _ in pairs]
    traces = defaultdict[str, list[Trace]](list)
    if recipe.advantage.whole_group:
        for trace in share_traces(world, examples, [_scores(e) for e in examples]):
            traces[trace.group].append(trace)
    examples = [credit(e, recipe, traces[e.group]) for e in examples]
    tally = MetricSums()
    tally_credit(tally, examples)
    whole = merged(world.gather_data(tally, MetricSums))
    change = scaling(recipe, whole, whitening)
    return [rescaled(e, change) for e in examples], whole


def scaling(
    recipe: Recipe, whole: MetricSums, whitening: Whitening | None
) -> Callable[[np.ndarray], np.ndarray]:
    """The function that the batch's statistics apply to each advantage."""
    if recipe.scale in ("whiten", "whiten_running"):
        earlier = whitening if recipe.scale == "whiten_running" else None  # the first batch has none
        return (earlier or Whitening.of(advantage_tokens(whole))).apply
    factor = advantage_factor(recipe.scale, whole)
    return lambda advantage: advantage * factor


def prepared(world: World, examples: Sequence[Example], loss: Loss) -> list[Example]:
    """The examples with what the loss's `prepare` gives each token in view of the whole batch."""
    if loss.prepare is None:
        return list(examples)
    traces = share_traces(world, examples, [_view(e) for e in examples])
    found = dict(zip((trace.uid for trace in traces), loss.prepare(traces), strict=True))
    return [replace(e, prepared=np.asarray(found[e.planned.uid], dtype=np.float64)) for e in examples]


def _scores(e: Example) -> dict[str, np.ndarray]:
    """An episode's arrays for an advantage that compares traces."""
    assert e.prox is not None and e.collision is not None
    return {"rewards": e.rewards, "prox": e.prox, "collision": e.collision}


def _view(e: Example) -> dict[str, np.ndarray]:
    """An episode's arrays for a loss; a token without finite log-probs is not fresh, and they are 0."""
    assert e.prox is not None and e.advantage is not None
    given = {"prox": e.prox, "mu": e.mu, "reference": e.reference}
    logs = {name: array for name, array in given.items() if array is not None}
    finite = np.logical_and.reduce([np.isfinite(array) for array in logs.values()])
    held = {name: np.where(finite, array, 0.0) for name, array in logs.items()}
    return {**held, "advantage": e.advantage, "fresh": e.fresh & finite}


def deal(groups: Iterable[str], steps: int, key: str) -> dict[str, int]:
    """Group → mini-batch, shuffled by `key` and the groups' names: the same for any number of ranks."""
    order = sorted(groups, key=lambda group: blake2b(f"{key}/{group}".encode()).digest())
    return {group: i * steps // len(order) for i, group in enumerate(order)}
