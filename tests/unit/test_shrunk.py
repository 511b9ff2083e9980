"""What small copies of architectures tell about packed rows, trees, the cut, and the embedded engine."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from asyncrl import shrunk, user_cache
from asyncrl.engines.torch.check import decoding_problem
from asyncrl.engines.torch.engine import build
from asyncrl.errors import ConfigError
from asyncrl.model_class import text_part
from asyncrl.shrunk import cached_findings, narrowed_config
from asyncrl.trainer.model import architecture_problems

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/asyncrl/models"


def default(kind: str, **own: Any) -> PreTrainedConfig:
    """Of the size of real models, unless `own` says otherwise."""
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**own)
    return config


HYBRID = ["mamba", "mamba", "attention"] * 10
# kind: (keys, what packed rows do, what the engine does); "": as a plain forward.
ARCHITECTURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "qwen3": ({}, "", ""),
    "qwen3_moe": ({}, "", ""),
    "granitemoeshared": ({}, "", ""),
    "opt": ({}, "", ""),
    "qwen2_moe": ({"use_sliding_window": True, "max_window_layers": 1}, "", ""),
    "phimoe": (
        {"sliding_window": 2048},
        "(limit 1e-03): layers.0.self_attn (PhimoeAttention) computes rows in one batch differently",
        "log-probs",
    ),
    "gpt_oss": ({}, "", ""),
    "hy_v4": ({}, "attention with indices: layers.0.self_attn (HYV4Attention)", "indices"),
    "diffllama": ({}, "", "log-probs"),
    "lfm2": ({"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}, "", ""),
    "recurrent_gemma": ({}, "temporal_block (RecurrentGemmaRecurrentBlock) mixes rows", "log-probs"),
    "stablelm": ({}, "'forest': layers.0.self_attn (StableLmAttention)", "has its own attention"),
    "nemotron": ({"num_key_value_heads": 8}, "TypeError", "has its own attention"),
    "xglm": ({}, "ValueError", "has its own attention"),
    "bloom": ({}, "ValueError", "ValueError"),
}


def agrees(found: str, wanted: str) -> bool:
    return wanted in found if wanted else not found


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_rows_trees_and_slots_of_an_architecture(kind: str) -> None:
    keys, packed, served = ARCHITECTURES[kind]
    config = default(kind, **keys)
    problems = architecture_problems(config)
    assert problems is not None and not problems["padded"]
    assert agrees(problems["packed"], packed) and agrees(problems["tree"], packed)
    assert bool(problems["split"]) == (kind == "opt")  # its forward goes around its backbone
    assert agrees(decoding_problem(shrunk.shrunken_model(narrowed_config(config))), served)


@pytest.mark.parametrize(
    ("kind", "keys", "kinds"),
    [
        ("gemma3_text", {}, {"sliding_attention", "full_attention"}),
        ("qwen3_5_text", {}, {"linear_attention", "full_attention"}),
        (
            "granitemoehybrid",
            {"layer_types": HYBRID, "num_hidden_layers": 30},
            {"linear_attention", "full_attention"},
        ),
    ],
)
def test_a_copy_has_each_kind_of_layer_and_a_short_reach(kind: str, keys: Any, kinds: set[str]) -> None:
    config = default(kind, **keys)
    model = shrunk.shrunken_model(narrowed_config(config))
    assert set(model.config.layer_types) == kinds and model.config.num_hidden_layers <= 6
    assert getattr(model.config, "sliding_window", None) in (None, shrunk.WINDOW_TOKENS)
    assert type(model) is type(AutoModelForCausalLM.from_config(narrowed_config(config)))
    assert sum(p.numel() for p in model.parameters()) < 1e6
    assert config.num_hidden_layers > 6  # it is as it was


# Layer layouts and head sizes of published models with vision: (text part, vision part, layers of the copy).
VISION_TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
VISION_BLOCKS = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560}
COMPOSITES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "qwen3_5": (
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
        VISION_BLOCKS,
        5,
    ),
    "qwen3_vl": (
        {
            "hidden_size": 2560,
            "num_hidden_layers": 24,  # as many as the vision part has
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        VISION_BLOCKS | {"depth": 24, "deepstack_visual_indexes": [5, 11, 17]},
        2,
    ),
    "glm4v": (
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
            },
        },
        {"hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096},
        2,
    ),
    "gemma3": (
        {
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
        },
        VISION_TOWER | {"num_hidden_layers": 27, "image_size": 896, "patch_size": 14},
        6,
    ),
    "mistral3": (
        {
            "model_type": "ministral3",
            "hidden_size": 3072,
            "num_hidden_layers": 26,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        {"model_type": "pixtral", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64},
        2,
    ),
}


@pytest.mark.parametrize("kind", COMPOSITES)
def test_a_copy_with_vision_has_the_layers_of_its_text_part(kind: str) -> None:
    text, vision, layer_count = COMPOSITES[kind]
    config = default(kind, text_config=text, vision_config=vision)
    model = shrunk.shrunken_model(narrowed_config(config))
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert sum(p.numel() for p in model.parameters()) < 3e6

    text_model = text_part(model)
    assert len(text_model.layers) == layer_count
    assert not any("visual" in name or "vision" in name for name, _ in text_model.named_modules())
    text_width = text_model.config.hidden_size
    assert getattr(model.config.vision_config, "out_hidden_size", text_width) == text_width


def test_what_was_found_is_kept(cached: Path) -> None:
    """For a configuration wherever it lies. A damaged file is written anew, and only so many are kept."""
    calls = []

    def check(model: object) -> dict[str, str]:
        calls.append(model)
        return {"packed": "no"}

    for config in (
        default("llama"),
        default("llama", vocab_size=999, hidden_size=8192, num_hidden_layers=80),
    ):
        config.name_or_path = f"somewhere else {len(calls)}"
        assert cached_findings(config, "test", check) == {"packed": "no"}
    assert len(calls) == 2 and len(list(cached.iterdir())) == 2  # 64 wide heads are narrowed to others
    assert cached_findings(default("llama"), "test", check) == {"packed": "no"} and len(calls) == 2
    for file in cached.iterdir():
        file.write_bytes(b"{")
    assert cached_findings(default("llama"), "test", check) == {"packed": "no"} and len(calls) == 3
    for index in range(user_cache.MAX_RESULTS + 5):
        (cached / f"{index}.json").touch()
        os.utime(cached / f"{index}.json", (1, 1))
    cached_findings(default("llama"), "another purpose", check)
    assert len(list(cached.iterdir())) == user_cache.MAX_RESULTS
    assert cached_findings(default("llama"), "test", check) == {"packed": "no"} and len(calls) == 4


def test_without_a_copy_or_a_cache_a_start_goes_on(
    cached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cached.parent.parent.touch()  # no directory can be there
    assert cached_findings(default("llama"), "test", lambda model: {"packed": ""}) == {"packed": ""}
    with caplog.at_level(logging.WARNING):
        assert cached_findings(default("blt"), "test", lambda model: {}) is None
    assert "BltConfig is not checked on a small copy" in caplog.text


def test_the_embedded_engine_refuses_by_name_what_it_would_compute_otherwise(tmp_path: Path) -> None:
    config = default("phimoe", sliding_window=2048)
    config.architectures = ["PhimoeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot serve PhimoeForCausalLM: its log-probs differ by"):
        build(str(tmp_path), "float32", slots=2, max_len=32)
