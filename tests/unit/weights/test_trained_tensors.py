"""Which tensors of today's checkpoints train, and which layers adapters adapt."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang.loader import shapes_of
from asyncrl.errors import ConfigError
from asyncrl.launch.estimates import describe_costs
from asyncrl.launch.memory import describe_coverage
from asyncrl.launch.models import resolve_models
from asyncrl.model_class import auto_class_of
from asyncrl.trainer.footprint import static_bytes
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.checkpoint_match import frozen_shapes, trained_shapes
from asyncrl.weights.manifest import TensorSpec
from asyncrl.weights.model_files import stored_tensors, weight_shapes
from asyncrl.weights.names import checkpoint_pieces, saved_buffers
from asyncrl.weights.trained_tensors import (
    adapted_shapes,
    adapter_count,
    frozen_counts,
    linear_kinds,
    parameter_count,
    published_bytes,
)
from tests.fakes.tiny_families import FAMILIES, build_family

pytestmark = pytest.mark.slow

GATED_DELTA_KINDS = ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]
NO_MODULES: list[str] = []
SERVED = {"engine": {"name": "sglang"}, "weights": {"adapters": True}}


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3_5", tmp_path_factory.mktemp("qwen3_5"), mtp=True)


@pytest.fixture(scope="module")
def qwen3_5_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family("qwen3_5_moe", tmp_path_factory.mktemp("qwen3_5_moe"), mtp=True)


def resolved(
    path: Path, lora_rank: int = 2, lora_modules: list[str] = NO_MODULES, **sections: Any
) -> RunConfig:
    model = {"path": str(path), "lora_rank": lora_rank, "dtype": "float32", "lora_modules": lora_modules}
    return resolve_models(parse({"name": "x", "data": {"train": "d"}, "model": model} | sections))


def skeleton(path: Path) -> Any:
    """Return the model that reads `path`, without weights."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return auto_class_of(config).from_config(config)


def test_counts_are_of_what_trains(qwen3_5: Path) -> None:
    """Neither of the tower for pictures nor of the MTP layer, which transformers does not read."""
    path = str(qwen3_5)
    model = skeleton(qwen3_5)
    tower_numbers = sum(parameter.numel() for parameter in model.model.visual.parameters())
    text_numbers = sum(parameter.numel() for parameter in model.parameters()) - tower_numbers
    assert parameter_count(path) == text_numbers
    assert frozen_counts(path) == {"model.visual": tower_numbers}

    config = resolved(qwen3_5, lora_rank=0)
    assert published_bytes(config) == 4 * text_numbers
    assert static_bytes(config) == (4 * (text_numbers + tower_numbers), 4 * text_numbers, 8 * text_numbers)

    adapted = resolved(qwen3_5)
    weight_bytes, gradient_bytes, _ = static_bytes(adapted)
    assert gradient_bytes == 4 * adapter_count(adapted)
    assert weight_bytes == 4 * (text_numbers + tower_numbers + adapter_count(adapted))


def test_the_plan_names_class_and_parts(qwen3_5: Path) -> None:
    line = describe_costs(resolved(qwen3_5, lora_rank=0), has_gpu=False)[0]
    assert line.startswith("model         Qwen3_5ForConditionalGeneration: ")
    assert "parameters in the text part, all weights trained; frozen: model.visual (" in line


def test_a_version_for_a_server_is_what_trains(qwen3_5: Path) -> None:
    """Drafts and towers are neither demanded nor taken."""
    path = str(qwen3_5)
    shapes = shapes_of(path, tied=True, train_vision=False)
    assert shapes is not None
    version = tuple(TensorSpec(name, shape, "float32") for name, shape in trained_shapes(path).items())
    assert shapes.describe_differences(version) == ""

    mtp_shape = weight_shapes(path)["mtp.fc.weight"]
    with_draft = (*version, TensorSpec("mtp.fc.weight", mtp_shape, "float32"))
    assert shapes.describe_differences(with_draft) == "has unknown mtp.fc.weight"

    assert shapes.describe_differences(version[1:]) == f"lacks {version[0].name}"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen3_5_moe", "gemma3", "kimi_linear") else pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_adapters_adapt_the_layers_that_are_counted(tmp_path: Path, family: str) -> None:
    """Whatever names the files have; in composite models the layers of the text part alone."""
    path = build_family(family, tmp_path)
    config = resolved(path)
    adapters = Adapters(skeleton(path), config.adapters, config.model.lora_modules)

    adapted_kinds = sorted(layer.rpartition(".")[2] for layer in adapters.specs[""].layers)
    kinds = linear_kinds(str(path))
    assert adapted_kinds == sorted(kinds[name] for name in adapted_shapes(config))
    assert adapter_count(config) == sum(prod(piece.shape) for piece in adapters.published)

    every_layer = Adapters(skeleton(path), config.adapters)
    assert every_layer.specs == adapters.specs, "the default is all linear layers"


def test_linear_layers_are_known_under_other_names_of_files(tmp_path: Path) -> None:
    """Files of DeepSeek-V4 have `layers.0.attn.wq_a` for the model's `model.layers.0.self_attn.q_a_proj`."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16}
    sizes |= {"o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model_config = AutoConfig.for_model("deepseek_v4", layer_types=["sliding_attention"], **sizes)
    model = AutoModelForCausalLM.from_config(model_config)
    model.save_pretrained(tmp_path)
    saved_tensors = load_file(tmp_path / "model.safetensors")
    hub_tensors = {name.removeprefix("model."): tensor for name, tensor in saved_tensors.items()}
    hub_tensors["embed.weight"] = hub_tensors.pop("embed_tokens.weight")
    save_file(hub_tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    state = dict(model.named_parameters()) | saved_buffers(model)
    pieces = checkpoint_pieces(model, state, stored_tensors(str(tmp_path)))
    assert {piece.name for piece in pieces} == trained_shapes(str(tmp_path)).keys() == hub_tensors.keys()
    assert all(
        torch.equal(piece.view_in(state[piece.parameter]), hub_tensors[piece.name]) for piece in pieces
    )

    file_name_of = {piece.parameter: piece.name for piece in pieces}
    adapters = Adapters(skeleton(tmp_path), {"": (2, 4.0)})
    kinds = {file_name_of[f"{layer}.weight"]: layer.rpartition(".")[2] for layer in adapters.specs[""].layers}
    assert linear_kinds(str(tmp_path)) == kinds and kinds["layers.0.attn.wq_a.weight"] == "q_a_proj"

    chosen = resolved(tmp_path, lora_modules=["q_a_proj", "down_proj"])
    expected_names = ["layers.0.attn.wq_a.weight", "layers.0.ffn.shared_experts.w2.weight"]
    assert sorted(adapted_shapes(chosen)) == expected_names
    assert adapter_count(resolved(tmp_path)) == sum(prod(piece.shape) for piece in adapters.published)


def test_adapters_for_servers_leave_out_what_these_do_not_take(qwen3_5: Path) -> None:
    config = resolved(qwen3_5, **SERVED)
    served_kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config.model.lora_modules == served_kinds
    assert resolve_models(config) == config, "as every process of the run does"

    adapted, left_out, _ = describe_coverage(config).split("; ")
    assert "in_proj" not in adapted and "1 x self_attn.q_proj (" in adapted
    assert left_out.startswith("left out, because servers do not support adapters for these layers: ")
    assert all(f"x linear_attn.{kind} (" in left_out for kind in GATED_DELTA_KINDS)

    merged = resolved(qwen3_5, engine={"name": "sglang"})
    assert merged.model.lora_modules == sorted([*served_kinds, *GATED_DELTA_KINDS])


def test_adapters_of_a_model_with_experts_are_of_its_attention(qwen3_5_moe: Path) -> None:
    """Servers would take adapters of a shared expert for those of experts."""
    config = resolved(qwen3_5_moe, **SERVED)
    assert config.model.lora_modules == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (
        "left out, because servers would mistake these adapters for expert adapters: "
        in describe_coverage(config)
    )
    assert {"gate_proj", "shared_expert_gate"} <= {*resolved(qwen3_5_moe).model.lora_modules}


def test_modules_can_be_chosen(qwen3_5: Path) -> None:
    config = resolved(qwen3_5, lora_modules=["q_proj", "in_proj_qkv"])
    adapters = Adapters(skeleton(qwen3_5), config.adapters, config.model.lora_modules)
    assert {layer.rpartition(".")[2] for layer in adapters.specs[""].layers} == {"q_proj", "in_proj_qkv"}
    assert "left out, because model.lora_modules does not list them: " in describe_coverage(config)


@pytest.mark.parametrize(
    ("family", "lora_modules", "sections", "message"),
    [
        (
            "qwen3_5",
            ["qkv"],
            {},
            r"^model\.lora_modules: .* has no trainable linear layers named qkv; choose from down_proj, .*",
        ),
        (
            "qwen3_5",
            ["q_proj", "in_proj_z"],
            SERVED,
            r"^model\.lora_modules: .* in_proj_z: servers do not support adapters for these layers; remove",
        ),
        ("mistral3", [], SERVED, r"^weights\.adapters: .* \(mistral3\); set weights\.adapters=false$"),
    ],
)
def test_adapters_that_servers_or_the_model_lack_are_refused(
    tmp_path: Path, family: str, lora_modules: list[str], sections: dict[str, Any], message: str
) -> None:
    """Layers of a tower for pictures, such as `qkv`, do not train."""
    with pytest.raises(ConfigError, match=message):
        resolved(build_family(family, tmp_path), lora_modules=lora_modules, **sections)


def test_parts_add_up(qwen3_5_moe: Path) -> None:
    path = str(qwen3_5_moe)
    frozen_names = set[str]().union(*frozen_shapes(path).values())
    passed_on = weight_shapes(path).keys() - trained_shapes(path).keys() - frozen_names
    assert passed_on and all(name.startswith("mtp.") for name in passed_on)
