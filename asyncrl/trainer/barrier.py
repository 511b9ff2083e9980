"""A batch behind a barrier: nothing is trained until all of it is in hand.

    held ──score──► prox, reference, V ──credit──► advantages ──prepare──► E epochs × K mini-batches

Several optimizer steps need it (prox is the policy before the first), and whatever compares an episode
with the whole batch. Mini-batches are of whole groups, each with its own denominator. The lag was checked
once, at the start of the batch; what the policy drifts inside it shows as `actor/ppo_kl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.losses import BatchTrace
from asyncrl.algorithms.normalise import AdvantageSums, Whitening, end_factor
from asyncrl.buffer.packing import bucket
from asyncrl.trainer.batch import Example, collate, with_said
from asyncrl.trainer.credit import (
    credit,
    penalised,
    rescaled,
    share,
    share_penalties,
    share_traces,
    with_penalised_siblings,
)
from asyncrl.trainer.metric_sums import MetricSums
from asyncrl.trainer.report import tally_credit

if TYPE_CHECKING:
    from asyncrl.trainer.step import Learner


def train_held(learner: Learner, held: Sequence[Example]) -> MetricSums:
    """Take the optimizer steps of a held batch; the tally is that of all ranks. A collective."""
    steps = learner.config.algorithm.steps_per_batch
    named = learner.world.gather({e.group for e in held}, set[str])
    groups = set().union(*named)
    examples, whole = _credited(learner, _scored(learner, held))
    examples = _prepared(learner, examples)
    for index in range(learner.recipe.optimizer_steps):
        epoch, k = divmod(index, steps)
        part_of = deal(groups, steps, f"{learner.config.seed}/{learner.step}/{epoch}")
        tally = MetricSums()
        for micro in _micro_batches(learner, [e for e in examples if part_of[e.group] == k]):
            learner.backward(micro, tally, progress=index / learner.recipe.optimizer_steps)
        whole.merge(learner.apply(tally))
    return whole


def deal(groups: Iterable[str], steps: int, key: str) -> dict[str, int]:
    """Group → mini-batch, shuffled by `key` and the groups' names: any number of ranks cuts alike."""
    order = sorted(groups, key=lambda group: blake2b(f"{key}/{group}".encode()).digest())
    return {group: i * steps // len(order) for i, group in enumerate(order)}


def _scored(learner: Learner, held: Sequence[Example]) -> list[Example]:
    """The examples with what the models say of them as they are now, where the recipe asks."""
    recipe, done = learner.recipe, list[Example]()
    of_policy = recipe.prox == "recompute" or recipe.shared_critic
    if not (of_policy or recipe.critic or recipe.reference):
        return list(held)
    for part in _micro_batches(learner, held):
        tokens = collate(part, learner.dtype).to(learner.world.device).selected
        said: dict[str, Tensor | None] = {}
        with torch.no_grad():
            if of_policy:
                scores = learner.policy(tokens, collision=recipe.advantage.whole_group)
                said |= {"prox": scores.logp, "collision": scores.collision, "value": scores.value}
            if learner.critic is not None:
                with learner.watch.phase("values"):
                    said["value"] = learner.critic(tokens)
        if learner.reference is not None:
            with learner.watch.phase("ref"):
                said["reference"] = learner.reference.logp(tokens)
        for name, values in said.items():
            if values is not None and not (name == "prox" and recipe.prox != "recompute"):
                part = with_said(part, name, values)
        done += part
        learner.pulse()
    return done


def _credited(learner: Learner, examples: Sequence[Example]) -> tuple[list[Example], MetricSums]:
    """The examples with their advantages, compared with and divided by the whole batch; and what there is to
    tell of them, of all ranks."""
    recipe, tally = learner.recipe, MetricSums()
    if learner.config.kl.where == "reward":
        pairs = [penalised(e, learner.state["kl_coef"], recipe.kl_estimator) for e in examples]
        penalties = share_penalties(learner.world, pairs)
        examples = [with_penalised_siblings(e, penalties) for e, _ in pairs]
    traces = share_traces(learner.world, examples) if recipe.advantage.whole_group else {}
    with learner.watch.phase("adv"):
        examples = [credit(e, recipe, traces.get(e.group, ())) for e in examples]
    tally_credit(tally, examples)
    whole = MetricSums()
    for part in learner.world.gather(tally, MetricSums):
        whole.merge(part)
    sums = AdvantageSums.from_totals(whole.totals)
    if recipe.scale == "whiten":
        change = Whitening.of(sums).apply
    elif recipe.scale == "whiten_running":
        change = (learner.whitening or Whitening.of(sums)).apply  # the first batch has no earlier ones
    else:
        factor = end_factor(recipe.scale, sums)

        def change(advantage: np.ndarray) -> np.ndarray:
            return advantage * factor

    return [rescaled(e, change) for e in examples], whole


def _prepared(learner: Learner, examples: Sequence[Example]) -> list[Example]:
    """The examples with what the loss says of each token in view of the whole batch."""
    prepare = learner.recipe.loss.prepare
    if prepare is None:
        return list(examples)
    everyone = share(learner.world, examples, [_view(e) for e in examples])
    traces = [
        BatchTrace(
            group=packed.group,
            reward=packed.own.reward,
            advantage=packed.array("advantage"),
            prox=packed.array("prox"),
            mu=packed.array("mu"),
            fresh=packed.array("fresh").astype(bool),
            reference=packed.array("reference") if "reference" in packed.arrays else None,
        )
        for packed in everyone
    ]
    said = dict(zip((packed.uid for packed in everyone), prepare(traces), strict=True))
    return [replace(e, prepared=np.asarray(said[e.row.uid], dtype=np.float64)) for e in examples]


def _view(e: Example) -> dict[str, np.ndarray]:
    """An episode's arrays for a BatchTrace; a token without finite log-probs is not fresh, and they are 0."""
    assert e.prox is not None and e.advantage is not None
    finite = np.isfinite(e.mu) & np.isfinite(e.prox)
    view = {
        "advantage": e.advantage,
        "prox": np.where(finite, e.prox, 0.0),
        "mu": np.where(finite, e.mu, 0.0),
        "fresh": e.fresh & finite,
    }
    return view if e.reference is None else view | {"reference": e.reference}


def _micro_batches(learner: Learner, examples: Sequence[Example]) -> list[list[Example]]:
    """Cut this rank's examples under the token budget, padded to the same count on all ranks."""
    budget = learner.config.trainer.micro_batch_tokens
    packed = bucket([e.longest for e in examples], budget, [len(e.rows) for e in examples])
    count = max(learner.world.gather(len(packed), int))
    cut = [[examples[i] for i in part] for part in packed]
    return cut + [[] for _ in range(count - len(cut))]
