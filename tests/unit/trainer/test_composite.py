"""Checkpoints that hold more than the part that trains: towers for pictures, layers for drafts."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.config import ModelConfig
from asyncrl.engines.torch.engine import replace_weights
from asyncrl.model_class import auto_class_of, frozen_parts, is_composite, is_within
from asyncrl.trainer.layers import layers_of
from asyncrl.trainer.model import Policy, PublishedShards, copied_buffers, load_critic, load_policy
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights.checkpoint_match import (
    check_checkpoint,
    compare_checkpoint,
    frozen_shapes,
    trained_shapes,
)
from asyncrl.weights.manifest import WeightsError
from asyncrl.weights.model_files import stored_tensors
from asyncrl.weights.names import checkpoint_pieces
from asyncrl.weights.shards import HostShards
from tests.fakes.ranks import DEADLINE, run_ranks
from tests.fakes.tiny_families import FAMILIES, build_family
from tests.fakes.training import export, few_tokens, stored, tiny_config
from tests.fakes.weights import buckets

pytestmark = pytest.mark.slow
BUCKET_BYTES = 3000  # smaller than many tensors

CLASSES = {  # of the families that every run of the tests covers
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


COMPOSITE_FAMILIES = [
    pytest.param(name, marks=() if name in CLASSES else pytest.mark.full)
    for name, family in FAMILIES.items()
    if family.composite
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a checkpoint of a composite family, in two files, with layers for drafts where it has any."""
    directory = tmp_path_factory.mktemp("composite")

    @functools.cache
    def checkpoint_of(name: str) -> Path:
        return build_family(name, directory / name, mtp=bool(FAMILIES[name].mtp), shards=2)

    return checkpoint_of


def read_by_file(directory: Path) -> dict[str, dict[str, Tensor]]:
    return {file.name: load_file(file) for file in sorted(directory.glob("*.safetensors"))}


def plain_model(directory: Path) -> PreTrainedModel:
    auto_class = auto_class_of(AutoConfig.from_pretrained(directory))
    model: PreTrainedModel = auto_class.from_pretrained(directory, dtype=torch.float32).eval()
    return model


def load_changed(directory: Path, world: World) -> Policy:
    """Load a policy and change every weight that trains."""
    policy = load_policy(ModelConfig(path=str(directory), dtype="float32"), world)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    return policy


@pytest.mark.parametrize("family", [*COMPOSITE_FAMILIES, pytest.param("kimi_linear", marks=pytest.mark.full)])
def test_an_export_differs_from_its_source_in_trained_tensors_alone(
    family: str, checkpoints: Callable[[str], Path], world: World, tmp_path: Path
) -> None:
    source = checkpoints(family)
    policy = load_changed(source, world)
    exported = Path(export(tmp_path, policy, world, str(source)))

    published = stored(policy)
    source_files = read_by_file(source)
    exported_files = read_by_file(exported)
    assert {file: tensors.keys() for file, tensors in exported_files.items()} == {
        file: tensors.keys() for file, tensors in source_files.items()
    }
    for file, tensors in source_files.items():
        for name, tensor in tensors.items():
            expected = published.get(name, tensor)
            assert torch.equal(exported_files[file][name], expected), name
            assert (name in published) == (not torch.equal(expected, tensor)), name

    source_config = json.loads((source / "config.json").read_text())
    exported_config = json.loads((exported / "config.json").read_text())
    assert exported_config == source_config and exported_config["architectures"] == [type(policy.lm).__name__]
    reloaded = dict(plain_model(exported).named_parameters())
    for name, parameter in policy.lm.named_parameters():
        assert torch.equal(parameter.full_tensor(), reloaded[name]), name


@pytest.mark.parametrize("family", COMPOSITE_FAMILIES)
def test_the_text_part_trains_and_is_published(
    family: str, checkpoints: Callable[[str], Path], world: World
) -> None:
    source = checkpoints(family)
    policy = load_policy(ModelConfig(path=str(source), dtype="float32"), world)
    match = compare_checkpoint(str(source), "model.path", "language model")
    assert type(policy.lm).__name__ == match.model_class == CLASSES.get(family, match.model_class)

    parts = frozen_parts(policy.lm)
    assert parts and set(match.parts.frozen) == set(parts)
    assert all(
        parameter.requires_grad != is_within(name, parts) for name, parameter in policy.lm.named_parameters()
    )
    assert len(layers_of(policy.lm)) == policy.lm.config.get_text_config().num_hidden_layers

    names = {piece.name for piece in policy.published} | {piece.name for piece in policy.buffer_pieces}
    assert names == set(match.parts.trained) == set(trained_shapes(str(source)))
    all_names = [*match.parts.trained, *match.parts.kept_names]
    assert sorted(all_names) == sorted(stored_tensors(str(source)))
    assert bool(match.parts.passed_on) == bool(FAMILIES[family].mtp)

    policy(few_tokens()).logp.sum().backward()
    trained = {name for name, parameter in policy.lm.named_parameters() if parameter.grad is not None}
    assert trained and not any(is_within(name, parts) for name in trained)


@pytest.mark.parametrize("family", COMPOSITE_FAMILIES)
def test_an_engine_takes_the_published_tensors_under_the_names_of_its_files(
    family: str, checkpoints: Callable[[str], Path], world: World
) -> None:
    source = checkpoints(family)
    changed = load_changed(source, world)
    published = stored(changed) | copied_buffers(changed)
    model = plain_model(source)
    pieces = checkpoint_pieces(model, model.state_dict(), stored_tensors(str(source)))

    replace_weights(model, published, pieces)
    state = dict(model.named_parameters())
    assert all(torch.equal(state[name], p.full_tensor()) for name, p in changed.lm.named_parameters())

    missing_name = max(published)
    with pytest.raises(WeightsError, match=f"missing .*{missing_name}"):
        replace_weights(model, {n: t for n, t in published.items() if n != missing_name}, pieces)
    with pytest.raises(WeightsError, match=r"unknown .*mtp"):
        replace_weights(model, published | {"mtp.fc.weight": torch.ones(1)}, pieces)


def test_a_critic_of_a_composite_model_trains_the_text_part(
    checkpoints: Callable[[str], Path], world: World
) -> None:
    critic = load_critic(tiny_config(str(checkpoints("qwen3_vl"))), world)
    critic(few_tokens()).sum().backward()
    for name, parameter in critic.backbone.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("visual.")), name


@pytest.mark.parametrize("files", ["of the text class", "of the composite class"])
def test_a_critic_has_the_parts_of_the_language_model(files: str, world: World, tmp_path: Path) -> None:
    """config.json has a configuration of a tower, and names the class of the text part."""
    source = build_family("qwen3_5", tmp_path / "model")
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["Qwen3_5ForCausalLM"]}
    if files == "of the text class":
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)
    (source / "config.json").write_text(json.dumps(config))

    assert check_checkpoint(str(source), "critic.path", "backbone") == check_checkpoint(
        str(source), "critic.path"
    ).replace("Qwen3_5ForCausalLM", "Qwen3_5TextModel")
    assert frozen_shapes(str(source)) == {}

    policy = load_policy(ModelConfig(path=str(source), dtype="float32"), world)
    critic = load_critic(tiny_config(str(source)), world)
    assert type(critic.backbone).__name__ == "Qwen3_5TextModel"
    backbone = dict(critic.backbone.named_parameters())
    text_part = dict(policy.lm.get_submodule("model").named_parameters())
    assert text_part.keys() == backbone.keys() - {"value_head.weight", "value_head.bias"}
    assert all(torch.equal(text_part[name].full_tensor(), backbone[name].full_tensor()) for name in text_part)


def test_an_export_passes_on_tensors_of_types_that_torch_lacks(world: World, tmp_path: Path) -> None:
    """Six numbers each, of an MTP layer, which no process reads."""
    source = build_family("qwen3_5", tmp_path / "model")
    file_bytes = (source / "model.safetensors").read_bytes()
    (header_length,) = struct.unpack("<Q", file_bytes[:8])
    header = json.loads(file_bytes[8 : 8 + header_length])
    tensor_data = file_bytes[8 + header_length :]

    raw_tensors = {"mtp.scale": ("F8_E8M0", b"scales"), "mtp.codes": ("F4", b"fp4")}
    for name, (dtype, raw_bytes) in raw_tensors.items():
        offsets = (len(tensor_data), len(tensor_data) + len(raw_bytes))
        header[name] = {"dtype": dtype, "shape": (2, 3), "data_offsets": offsets}
        tensor_data += raw_bytes

    header_text = json.dumps(header).encode()
    file_bytes = struct.pack("<Q", len(header_text)) + header_text + tensor_data
    (source / "model.safetensors").write_bytes(file_bytes)

    policy = load_policy(ModelConfig(path=str(source), dtype="bfloat16"), world)
    exported = export(tmp_path, policy, world, str(source))
    exported_bytes = (Path(exported) / "model.safetensors").read_bytes()
    for name, (dtype, raw_bytes) in raw_tensors.items():
        stored_tensor = stored_tensors(exported)[name]
        assert (stored_tensor.dtype, stored_tensor.shape) == (dtype, (2, 3))
        assert exported_bytes[stored_tensor.offset :][: stored_tensor.nbytes] == raw_bytes
    assert plain_model(Path(exported)).num_parameters() == policy.lm.num_parameters()


def test_the_second_name_of_a_tied_tensor_is_neither_counted_nor_published(
    world: World, tmp_path: Path
) -> None:
    source = build_family("gemma3", tmp_path / "model")
    names_once = set(trained_shapes(str(source)))
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    head = {"language_model.lm_head.weight": embedding.clone()}
    save_file(tensors | head, source / "model.safetensors", metadata={"format": "pt"})

    assert set(trained_shapes(str(source))) == names_once
    policy = load_changed(source, world)
    assert {piece.name for piece in policy.published} == names_once
    exported = Path(export(tmp_path, policy, world, str(source)))
    assert load_file(exported / "model.safetensors").keys() == tensors.keys()
    reloaded = dict(plain_model(exported).named_parameters())
    assert all(torch.equal(p.full_tensor(), reloaded[name]) for name, p in policy.lm.named_parameters())


def test_an_export_names_the_class_that_its_source_does_not(world: World, tmp_path: Path) -> None:
    source = build_family("qwen3_5", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": None}))
    policy = load_policy(ModelConfig(path=str(source), dtype="float32"), world)
    exported = Path(export(tmp_path, policy, world, str(source)))
    assert json.loads((exported / "config.json").read_text()) == config


def test_a_text_class_named_in_config_json_is_kept(checkpoints: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(checkpoints("qwen3_5"))
    assert is_composite(config) and auto_class_of(config).__name__ == "AutoModelForImageTextToText"
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert auto_class_of(config).__name__ == "AutoModelForCausalLM"


def read_joined_rows(world: World, folder: Path) -> list[str]:
    """Return the tensors that differ from those that transformers reads."""
    policy = load_policy(ModelConfig(path=str(folder.parent / "model"), dtype="float32"), world)
    expected = dict(plain_model(folder.parent / "model").named_parameters())
    return [
        name
        for name, parameter in policy.lm.named_parameters()
        if not torch.equal(parameter.full_tensor(), expected[name])
    ]


@pytest.mark.full
def test_ranks_read_their_rows_of_tensors_that_the_model_joins(tmp_path: Path) -> None:
    """The convolutions of Kimi Linear's q, k and v are one tensor of the model, cut anywhere by three
    ranks."""
    build_family("kimi_linear", tmp_path / "model")
    assert run_ranks(3, read_joined_rows, tmp_path / "ranks") == []


def publish_and_export(world: World, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Return what rank 0 collects of a version, the weights of all ranks, and the directory of the export."""
    source = folder.parent / "model"
    with patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):  # parts and layers are sharded one by one
        policy = load_changed(source, world)

    shards = PublishedShards(policy)
    buffers = copied_buffers(policy)
    host = HostShards(shards, policy.published, torch.float32, DEADLINE, buffers=buffers)
    snapshot = host.copy_version(PolicyVersion(0, 1), shards, lambda busy: [busy], buffers)
    published: dict[str, Tensor] = {}
    if world.rank == 0:
        for bucket in buckets(snapshot, BUCKET_BYTES):
            published |= bucket
    world.gather(0, int)  # rank 0 has collected
    host.close(DEADLINE)

    exported = export(folder / f"rank-{world.rank}", policy, world, str(source))
    return published, stored(policy) | buffers, exported


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma4", "qwen3_5"])  # with saved buffers; with an MTP layer
def test_two_ranks_publish_and_export_what_they_train(family: str, tmp_path: Path) -> None:
    source = build_family(family, tmp_path / "model", mtp=bool(FAMILIES[family].mtp), shards=2)
    published, expected, exported = run_ranks(2, publish_and_export, tmp_path / "ranks")
    assert published.keys() == expected.keys() == trained_shapes(str(source)).keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in expected.items())

    exported_files = read_by_file(Path(exported))
    for file, tensors in read_by_file(source).items():
        assert exported_files[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(exported_files[file][name], published.get(name, tensor)), name
