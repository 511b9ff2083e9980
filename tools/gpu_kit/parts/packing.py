"""Are log-probs and gradients of packed rows those of rows one by one in float64?

Rows of groups with common prompts go through the trainer's policy as in a run: packed, and as a tree of
shared prefixes. The reference is the model of transformers in float64, a row at a time, with the same
weights. Distances are relative: the norm of the difference by the norm of the reference, of the log-probs
and of all gradients together. In float32 (without TF32) the limit is 1e-4; in bfloat16 it is twice the
distance of the same model of transformers in bfloat16, a row at a time. Models: Qwen3 (grouped query
heads) and Gemma2 (windows in every other layer, soft caps), small but with the heads of Qwen3 0.6B, random
weights.

And does a run come to the same verdict, before it packs rows?
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig, Packing
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from parts.common import Context, Finding, attempt, exact_float32
from parts.rows import Rows, distances, formatted, grouped, measured, plain_backward

SECONDS = 180
GOAL = "gradients: float32 1e-4, bfloat16 2 x those of a plain loop"

FLOAT32_LIMIT = 1e-4
NOISE = 2.0
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    # In every other layer a window; scores and logits are capped.
    "Gemma2": {"sliding_window": 48, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0},
}


def run(context: Context) -> Iterator[Finding]:
    world = join_ranks(0, 1, device=context.kind)
    torch.manual_seed(0)
    try:
        yield from gradients(context, world, "Qwen3", "bfloat16")
        yield from gradients(context, world, "Qwen3", "float32")
        yield from gradients(context, world, "Gemma2", "bfloat16")
        yield from gradients(context, world, "Gemma2", "float32")
    finally:
        leave_ranks()


# -- gradients -------------------------------------------------------------------------------------------


def gradients(context: Context, world: World, family: str, dtype: str) -> Iterator[Finding]:
    path = saved(context, family)
    rows = few_rows(context)
    began = time.monotonic()
    with exact_float32():
        exact = plain(path, "float64", context)
        wanted = measured(exact, plain_backward(exact, rows))
        limit = FLOAT32_LIMIT
        if dtype == "bfloat16":
            rounded = plain(path, dtype, context)
            floor = distances(measured(rounded, plain_backward(rounded, rows)), wanted)
            yield Finding(f"{family} {dtype}: the plain loop", formatted(floor), note="the noise floor")
        policy = load_policy(ModelConfig(path=str(path), dtype=dtype), world)
        policy.lm.set_attn_implementation(FOREST_ATTENTION)
        ways: tuple[Packing, ...] = ("packed", "tree")
        for way in ways:

            def one(way: Packing = way) -> Finding:
                gradient_distances = distances(in_way(policy, rows, way, world), wanted)
                limits = [NOISE * x for x in floor] if dtype == "bfloat16" else [limit] * 2
                fine = all(a <= b for a, b in zip(gradient_distances, limits, strict=True))
                took = f"{time.monotonic() - began:.0f} s so far, compilation included"
                return Finding(
                    f"{family} {dtype}: {way}",
                    formatted(gradient_distances),
                    f"<= {formatted(limits)}",
                    fine,
                    took,
                )

            yield from attempt(f"{family} {dtype}: {way}", one, context)
        verdict = packing_for([policy], "tree", dtype, world)
        yield Finding(f"{family} {dtype}: trainer.packing=tree in a run", verdict, "tree", verdict == "tree")


def saved(context: Context, family: str) -> Path:
    """A directory with a small model of random weights, whose distributions are far from uniform."""
    path = context.work / family
    if not path.exists():
        torch.manual_seed(0)
        sizes = (SMALL | TINY | FEW_HEADS) if context.small else (SMALL | HEADS)
        config = getattr(transformers, f"{family}Config")(**sizes, **FAMILIES[family], initializer_range=0.1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def few_rows(context: Context) -> Rows:
    rng = np.random.default_rng(0)
    if context.small:
        return grouped(rng, vocabulary=512, groups=2, prompt=40, response=24)
    return grouped(rng, vocabulary=4096, groups=2, prompt=200, response=160)


def plain(path: Path, dtype: str, context: Context) -> Any:
    """Eager attention, which also computes caps."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval().to(context.device)


def in_way(policy: Policy, rows: Rows, way: Packing, world: World) -> tuple[torch.Tensor, dict[str, Any]]:
    policy.packing = way
    policy.zero_grad()
    logp = policy(rows.selected(way).to(world.device)).logp
    logp.sum().backward()
    return measured(policy.lm, [logp.detach()])
