"""Persistent buffers: part of a model that nobody trains, and without which it computes something else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.engines.torch.engine import replace_weights
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.model import PublishedShards, copied_buffers, load_policy, score_ids
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import WeightsError
from asyncrl.weights.names import file_pieces, saved_buffers
from asyncrl.weights.shards import HostShards
from tests.fakes.models import SIZES
from tests.fakes.training import export, load_checkpoint, make_learner, save_checkpoint, tiny_config

pytestmark = pytest.mark.slow

IDS = tuple(range(1, 21))


class BufferedConfig(Qwen2Config):
    model_type = "asyncrl_buffered"


def scaled(layer: Any, _: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0] * layer.gain.to(given[0].dtype),)


class BufferedForCausalLM(Qwen2ForCausalLM):
    """Each layer scales what it is given, by a buffer; others only have to arrive. Among the parameters are
    three numbers of two bytes, behind which nothing of four is aligned."""

    config_class = BufferedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        first, second = self.model.layers
        for layer in (first, second):
            layer.gain = nn.Buffer(torch.ones(config.hidden_size))
            layer.mlp.register_forward_pre_hook(partial(scaled, layer))
        first.odd = nn.Parameter(torch.zeros(3))
        first.count = nn.Buffer(torch.tensor(0))  # an integer, of no dimension
        first.flags = nn.Buffer(torch.zeros(3, dtype=torch.bool))
        first.short = nn.Buffer(torch.zeros(3, dtype=torch.bfloat16))
        first.passing = nn.Buffer(torch.zeros(2), persistent=False)
        self.post_init()


AutoConfig.register(BufferedConfig.model_type, BufferedConfig)
AutoModelForCausalLM.register(BufferedConfig, BufferedForCausalLM)


@torch.no_grad()
def save(folder: Path) -> dict[str, Tensor]:
    """Save such a model; returns what `save_pretrained` wrote."""
    torch.manual_seed(0)
    model = BufferedForCausalLM(BufferedConfig(**SIZES, tie_word_embeddings=True))
    for name, buffer in model.named_buffers():
        if name.endswith(("gain", "short")):
            buffer.normal_(0, 0.3)
        elif name.endswith(("count", "flags")):
            buffer.fill_(77)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        table = model.eval()(torch.tensor([IDS])).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def through_all(world: World, folder: Path) -> dict[str, Any]:
    """Exported, published as files, then twice as deltas; the buffers differ from version to version."""
    source = str(folder.parent / "model")
    found = dict[str, Any]()
    policy = load_policy(ModelConfig(path=source, dtype="bfloat16"), world)
    found["scores"] = score_ids(policy, IDS, world.device)
    found["exported"] = export(folder, policy, world, source)
    kept = copied_buffers(policy)
    host = HostShards(PublishedShards(policy), policy.published, policy.export_dtype, 60.0, buffers=kept)
    for size in (1, 50, 1 << 20):  # bytes of a bucket: each tensor alone, some together, all at once
        writer = VersionWriter(folder / f"versions-{size}", size, full_every=3)
        for version in range(3):
            kept = {name: buffer + buffer for name, buffer in kept.items()}
            gather = lambda busy: world.gather(busy, list[int])  # noqa: E731
            snapshot = host.copy_version(PolicyVersion(0, version), PublishedShards(policy), gather, kept)
            if world.rank == 0:
                manifest, read = disk.read_tensors(writer.write_version(snapshot))
                assert (manifest.delta is None) == (version == 0)
                assert all(torch.equal(read[name], buffer) for name, buffer in kept.items())
            world.gather(0, int)
        kept = copied_buffers(policy)
    found["published"] = read if world.rank == 0 else {}
    host.close(60.0)
    return found


def test_others_get_the_buffers_that_save_pretrained_writes(world: World, tmp_path: Path) -> None:
    assert {name.rpartition(".")[2] for name in save(tmp_path / "model")} >= {
        "gain",
        "count",
        "flags",
        "short",
    }
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    found = through_all(world, tmp_path / "run")
    exported = load_file(Path(found["exported"]) / "model.safetensors")
    for what in (exported, found["published"]):
        assert what.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert what[name].dtype == tensor.dtype and what[name].shape == tensor.shape, name
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items()), "as they are"
    again = AutoModelForCausalLM.from_pretrained(found["exported"], dtype=torch.bfloat16)
    torch.testing.assert_close(logprobs(again), torch.tensor(found["scores"]), atol=0.05, rtol=0)


SHAPE = SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3": ("DeepseekV3Config", EXPERTS | LATENT),
    "Glm4Moe": ("Glm4MoeConfig", EXPERTS | {"head_dim": 8}),
    "MiniMaxM2": (
        "MiniMaxM2Config",
        EXPERTS | {"head_dim": 8, "rotary_dim": 8, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "Gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 8,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": 40,
            "hidden_size_per_layer_input": 4,
        },
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_an_export_computes_what_was_trained(family: str, world: World, tmp_path: Path) -> None:
    """So does an engine that loads the version, whatever it held before."""
    config, own = MODELS[family]
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**SHAPE | own)
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    kept = [
        b for name, b in model.named_buffers() if name.endswith(("e_score_correction_bias", "layer_scalar"))
    ]
    for buffer in kept:
        nn.init.normal_(buffer, 0, 0.3)
    model.save_pretrained(tmp_path / "model")
    policy = load_policy(ModelConfig(path=str(tmp_path / "model"), dtype="float32"), world)
    wanted = torch.tensor(score_ids(policy, IDS, world.device))
    exported = export(tmp_path, policy, world, str(tmp_path / "model"))
    torch.testing.assert_close(logprobs(AutoModelForCausalLM.from_pretrained(exported)), wanted)
    files = [load_file(Path(at) / "model.safetensors") for at in (exported, tmp_path / "model")]
    assert kept and files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert tensor.dtype == files[1][name].dtype and torch.equal(tensor, files[1][name])
    for tensor in (*model.parameters(), *kept):
        nn.init.zeros_(tensor)
    replace_weights(model, files[0])
    torch.testing.assert_close(logprobs(model), wanted)
    gone = next(name for name in files[0] if name.endswith(("e_score_correction_bias", "layer_scalar")))
    with pytest.raises(WeightsError, match=f"missing.*{gone}"):
        replace_weights(model, {name: tensor for name, tensor in files[0].items() if name != gone})


def test_a_resumed_run_has_the_buffers_of_its_checkpoint(world: World, tmp_path: Path) -> None:
    """A model may change one in its forward."""
    save(tmp_path / "model")
    config = tiny_config(str(tmp_path / "model"))
    learner = make_learner(config, world, "float32")
    learner.policy.lm.model.layers[0].count.fill_(78)
    learner.policy.lm.model.layers[1].gain.fill_(0.5)
    written = save_checkpoint(tmp_path / "checkpoints", learner, CheckpointManifest(step=0, trainer_epoch=0))
    again = make_learner(config, world, "float32")
    load_checkpoint(written, again)
    kept = copied_buffers(again.policy)
    wanted = copied_buffers(learner.policy)
    assert kept["model.layers.0.count"] == 78
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in kept.items())
    exported = load_file(written / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], buffer) for name, buffer in wanted.items())


def test_the_names_are_those_that_save_pretrained_writes(tmp_path: Path) -> None:
    """Of a buffer that two modules share one name, and none of what is not to be saved."""
    model = BufferedForCausalLM(BufferedConfig(**SIZES, tie_word_embeddings=True))
    first, second = model.model.layers
    first.twin = second.twin = nn.Buffer(torch.zeros(2))
    model._tied_weights_keys = {**model._tied_weights_keys, "model.layers.0.twin": "model.layers.1.twin"}
    model._keys_to_ignore_on_save = ["model.layers.0.count"]
    model.post_init()
    model.save_pretrained(tmp_path)
    kept = dict(model.named_parameters()) | saved_buffers(model)
    files = load_file(tmp_path / "model.safetensors")
    assert {piece.name for piece in file_pieces(model, kept)} == files.keys()
    assert "model.layers.1.twin" in files and not files.keys() & {
        "model.layers.0.twin",
        "model.layers.0.count",
    }
    replace_weights(model, files)
