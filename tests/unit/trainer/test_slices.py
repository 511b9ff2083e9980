"""Each rank reads its own slices: what it loads, and how much of it it ever holds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.loading import locate_tensors
from asyncrl.trainer.model import load_critic, load_policy, load_reference
from asyncrl.trainer.world import World
from tests.fakes.models import save_llama
from tests.fakes.ranks import run_ranks
from tests.fakes.traced import LiveBytes
from tests.fakes.training import full_state, save_tiny_model, save_tiny_qwen, tiny_config

pytestmark = pytest.mark.slow


def read_on_ranks(world: World, folder: Path) -> Any:
    """What each rank held at most while it read policy, critic, reference; and the policy's weights."""
    path = str(folder.parent / "model")
    config = tiny_config(path, kl={"where": "loss"})
    peaks = []
    loaded: list[Any] = []
    for load in (
        lambda: load_policy(config.model, world),
        lambda: load_critic(config, world),
        lambda: load_reference(config, world, loaded[0]).policy,
    ):
        # The forward that follows gathers the root's parameters, as any forward does.
        with patch("asyncrl.trainer.model._decide_split"), LiveBytes() as counted:
            loaded.append(load())
        shard = sum(p.to_local().nbytes for p in loaded[-1].parameters())
        peaks += world.gather([float(counted.peak), float(shard)], list[float])
    return {"peaks": peaks, "state": full_state(loaded[0])}


def test_no_rank_holds_more_than_its_shard_and_a_layer(tmp_path: Path) -> None:
    path = save_llama(tmp_path / "model")
    rank_results = run_ranks(2, read_on_ranks, tmp_path / "two")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    layer = sum(p.nbytes for p in plain.model.layers[0].parameters())
    whole = sum(p.nbytes for p in plain.parameters())
    assert len(rank_results["peaks"]) == 6
    for index, (peak, shard) in enumerate(rank_results["peaks"]):
        own = 3 * shard if index in (2, 3) else 0  # a critic's optimizer: moments, and gradients of zero
        assert 0.25 * whole < shard < 0.55 * whole
        assert shard <= peak <= shard + own + layer, f"{peak - shard} beyond the shard, a layer: {layer}"
    assert all(torch.equal(rank_results["state"][name], p) for name, p in plain.named_parameters())


def other_layouts(path: Path) -> list[str]:
    """The same tied weights in other files: under the other name, without the prefix."""
    weights = load_file(path / "model.safetensors")
    made = []
    renamed = {
        "head only": {"lm_head.weight" if "embed" in name else name: t for name, t in weights.items()},
        "no prefix": {name.removeprefix("model."): tensor for name, tensor in weights.items()},
    }
    for name, tensors in renamed.items():
        (folder := path.parent / name).mkdir()
        (folder / "config.json").write_text((path / "config.json").read_text())
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        made.append(str(folder))
    return made


def test_names_are_found_as_transformers_finds_them(world: World, tmp_path: Path) -> None:
    path = save_tiny_qwen(tmp_path / "model")
    wanted = full_state(load_policy(ModelConfig(path=path, dtype="float32"), world))
    for other in other_layouts(Path(path)):
        policy = load_policy(ModelConfig(path=other, dtype="float32"), world)
        assert len(locate_tensors(policy.lm, other, policy.file_tensors)) == len(wanted), (
            "nothing was read whole"
        )
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in full_state(policy).items())


def test_files_that_disagree_with_what_is_tied_are_refused(world: World, tmp_path: Path) -> None:
    """Both names with one value are as good as one name."""
    path = Path(save_tiny_qwen(tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    for value, fits in ((head, True), (head + 1, False)):
        save_file(weights | {"lm_head.weight": value}, path / "model.safetensors", {"format": "pt"})
        if fits:
            policy = load_policy(ModelConfig(path=str(path), dtype="float32"), world)
            assert torch.equal(full_state(policy)["model.embed_tokens.weight"], head)
            assert locate_tensors(policy.lm, str(path), policy.file_tensors), "nothing was read whole"
            names = {piece.name for piece in policy.published}
            assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
        else:
            with pytest.raises(ConfigError, match=r"ties lm_head\.weight.*tie_word_embeddings=false"):
                load_policy(ModelConfig(path=str(path), dtype="float32"), world)


def save_pickled(path: Path) -> str:
    save_tiny_model(path)
    weights = load_file(path / "model.safetensors")
    torch.save(weights, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    return str(path)


def test_what_cannot_be_sliced_is_read_by_rank_0(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_pickled(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
    assert "rank 0 reads all" in caplog.text
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = full_state(policy)
    assert all(torch.equal(weights[name], p) for name, p in plain.named_parameters())


def with_adapters(world: World, folder: Path) -> Any:
    path = str(folder.parent / "model")
    torch.manual_seed(1)
    config = ModelConfig(path=path, dtype="float32", lora_rank=2)
    policy = load_policy(config, world)
    critic = load_critic(tiny_config(path), world)
    parameters = [*policy.lm.named_parameters(), *critic.backbone.named_parameters(prefix="critic")]
    return {name: tensor.full_tensor() for name, tensor in parameters}


def test_added_parameters_start_alike_on_any_number_of_ranks(world: World, tmp_path: Path) -> None:
    """Three ranks: more than the adapters have rows."""
    save_tiny_model(tmp_path / "model")
    one = with_adapters(world, tmp_path / "one")
    three = run_ranks(3, with_adapters, tmp_path / "three")
    assert one.keys() == three.keys()
    assert all(torch.equal(tensor, one[name]) for name, tensor in three.items())
    assert one["transformer.h.0.attn.c_attn.lora_a"].any()
    assert not one["transformer.h.0.attn.c_attn.lora_b"].any() and not one["critic.value_head.weight"].any()


def test_buffers_that_no_file_holds_are_right(world: World, tmp_path: Path) -> None:
    path = save_tiny_qwen(tmp_path / "model")
    policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
    plain = dict(AutoModelForCausalLM.from_pretrained(path).named_buffers())
    model_buffers = dict(policy.lm.named_buffers())
    assert model_buffers.keys() == plain.keys() and any("inv_freq" in name for name in model_buffers)
    assert all(torch.equal(buffer, plain[name]) for name, buffer in model_buffers.items())
