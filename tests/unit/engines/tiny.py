"""Tiny random models, requests to them, and what a full forward says about the answers."""

from __future__ import annotations

import asyncio
import random

import torch
import transformers
from transformers import PreTrainedModel

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.types import Generation

FAMILIES = ("Qwen2", "Llama", "Qwen3")
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES = {"Qwen3Moe": EXPERTS, "Mixtral": EXPERTS}

# Layers that carry a state: a gated delta rule, a short convolution, Mamba-2. With large weights, forwards
# of transformers itself, token by token and in chunks, differ by 1e-4 and more.
STATES: dict[str, dict[str, object]] = {
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 8,
        "initializer_range": 0.15,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "FalconH1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
}
# Attention that sees less than a whole sequence, or scores in a way of its own: windows with sinks, chunks
# with queries that are scaled by their position, windows with capped scores.
SCORINGS: dict[str, dict[str, object]] = {
    "GptOss": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Llama4": {
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "floor_scale": 8,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "moe_layers": [],
    },
    "Gemma2": {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
}
CONFIG_CLASSES = {"Llama4": "Llama4TextConfig"}
VOCABULARY = 61


def tiny(family: str = "Qwen2", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model whose distributions are far from uniform, with grouped KV heads."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        **(MIXTURES | STATES | SCORINGS).get(family, {}),
    }
    config = getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config"))(**sizes | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA ignores the cap
    return model


def serve(
    model: PreTrainedModel | None = None,
    slots: int = 8,
    max_len: int = 96,
    budget: int = 256,
    stepwise: bool = False,
) -> TorchEngine:
    """`stepwise`: the engine goes back to its loop after every step, so that a test can see each."""
    engine = TorchEngine(model or tiny(), tiny, slots, max_len, budget)
    if stepwise:
        engine._step_until_needed = engine._batcher.step  # type: ignore[method-assign]
    return engine


def prompt(count: int, seed: object = 0) -> tuple[int, ...]:
    return tuple(random.Random(str(seed)).choices(range(VOCABULARY), k=count))


# Of float32 log-probs near -5, summed in another order: up to 1.4e-5 was seen with kernels without AVX.
ROUNDING = {"atol": 2e-5, "rtol": 1e-5}


def ask(ids: tuple[int, ...], new: int = 12, session: str = "s", key: int = 0, **knobs: object) -> Request:
    knobs.setdefault("stop_ids", ())
    return Request(session, ids, Sampling(new, **knobs), key)  # type: ignore[arg-type]


@torch.no_grad()
def assert_logprobs(model: PreTrainedModel, request: Request, generation: Generation) -> None:
    """The recorded log-probs are those of one full forward, at the request's temperature."""
    ids = torch.tensor([request.ids + generation.ids])
    logits = model(ids).logits[0, len(request.ids) - 1 : -1].float()
    logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, **ROUNDING)


class Forwarded:
    """Counts the tokens that pass through a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.tokens += kwargs["input_ids"].shape[1]


async def generated(engine: TorchEngine, count: int) -> None:
    """Until a `stepwise` engine has sampled that many tokens. It gives way after every step, and so do we."""
    while engine._batcher.generated_tokens < count:  # noqa: ASYNC110 (a step is an event of its own)
        await asyncio.sleep(0)
