"""A batch behind a barrier: the ranks' exchange about its episodes before the first backward.

    scored ──compare_batch──► advantages ──prepare_batch──► prepared ──partition_groups──► mini-batches

A recipe needs the barrier for several optimizer steps per batch (prox is the policy before the first step),
and to compare an episode with the whole batch. `compare_batch` and `prepare_batch` are collectives.
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
from asyncrl.trainer.advantages import (
    gather_traces,
    with_advantages,
    with_kl_penalty,
    with_penalised_siblings,
    with_scaled_advantages,
)
from asyncrl.trainer.batch import TrainingSample
from asyncrl.trainer.report import (
    BatchSums,
    MetricSums,
    advantage_factor,
    merged_sums,
    tally_advantages,
)
from asyncrl.trainer.world import World


def compare_batch(
    world: World,
    samples: Sequence[TrainingSample],
    recipe: Recipe,
    kl_penalty: float | None,
    whitening: Whitening | None,
) -> tuple[list[TrainingSample], MetricSums]:
    """Return the samples with their advantages, compared with and divided by the whole batch, and the tally
    of all ranks' advantages.

    `kl_penalty`: coefficient of the KL in the reward; None: no such penalty. `whitening`: statistics of
    earlier batches.
    """
    if kl_penalty is not None:
        penalised_pairs = [with_kl_penalty(sample, kl_penalty, recipe.kl_estimator) for sample in samples]
        rank_penalties = [
            (sample.group, sample.planned.place, turn_penalties) for sample, turn_penalties in penalised_pairs
        ]
        all_penalties = world.gather_data(rank_penalties, list[tuple[str, int, list[float]]])
        penalties = {
            (group, sibling): turn_penalties
            for part in all_penalties
            for group, sibling, turn_penalties in part
        }
        samples = [with_penalised_siblings(sample, penalties) for sample, _ in penalised_pairs]

    traces = defaultdict[str, list[Trace]](list)
    if recipe.advantage.whole_group:
        for trace in gather_traces(world, samples, [_trace_arrays(sample) for sample in samples]):
            traces[trace.group].append(trace)

    samples = [with_advantages(sample, recipe, traces[sample.group]) for sample in samples]
    tally = MetricSums()
    tally_advantages(tally, samples)
    batch_tally = merged_sums(world.gather_data(tally, MetricSums))
    scale_advantages = advantage_scaling(recipe, batch_tally.sums, whitening)

    return [with_scaled_advantages(sample, scale_advantages) for sample in samples], batch_tally


def advantage_scaling(
    recipe: Recipe, sums: BatchSums, whitening: Whitening | None
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that the batch's statistics apply to each advantage."""
    if recipe.scale in ("whiten", "whiten_running"):
        # The first batch has no earlier statistics.
        earlier_statistics = whitening if recipe.scale == "whiten_running" else None
        return (earlier_statistics or Whitening.of(sums.token_advantages)).apply
    scale_factor = advantage_factor(recipe.scale, sums)
    return lambda advantage: advantage * scale_factor


def prepare_batch(world: World, samples: Sequence[TrainingSample], loss: Loss) -> list[TrainingSample]:
    """Return the samples with the numbers that the loss's `prepare` gives each token in view of the whole
    batch."""
    if loss.prepare is None:
        return list(samples)
    traces = gather_traces(world, samples, [_loss_arrays(sample) for sample in samples])
    prepared_by_uid = dict(zip((trace.uid for trace in traces), loss.prepare(traces), strict=True))
    return [
        replace(sample, prepared=np.asarray(prepared_by_uid[sample.planned.uid], dtype=np.float64))
        for sample in samples
    ]


def _trace_arrays(sample: TrainingSample) -> dict[str, np.ndarray]:
    """Return an episode's arrays for an advantage that compares traces."""
    assert sample.proximal_logprobs is not None and sample.collision is not None
    return {"rewards": sample.rewards, "prox": sample.proximal_logprobs, "collision": sample.collision}


def _loss_arrays(sample: TrainingSample) -> dict[str, np.ndarray]:
    """Return an episode's arrays for a loss. A token without finite log-probs is not trainable, and its
    log-probs are set to 0."""
    assert sample.proximal_logprobs is not None and sample.advantage is not None
    named_logprobs = {
        "prox": sample.proximal_logprobs,
        "mu": sample.rollout_logprobs,
        "reference": sample.reference,
    }
    known_logprobs = {name: array for name, array in named_logprobs.items() if array is not None}
    is_finite = np.logical_and.reduce([np.isfinite(array) for array in known_logprobs.values()])
    finite_logprobs = {name: np.where(is_finite, array, 0.0) for name, array in known_logprobs.items()}

    return {
        **finite_logprobs,
        "advantage": sample.advantage,
        "trainable": sample.within_staleness & is_finite,
    }


def partition_groups(groups: Iterable[str], mini_batches: int, shuffle_key: str) -> dict[str, int]:
    """Map each group to a mini-batch, shuffled by `shuffle_key` and the groups' names: the same for any
    number of ranks."""
    shuffled_groups = sorted(groups, key=lambda group: blake2b(f"{shuffle_key}/{group}".encode()).digest())
    return {
        group: index * mini_batches // len(shuffled_groups) for index, group in enumerate(shuffled_groups)
    }
