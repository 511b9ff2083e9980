"""The tiny checkpoints of model families: whole, with the hub's names, and read by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.fakes.tiny_families import FAMILIES, IMAGE_TOKEN, VISION_PREFIXES, build_family

MTP_FAMILIES = [name for name, family in FAMILIES.items() if family.mtp]
EVERY_FAMILY = [
    pytest.param(name, marks=() if name in ("qwen3_5_moe", "gemma3", "mistral3") else pytest.mark.full)
    for name in FAMILIES
]
COMPOSITE_FAMILIES = [name for name, family in FAMILIES.items() if family.composite]


def tensor_names(file: Path) -> set[str]:
    with safe_open(file, "pt") as tensors:
        return set(tensors.keys())


def load_directory(name: str, directory: Path) -> tuple[torch.nn.Module, dict[str, list[str]]]:
    auto_class = AutoModelForImageTextToText if FAMILIES[name].composite else AutoModelForCausalLM
    model, information = auto_class.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    return model, information


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_transformers_finds_each_tensor(name, tmp_path):
    model, information = load_directory(name, build_family(name, tmp_path))
    tokens = torch.arange(3, 40).reshape(1, -1)
    logprobs = model(input_ids=tokens).logits.float().log_softmax(-1)

    assert not information["missing_keys"] and not information["unexpected_keys"]
    assert not information["mismatched_keys"]
    assert logprobs.isfinite().all() and logprobs.std() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


@pytest.mark.full
@pytest.mark.parametrize("name", MTP_FAMILIES)
def test_an_mtp_layer_is_in_the_files_alone(name, tmp_path):
    plain_names = tensor_names(build_family(name, tmp_path / "plain") / "model.safetensors")
    model, information = load_directory(name, build_family(name, tmp_path / "mtp", mtp=True))
    mtp_names = tensor_names(tmp_path / "mtp/model.safetensors")

    assert mtp_names > plain_names and not information["missing_keys"]
    added = mtp_names - plain_names
    assert any("self_attn.q" in added_name for added_name in added)
    assert not any(parameter.startswith("mtp") for parameter, _ in model.named_parameters())


def test_a_family_without_an_mtp_layer_refuses_one(tmp_path):
    with pytest.raises(ValueError, match="gemma3: published files of this family hold no MTP layer"):
        build_family("gemma3", tmp_path, mtp=True)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "qwen3"])
def test_two_files_hold_what_one_does(name, tmp_path):
    one_file = build_family(name, tmp_path / "one") / "model.safetensors"
    two_files = build_family(name, tmp_path / "two", shards=2)
    first_names = tensor_names(two_files / "model-00001-of-00002.safetensors")
    second_names = tensor_names(two_files / "model-00002-of-00002.safetensors")
    weight_map = json.loads((two_files / "model.safetensors.index.json").read_text())["weight_map"]

    assert first_names | second_names == tensor_names(one_file) == set(weight_map)
    assert not first_names & second_names
    assert not load_directory(name, two_files)[1]["missing_keys"]
    if FAMILIES[name].composite:
        second_vision = {tensor for tensor in second_names if tensor.startswith(VISION_PREFIXES)}
        assert all(tensor.startswith(VISION_PREFIXES) for tensor in first_names)
        assert second_vision and second_vision < second_names


@pytest.mark.full
@pytest.mark.parametrize("name", COMPOSITE_FAMILIES)
def test_image_tokens_have_the_ids_of_the_configuration(name, tmp_path):
    build_family(name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == IMAGE_TOKEN


def test_names_are_those_of_the_hub(tmp_path):
    hub_names = {
        "qwen3_5": "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
        "qwen3_5_moe": "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "gemma3": "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "mistral3": "language_model.model.layers.0.self_attn.q_proj.weight",
        "qwen3_vl": "model.visual.blocks.0.attn.qkv.weight",
        "nemotron_h": "backbone.layers.0.mixer.in_proj.weight",
        "minimax_m2": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "kimi_linear": "model.layers.0.mlp.gate_proj.weight",
        "kimi_k25": "language_model.model.layers.1.mlp.experts.0.up_proj.weight",
    }
    for name, hub_name in hub_names.items():
        directory = build_family(name, tmp_path / name)
        assert hub_name in tensor_names(directory / "model.safetensors"), name


def test_a_seed_gives_the_same_bytes(tmp_path):
    first = build_family("qwen3", tmp_path / "first", seed=3) / "model.safetensors"
    second = build_family("qwen3", tmp_path / "second", seed=3) / "model.safetensors"
    other_seed = build_family("qwen3", tmp_path / "other", seed=4) / "model.safetensors"

    assert first.read_bytes() == second.read_bytes() != other_seed.read_bytes()
