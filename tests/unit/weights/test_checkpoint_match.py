"""Files of a model directory against the model. More, with the checks of a start: test_checks.py."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
import xxhash
from safetensors.torch import load_file, save_file

from asyncrl.commands.merge import main as merge
from asyncrl.config import ModelConfig
from asyncrl.engines.torch.engine import build
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.world import World
from asyncrl.weights.checkpoint_match import check_checkpoint, compare_checkpoint
from tests.fakes.models import SIZES, save_small
from tests.fakes.tiny_families import build_family

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8}
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": TIED,
    "Gemma2": {},
    "GptOss": EXPERTS,
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS,
}


def change_tensors(directory: Path, **changes: Any) -> None:
    """Write a directory's file of weights anew, with these tensors; without those that are None."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, file, {"format": "pt"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_small(tmp_path_factory.mktemp("llama"), "Llama"))


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "model")


@pytest.mark.parametrize(("family", "sizes"), FAMILIES.items())
def test_what_save_pretrained_writes_fits(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    path = Path(save_small(tmp_path / "model", family, **sizes))
    assert check_checkpoint(str(path), "model.path") == ""
    assert check_checkpoint(str(path), "critic.path", "backbone") == ""

    # Layers for drafts, which published checkpoints have and the model has not.
    drafts = {"mtp.fc.weight": torch.zeros(99, 99), "model.layers.2.eh_proj.weight": torch.zeros(99, 99)}
    change_tensors(path, **drafts)
    assert "2 tensors (model.layers.2.eh_proj.weight, mtp" in check_checkpoint(str(path), "model.path")


def test_copies_of_layers_beyond_the_last_one_are_refused(copied: Path) -> None:
    settings = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1}))
    with pytest.raises(
        ConfigError, match=r"model.path: its files have 9 tensors \(model.layers.1.* another model"
    ):
        check_checkpoint(str(copied), "model.path")


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("Mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("Qwen2", {"sliding_window": 0, "use_sliding_window": False}, ""),
        ("Olmo3", {"sliding_window": -1}, "sliding_window is -1"),
        ("Olmo3", {"sliding_window": 0, "layer_types": ["full_attention"] * 2}, ""),
        ("Llama4Text", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    ],
)
def test_a_window_of_no_token_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], problem: str
) -> None:
    """transformers would let a token see all others, later ones included. `problem`: '' where no layer has
    the window."""
    sizes = {"num_local_experts": 2, "head_dim": 8} if family == "Llama4Text" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | settings))
    if not problem:
        assert check_checkpoint(str(tmp_path), "model.path") == ""
        return
    with pytest.raises(
        ConfigError, match=f"model.path: config.json: {problem}, so no token .*; set this value to"
    ):
        check_checkpoint(str(tmp_path), "model.path")


def test_one_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    path = Path(save_small(tmp_path / "model", "Qwen3Moe", **EXPERTS))
    change_tensors(path, **{"model.layers.1.mlp.experts.2.up_proj.weight": None})
    match = compare_checkpoint(str(path), "model.path", "language model")
    assert match.missing == ["model.layers.1.mlp.experts.2.up_proj.weight"]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_named(world: World, copied: Path, number: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(copied / "model.safetensors")[name]
    weight[3, 4] = number
    change_tensors(copied, **{name: weight})
    assert check_checkpoint(str(copied), "model.path") == ""  # headers do not show it

    for read in (
        lambda: load_policy(ModelConfig(path=str(copied), dtype="float32"), world),
        lambda: build(str(copied), "float32", slots=1, max_len=8),
    ):
        with pytest.raises(ConfigError, match=rf"model.path.*: {name} contains NaN or infinity"):
            read()


def test_a_whole_read_leaves_nothing_random(world: World, copied: Path) -> None:
    """Files that are no safetensors are read by one process, and have no headers to compare."""
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    torch.save(tensors, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert "no safetensors files" in check_checkpoint(str(copied), "model.path")
    with pytest.raises(ConfigError, match=r"kl.reference.*lack 1 tensor .*layers.0.mlp.up_proj"):
        load_policy(ModelConfig(path=str(copied), dtype="float32"), world, key="kl.reference")


def test_a_merged_model_is_compared_with_its_class(copied: Path, tmp_path: Path) -> None:
    change_tensors(copied, **{"model.norm.weight": None})
    step = tmp_path / "runs" / "demo" / "checkpoints" / "step-3"
    shutil.copytree(copied, step / "hf")
    contents = {f"hf/{file.name}": file.read_bytes() for file in (step / "hf").iterdir()}
    files = {name: (len(data), xxhash.xxh3_64_hexdigest(data)) for name, data in contents.items()}
    manifest = CheckpointManifest(step=3, trainer_epoch=0, files=files)
    (step / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(ConfigError, match=r"model.norm.weight"):
        merge([str(step), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["vision_tower.", "language_model."])
def test_a_composite_model_without_one_of_its_parts_is_refused(tmp_path: Path, part: str) -> None:
    model = build_family("gemma3", tmp_path)
    names = load_file(model / "model.safetensors")
    change_tensors(model, **{name: None for name in names if name.startswith(part)})
    message = rf"^model\.path: its files lack \d+ tensors \(.*{part}.*\) of Gemma3ForConditional.* again$"
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(str(model), "model.path")
