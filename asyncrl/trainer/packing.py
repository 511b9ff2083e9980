"""Decides whether the rows of a micro-batch may be packed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.gradient_check import cached_gradient_check, transformer_of
from asyncrl.trainer.model import Policy, shared_findings
from asyncrl.trainer.world import World

logger = logging.getLogger(__name__)


def packing_for(
    models: Sequence[nn.Module], wanted: Packing, dtype: str, world: World, compiled: bool = False
) -> Packing:
    """`wanted`, if each of these FSDP roots gives the gradients of rows one by one with it; else padded, and
    a warning; ConfigError where ranks are to share a sequence, which padded rows cannot. Sets their attention
    accordingly. `dtype`: of a forward. `compiled`: their layers are. A collective."""
    for model in models:
        own = transformer_of(model)
        kind = type(transformer_of(model)).__name__
        found = shared_findings(own.config, world)
        if found and found["padded"]:
            logger.warning("%s depends on what rows are trained together: it %s", kind, found["padded"])
        if wanted == "padded":
            continue
        problem = unfit(own, wanted, found, world.sequence.count if world.sequence else 1)
        if not problem and (found is None or world.sequence or world.device.type != "cpu"):
            problem = cached_gradient_check(model, [wanted], dtype, world, compiled)[wanted]
        if problem and world.sequence:
            raise ConfigError(
                f"trainer.sequence_parallel={world.sequence.count} needs packed rows, but {kind} {problem}; "
                "set trainer.sequence_parallel=1"
            )
        if problem:
            logger.warning("trainer.packing: padded instead of %s: %s %s", wanted, kind, problem)
            return "padded"
    for model in models:
        if wanted != "padded":
            transformer_of(model).set_attn_implementation(FOREST_ATTENTION)
    return wanted


def unfit(model: PreTrainedModel, packing: Packing, found: Mapping[str, str] | None, sharing: int = 1) -> str:
    """Says why rows cannot be laid out so, or not on so many ranks that share them, as far as is known
    without a forward. `found`: the architecture's findings, if there are some."""
    heads = model.config.get_text_config().num_attention_heads
    if sharing > 1 and heads % sharing:
        return f"has {heads} attention heads, which {sharing} ranks cannot share"
    return found[packing] if found else ""


@contextmanager
def unpacked(policy: Policy) -> Iterator[None]:
    """Its rows are padded meanwhile, and its attention is the model's own."""
    model = policy.lm
    packing = policy.packing
    kind = model.config._attn_implementation
    policy.packing = "padded"
    model.set_attn_implementation(policy.attention)
    try:
        yield
    finally:
        policy.packing = packing
        model.set_attn_implementation(kind)
