"""Models with windows, chunks and sinks: gradients of packed and tree rows against rows one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.config import ModelConfig, Packing
from asyncrl.trainer import attention
from asyncrl.trainer.attention import FOREST_ATTENTION, FlexKernel
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks

VOCABULARY = 97
LAYER_TYPES = ["sliding_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
WINDOW: dict[str, Any] = {"layer_types": LAYER_TYPES, "sliding_window": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": WINDOW | EXPERTS | {"num_local_experts": 4},
    "mimo_v2_flash": WINDOW
    | EXPERTS
    | {
        "n_routed_experts": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "v_head_dim": 4,
        "num_key_value_heads": 1,
    },
    # Rows are longer than the positions after which queries of the layer without rope are scaled.
    "llama4_text": EXPERTS
    | {
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
    },
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8},
    "olmo3": WINDOW,
    "cohere2": WINDOW,
    "qwen2_moe": WINDOW | EXPERTS | {"num_experts": 4, "use_sliding_window": True},  # told by the mask only
}

Gradients = dict[str, Tensor]


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # empty memory in some families
            torch.nn.init.normal_(parameter)
    return model


def sequences() -> list[np.ndarray]:
    """Three rows with a common beginning, a row that leaves one of them late, and two others."""
    rng = np.random.default_rng(0)
    common_start, *ends = (rng.integers(3, VOCABULARY, count) for count in (40, 5, 30, 17, 9, 50, 3))
    group = [np.concatenate([common_start, end]) for end in ends[:3]]
    return [*group, np.concatenate([group[1][:60], ends[3]]), *ends[4:]]


def gradients_of(policy: Policy, layouts: Sequence[Sequence[np.ndarray]], packing: Packing) -> Gradients:
    """Return the gradients of the mean of all log-probs, weighted by the tokens' ids."""
    if packing != "padded":
        policy.lm.set_attn_implementation(FOREST_ATTENTION)
    for rows in layouts:
        sequence_of = np.repeat(np.arange(len(rows)), [len(row) - 1 for row in rows])
        position = np.concatenate([np.arange(1, len(row)) for row in rows])
        temperature = torch.ones(len(position))
        selected = Selected.lay_out(rows, sequence_of, position, temperature, packing)
        (policy(selected).logp * selected.labels / VOCABULARY).sum().backward()

    policy.lm.set_attn_implementation(policy.attention)
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return gradients


def relative_distance(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest of the tensors' distances, by norm; tensors that are nearly zero are left out."""
    assert gradients.keys() == expected.keys()
    largest_norm = max(float(gradient.norm()) for gradient in expected.values())
    return max(
        float((gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.items()
        if gradient.norm() > 1e-3 * largest_norm
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_rows_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both kernels: that of a GPU runs without being compiled, and torch does not offer its backward."""
    policy = Policy(make_model(family), ModelConfig(path=family, dtype="float32"), None)
    expected = gradients_of(policy, [[row] for row in sequences()], "padded")
    for packing in ("packed", "tree"):
        assert relative_distance(gradients_of(policy, [sequences()], packing), expected) < 1e-5, packing

    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "NodeKernel", partial(FlexKernel, device=attention.CPU))
    assert relative_distance(gradients_of(policy, [sequences()], "tree"), expected) < 1e-5


def test_adapters_learn_beside_frozen_sinks() -> None:
    config = ModelConfig(path="gpt_oss", dtype="float32", lora_rank=2)
    policy = Policy(make_model("gpt_oss"), config, None)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)

    expected = gradients_of(policy, [[row] for row in sequences()], "padded")
    assert expected and not any(name.endswith("sinks") for name in expected)
    assert relative_distance(gradients_of(policy, [sequences()], "tree"), expected) < 1e-5


SHARED_FAMILIES = ("gpt_oss", "llama4_text")


def test_ranks_share_heads_with_their_sinks_and_positions(tmp_path: Path) -> None:
    """Each of two ranks has a part of the row, and computes half of the heads."""
    for family in SHARED_FAMILIES:
        make_model(family).save_pretrained(tmp_path / family)
    gradients = run_ranks(2, share_rows, tmp_path)
    for family in SHARED_FAMILIES:
        policy = Policy(make_model(family), ModelConfig(path=family, dtype="float32"), None)
        expected = gradients_of(policy, [[row] for row in sequences()], "padded")
        assert relative_distance(gradients[family], expected) < 1e-5


def share_rows(world: World, folder: Path) -> dict[str, Gradients]:
    shared = world.arranged(1, 2)
    gradients: dict[str, Gradients] = {}
    for family in SHARED_FAMILIES:
        policy = load_policy(ModelConfig(path=str(folder / family), dtype="float32"), shared)
        shards: Any = gradients_of(policy, [sequences()], "tree")
        gradients[family] = {name: gradient.full_tensor() for name, gradient in shards.items()}
    return gradients
