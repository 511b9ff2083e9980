"""Several optimizer steps on one batch: nothing is trained until all of it is in hand.

prox is computed for every token before the first step moves the policy; then K mini-batches of whole
groups follow, each with its own denominator. The lag was checked once, at the start of the batch;
what the policy drifts inside it shows as `actor/ppo_kl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.buffer.packing import bucket
from asyncrl.trainer.batch import Example, collate
from asyncrl.trainer.tally import Tally

if TYPE_CHECKING:
    from asyncrl.trainer.step import Learner


def train_held(learner: Learner, held: Sequence[Example]) -> Tally:
    """Take the K optimizer steps of a held batch; the tally is that of all ranks. A collective."""
    part_of = _deal(learner, held)
    examples = _with_prox(learner, held)
    whole = Tally()
    for k in range(learner.config.algorithm.steps_per_batch):
        tally = Tally()
        for micro in _micro_batches(learner, [e for e in examples if part_of[e.group] == k]):
            learner.backward(micro, tally)
        whole.merge(learner.apply(tally))
    return whole


def _deal(learner: Learner, held: Sequence[Example]) -> dict[str, int]:
    """Group → mini-batch. The groups of all ranks are dealt by name: any number of ranks cuts alike."""
    named = learner.world.gather({e.group for e in held}, set[str])
    groups = sorted(set().union(*named))
    steps = learner.config.algorithm.steps_per_batch
    return {group: i * steps // len(groups) for i, group in enumerate(groups)}


def _with_prox(learner: Learner, held: Sequence[Example]) -> list[Example]:
    """The examples with the log-probs of the policy as it is now."""
    done: list[Example] = []
    for part in _micro_batches(learner, held):
        micro = collate(part, learner.dtype).to(learner.world.device)
        with torch.no_grad():
            logp = learner.policy(micro.selected).logp.cpu().numpy()
        edges = np.cumsum([e.tokens for e in part])[:-1]
        pieces = np.split(logp, edges) if part else []  # a dummy's log-prob belongs to nobody
        done += (replace(e, prox=piece) for e, piece in zip(part, pieces, strict=True))
    return done


def _micro_batches(learner: Learner, examples: Sequence[Example]) -> list[list[Example]]:
    """Cut this rank's examples under the token budget, padded to the same count on all ranks."""
    packed = bucket([e.length for e in examples], learner.config.trainer.micro_batch_tokens)
    count = max(learner.world.gather(len(packed), int))
    cut = [[examples[i] for i in part] for part in packed]
    return cut + [[] for _ in range(count - len(cut))]
