"""Decides whether the sequences of a micro-batch may be packed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import ConfigError
from asyncrl.model_class import set_text_attention
from asyncrl.trainer.attention import text_attention, use_forest_attention
from asyncrl.trainer.gradient_check import cached_gradient_check, sharing_problem, transformer_of
from asyncrl.trainer.model import Policy, shared_architecture_problems
from asyncrl.trainer.world import World

logger = logging.getLogger(__name__)


def packing_for(
    roots: Sequence[nn.Module], wanted_packing: Packing, dtype: str, world: World, is_compiled: bool = False
) -> Packing:
    """Return `wanted_packing`, if each of these FSDP roots then gives the gradients of sequences one by one;
    otherwise warn and return padded. ConfigError where ranks share a sequence, which padded layouts cannot.
    Sets the models' attention. `dtype`: of a forward. `is_compiled`: the layers are. A collective."""
    for root in roots:
        language_model = transformer_of(root)
        model_class = type(language_model).__name__
        known_problems = shared_architecture_problems(language_model.config, world)
        if known_problems and known_problems["padded"]:
            logger.warning(
                "%s depends on which rows are batched together: it %s", model_class, known_problems["padded"]
            )

        if wanted_packing == "padded":
            continue
        problem = packing_problem(
            language_model, wanted_packing, known_problems, world.sequence.count if world.sequence else 1
        )
        if not problem and (known_problems is None or world.sequence or world.device.type != "cpu"):
            problem = cached_gradient_check(root, [wanted_packing], dtype, world, is_compiled)[wanted_packing]

        if problem and world.sequence:
            raise ConfigError(
                f"trainer.sequence_parallel={world.sequence.count} needs packed rows, but "
                f"{model_class} {problem}; set trainer.sequence_parallel=1"
            )

        if problem:
            logger.warning(
                "trainer.packing: using padded instead of %s, because %s %s",
                wanted_packing,
                model_class,
                problem,
            )
            return "padded"

    for root in roots:
        if wanted_packing != "padded":
            use_forest_attention(transformer_of(root))

    return wanted_packing


def packing_problem(
    model: PreTrainedModel, packing: Packing, known_problems: Mapping[str, str] | None, sharing_ranks: int = 1
) -> str:
    """Say why sequences cannot be laid out this way, or not on this many sharing ranks, as far as is known
    without a forward. `known_problems`: of the architecture, if it was checked."""
    head_count = model.config.get_text_config().num_attention_heads
    if sharing_ranks > 1 and head_count % sharing_ranks:
        return f"has {head_count} attention heads, which {sharing_ranks} ranks cannot share"
    if sharing_ranks > 1 and (problem := sharing_problem(model)):
        return problem
    return known_problems[packing] if known_problems else ""


@contextmanager
def padded_meanwhile(policy: Policy) -> Iterator[None]:
    """Score padded sequences with the model's own attention inside the context."""
    model = policy.lm
    packing = policy.packing
    attention_name = text_attention(model)
    policy.packing = "padded"
    set_text_attention(model, policy.attention)

    try:
        yield
    finally:
        policy.packing = packing
        set_text_attention(model, attention_name)
