"""Memory of a rank: tries the largest micro-batch before there is data, and gives up a batch that does not
fit.

    smallest, largest ──► forward and backward of all models, no optimizer step ──► gradients dropped
"""

from __future__ import annotations

import logging
import time
from functools import partial

import numpy as np
import torch

from asyncrl.config import Packing
from asyncrl.errors import lacks_memory, one_line
from asyncrl.trainer.footprint import LAYER_MIN_PARAMETERS
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import Critic, Policy, Reference
from asyncrl.trainer.optimizer import SpikeError
from asyncrl.trainer.scores import Selected
from asyncrl.weights.memory import trim_heap
from asyncrl.wire.messages.trainer import GaveUp

log = logging.getLogger(__name__)


def largest_tokens(sequences: int, length: int, packing: Packing) -> Selected:
    """Return sequences that share nothing; each token but the first is the model's."""
    sequence_of = np.repeat(np.arange(sequences), length - 1)
    position = np.tile(np.arange(1, length), sequences)
    unshared_packing: Packing = "padded" if packing == "padded" else "packed"
    ids = [np.zeros(length, dtype=np.int64)] * sequences
    return Selected.lay_out(ids, sequence_of, position, torch.ones(len(sequence_of)), unshared_packing)


def smallest_tokens(packing: Packing) -> Selected:
    """Return two tokens to score: a micro-batch of any size leaves the same behind. For a single token torch
    would compile once more."""
    return largest_tokens(1, 3, packing)


def forward_backward(
    policy: Policy,
    critic: Critic | None,
    reference: Reference | None,
    tokens: Selected,
    entropy_grad: bool,
    divergence: str = "",
    top_k: int = 0,
) -> None:
    """Run the forwards and the backward of a micro-batch on the models. Gradients are kept. A collective."""
    teacher = None
    if reference is not None and divergence:
        teacher = reference.teacher(tokens, divergence, top_k)
    elif reference is not None:
        reference.logp(tokens)

    scores = policy(tokens, entropy_grad=entropy_grad, teacher=teacher)
    loss = scores.logp.sum() + (scores.entropy.sum() if entropy_grad else 0.0)
    if critic is not None:
        loss = loss + critic(tokens).sum()
    if scores.divergence is not None:
        loss = loss + scores.divergence.sum()
    loss.backward()
    if reference is not None:
        reference.release()


def try_largest(learner: Learner) -> None:
    """Run the largest micro-batch before the first real one, while the engines generate. A lack of memory
    shows at once, and not with the first long batch: as with any micro-batch, new processes then recompute
    more layers, or halve the micro-batch. Leaves the models unchanged. A collective."""
    if is_tiny(learner):
        return
    config = learner.config
    started_at = time.monotonic()
    sequence_count = config.largest_rows(learner.token_budget)
    sequence_length = config.rollout.max_tokens
    tokens = largest_tokens(sequence_count, sequence_length, learner.packing)
    entropy_grad = config.algorithm.entropy_coef > 0
    learner.micro_batch_size = sequence_count * sequence_length, sequence_count // config.rollout.full_rows

    # The second micro-batch finds gradients, as later ones do.
    for trial_tokens in (smallest_tokens(learner.packing), tokens):
        forward_backward(
            learner.policy,
            learner.critic,
            learner.reference,
            trial_tokens.to(learner.world.device),
            entropy_grad,
            learner.recipe.divergence,
            config.kl.top_k,
        )
        learner.note_work()  # each may compile for minutes

    learner.micro_batch_size = 0, 0
    learner.optimizer.zero_grad()
    if learner.critic is not None:
        learner.critic.optimizer.zero_grad()
    trim_heap()
    log.info(
        "tried the largest micro-batch, %d rows of %d tokens, in %.1f s",
        sequence_count,
        sequence_length,
        time.monotonic() - started_at,
    )


def is_tiny(learner: Learner) -> bool:
    """Return whether the model is sharded as a whole: saving its memory would cost more time than it is
    worth."""
    return sum(p.numel() for p in learner.policy.parameters()) < LAYER_MIN_PARAMETERS


def give_up_message(error: Exception, trainer_epoch: int, rank: int, learner: Learner) -> GaveUp:
    """Return the message that gives up the batch, for a spike or for too little memory in a micro-batch. Any
    other error is raised again: outside a micro-batch a smaller one would not help."""
    make_message = partial(GaveUp, trainer_epoch, rank, learner.step + 1)
    if isinstance(error, SpikeError):
        return make_message("spike", str(error))

    if lacks_memory(error) and any(learner.micro_batch_size):
        return make_message(
            "memory",
            f"out of memory ({one_line(error)})",
            *learner.micro_batch_size,
            learner.recomputation.every,
            learner.recomputation.next_every,
        )

    raise error
