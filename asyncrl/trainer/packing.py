"""Whether the rows of a micro-batch may be packed: a loaded model is asked, gradients included."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import NAME
from asyncrl.trainer.model import Policy
from asyncrl.trainer.scores import Scores, Selected
from asyncrl.trainer.world import World

logger = logging.getLogger(__name__)
AGREE = {"float64": 1e-5, "float32": 1e-3, "bfloat16": 0.1}  # distance / norm of gradients
LAYERS = {"full_attention", "sliding_attention"}
GROWING = {"dynamic", "longrope"}  # kinds of RoPE in which a token's angle depends on the longest sequence


def packing_for(models: Sequence[nn.Module], wanted: Packing, dtype: str, world: World) -> Packing:
    """`wanted`, if each of these FSDP roots gives the same gradients with packed rows as with padded ones;
    else padded, and a warning; ConfigError where ranks are to share a sequence, which padded rows cannot.
    Sets their attention accordingly. `dtype`: of a forward. A collective."""
    if wanted == "padded":
        return wanted
    own = [_transformer(model).config._attn_implementation for model in models]
    sharing = world.sequence.count if world.sequence else 1
    for model in models:
        problem = unfit(_transformer(model), sharing) or _differs(model, wanted, AGREE[dtype], world)
        if problem and world.sequence:
            raise ConfigError(
                f"trainer.sequence_parallel={sharing} needs packed rows, but {problem}; "
                "set trainer.sequence_parallel=1"
            )
        if problem:
            logger.warning("trainer.packing: padded instead of %s: %s", wanted, problem)
            for other, implementation in zip(models, own, strict=True):
                _transformer(other).set_attn_implementation(implementation)
            return "padded"
    return wanted


@contextmanager
def unpacked(policy: Policy) -> Iterator[None]:
    """Its rows are padded meanwhile, and its attention is the model's own."""
    model, packing = policy.lm, policy.packing
    kind = model.config._attn_implementation
    policy.packing = "padded"
    model.set_attn_implementation(policy.attention)
    try:
        yield
    finally:
        policy.packing = packing
        model.set_attn_implementation(kind)


def _transformer(root: nn.Module) -> PreTrainedModel:
    return next(module for module in root.modules() if isinstance(module, PreTrainedModel))


def unfit(model: PreTrainedModel, sharing: int = 1) -> str:
    """Why rows cannot be packed, or not on so many ranks that share them, as far as it can be seen without a
    forward."""
    kind, config = type(model).__name__, model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    if not takes_more or not model._can_set_attn_implementation():
        return f"{kind} has an attention of its own"
    if others := set(getattr(config, "layer_types", None) or ()) - LAYERS:
        return f"{kind} has layers of {', '.join(sorted(others))}"
    if kinds & GROWING:
        return f"{kind} has a RoPE that depends on the longest row"
    if (heads := config.num_attention_heads) % sharing:
        return f"{kind} has {heads} attention heads, which {sharing} ranks cannot share"
    return ""


def _differs(root: nn.Module, packing: Packing, limit: float, world: World) -> str:
    """What is wrong with the gradients of packed rows; nothing, if they are those of padded ones."""
    model, rng = _transformer(root), np.random.default_rng(0)
    start, *ends = (rng.integers(0, model.config.get_text_config().vocab_size, n) for n in (24, 9, 14, 30))
    rows = [np.concatenate([start, ends[0]]), np.concatenate([start, ends[1]]), ends[2]]
    padded, packed = (Selected.of(rows, *_all_tokens(rows), packing=how) for how in ("padded", packing))
    assert packed.forest is not None
    learns = any(p.requires_grad for p in root.parameters())
    with torch.set_grad_enabled(learns):
        expected = _loss(root, padded, world)
        size = _norm(_gradients(root) if learns else [expected], world)
        for gradient in _gradients(root):
            gradient.neg_()  # those of packed rows are added to it: no second set is held
        model.set_attn_implementation(NAME)
        found = _loss(root, packed, world)
    distance = _norm(_gradients(root) if learns else [found - expected], world)
    root.zero_grad()
    if packed.forest.unknown:
        return f"{type(model).__name__} has attention with {', '.join(sorted(packed.forest.unknown))}"
    share = distance / max(size, 1e-30)
    what = f"{type(model).__name__}'s {'gradients' if learns else 'log-probs'}"
    return "" if share < limit else f"{what} differ by {share:.1e} of their norm (limit {limit:.0e})"


def _all_tokens(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Row, position and temperature of all tokens but the first of each row."""
    row = np.repeat(np.arange(len(rows)), [len(one) - 1 for one in rows])
    position = np.concatenate([np.arange(1, len(one)) for one in rows])
    return row, position, torch.ones(len(row))


def _loss(root: nn.Module, tokens: Selected, world: World) -> Tensor:
    """The values of all tokens, [N]; after a backward of their sum, in which each has a weight of its own, if
    the model learns."""
    found = root(tokens.to(world.device))
    values = found.logp if isinstance(found, Scores) else found
    if values.requires_grad:
        (values * torch.linspace(0.5, 1.5, len(values), device=values.device)).sum().backward()
    else:
        cast(FSDPModule, root).reshard()
    return values.detach() / math.sqrt(world.size)  # all ranks have all of them


def _gradients(root: nn.Module) -> list[Tensor]:
    """Of this rank's shards."""
    return [cast(DTensor, p.grad).to_local() for p in root.parameters() if p.grad is not None]


def _norm(tensors: Sequence[Tensor], world: World) -> float:
    """Over all ranks."""
    return math.sqrt(sum(world.gather(sum(float(t.double().square().sum()) for t in tensors), float)))
