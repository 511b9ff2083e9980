from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from asyncrl import cli
from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.model import Policy, PublishedShards, load_policy, score_ids
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.shards import HostShards
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    export,
    few_tokens,
    full_state,
    make_learner,
    plain_logp,
    plain_model,
    save_checkpoint,
    save_tiny_model,
    save_tiny_qwen,
    tiny_config,
)
from tests.fakes.weights import buckets

pytestmark = pytest.mark.slow

RANK = 3
ALPHA = 6.0


@pytest.fixture(scope="module", params=["gpt2", "qwen2 tied", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "gpt2":  # keeps its weights transposed
        return save_tiny_model(directory)
    return save_tiny_qwen(directory, tied=request.param == "qwen2 tied")


def adapted(path: str, world: World, dtype: Any = "float64") -> Policy:
    """With adapters that do something."""
    model = ModelConfig(path=path, dtype=dtype, lora_rank=RANK, lora_alpha=ALPHA)
    policy = load_policy(model, world)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                values = 0.3 * torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
                parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
    return policy


def test_it_starts_as_its_base(world: World, path: str) -> None:
    policy = load_policy(ModelConfig(path=path, dtype="float64", lora_rank=RANK), world)
    a = [p.full_tensor().detach() for name, p in policy.named_parameters() if name.endswith("lora_a")]
    assert torch.allclose(policy(few_tokens()).logp, plain_logp(plain_model(path), few_tokens()), atol=1e-9)
    assert all(0 < float(p.std()) < float(p.abs().max()) <= 1 / p.shape[1] ** 0.5 for p in a)


def test_disabled_it_is_its_base(world: World, path: str) -> None:
    policy = adapted(path, world)
    wanted = plain_logp(plain_model(path), few_tokens())
    with torch.no_grad():
        assert not torch.allclose(policy(few_tokens()).logp, wanted, atol=0.1)
        with policy.without_adapters():
            assert torch.allclose(policy(few_tokens()).logp, wanted, atol=1e-9)
        assert not torch.allclose(policy(few_tokens()).logp, wanted, atol=0.1)


def test_only_adapters_train(world: World, path: str) -> None:
    policy = adapted(path, world)
    policy(few_tokens()).logp.sum().backward()
    trained = {name for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in policy.lm.named_parameters() if p.grad is not None}
    assert trained == {name for name in dict(policy.lm.named_parameters()) if "lora_" in name}
    layers = 4 if "h.0" in str(trained) else 7  # linear ones per block
    assert len(trained) == 2 * 2 * layers


def test_the_merged_export_scores_as_the_adapters_do(world: World, path: str, tmp_path: Path) -> None:
    policy = adapted(path, world)
    wanted = policy(few_tokens()).logp.detach()
    policy.reshard()  # type: ignore[operator]
    exported = plain_model(export(tmp_path, policy, world, path))
    assert torch.allclose(plain_logp(exported, few_tokens()), wanted, atol=1e-6)
    ids = tuple(few_tokens().ids[0].tolist())
    state = full_state(policy)
    assert state.keys() == dict(plain_model(path).named_parameters()).keys()
    assert list(PublishedShards(policy)) == list(state)
    with torch.no_grad():
        table = exported(torch.tensor([ids])).logits[0].log_softmax(-1)
    probe = [float(table[i, token]) for i, token in enumerate(ids[1:])]
    assert score_ids(policy, ids, world.device) == pytest.approx(probe, abs=1e-6)


def test_merging_by_hand(world: World, path: str) -> None:
    policy = adapted(path, world)
    merged = full_state(policy)
    base = dict(plain_model(path).named_parameters())
    own = {name: p.full_tensor() for name, p in policy.lm.named_parameters()}
    changed = 0
    for name, weight in base.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_a" in own:
            change = ALPHA / RANK * own[f"{stem}.lora_b"] @ own[f"{stem}.lora_a"]
            weight = weight + (change if "c_attn" not in str(own.keys()) else change.T)
            changed += 1
        assert torch.allclose(merged[name], weight, atol=1e-9), name
    assert changed in (8, 14)


def test_a_version_is_copied_weight_by_weight(world: World, path: str) -> None:
    """All merged weights together would take as much memory as the model again."""
    policy = adapted(path, world, "float32")
    weak_tensors = list[weakref.ref[DTensor]]()
    most = 0

    def noted(adapters: Adapters, name: str, weight: DTensor) -> DTensor:
        nonlocal most
        found = merged(adapters, name, weight)
        if found is not weight:
            weak_tensors.append(weakref.ref(found))
        most = max(most, sum(one() is not None for one in weak_tensors))
        return found

    merged = Adapters.merged_weight
    with mock.patch.object(Adapters, "merged_weight", noted):
        host = HostShards(PublishedShards(policy), policy.published, torch.float32, 60.0)
        version = host.copy_version(PolicyVersion(0, 1), PublishedShards(policy), lambda busy: [busy])
    assert len(weak_tensors) > 8 and most <= 2
    found = {name: t for bucket in buckets(version, 1 << 20) for name, t in bucket.items()}
    assert all(torch.equal(found[name], weight) for name, weight in full_state(policy).items())


def test_a_model_without_linear_layers_is_refused() -> None:
    class Bare(nn.Module):
        config = PreTrainedConfig()

        def get_output_embeddings(self) -> None:
            return None

    bare: Any = Bare()
    with pytest.raises(ConfigError, match="lora_rank"):
        Adapters(bare, {"": (2, 1.0)})


def work(world: World, folder: Path) -> Any:
    """Gradients and merged weights, in layers of their own; of GPT-2 in as many replicas as ranks."""
    found = {}
    for name, save in (("gpt2", save_tiny_model), ("qwen2", save_tiny_qwen)):
        path = str(folder / name)
        if world.rank == 0:
            save(folder / name)
        world.gather(0, int)
        laid = world.arranged(world.size, 1) if name == "gpt2" else world
        with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
            policy = adapted(path, laid)
        published = PublishedShards(policy)
        local = {name: len(p.to_local()) for name, p in policy.lm.named_parameters()}
        assert all(s.placements[-1] == Shard(0) for s in published.values())
        assert all(len(s.to_local()) == local[name] for name, s in published.items())
        policy(few_tokens()).logp.sum().backward()
        named = policy.lm.named_parameters()
        gradients = {f"grad {n}": p.grad.full_tensor() for n, p in named if p.grad is not None}
        found[name] = full_state(policy) | gradients
    return found


def test_two_ranks_do_what_one_does(world: World, tmp_path: Path) -> None:
    one = work(world, tmp_path / "one")
    two = run_ranks(2, work, tmp_path / "two")
    for name, wanted in one.items():
        assert two[name].keys() == wanted.keys()
        assert sum(key.startswith("grad") for key in wanted) in (16, 28)
        for key, tensor in wanted.items():
            assert torch.allclose(two[name][key], tensor, rtol=1e-6, atol=1e-7), key


IDS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("save", [save_tiny_model, save_tiny_qwen])  # GPT-2 keeps its weights transposed
def test_merged_or_apart_it_is_the_policy(save: Any, world: World, tmp_path: Path) -> None:
    path = save(tmp_path)
    run = tmp_path / "run"
    config = tiny_config(path)
    model = msgspec.structs.replace(config.model, lora_rank=3, lora_alpha=6.0)
    learner = make_learner(msgspec.structs.replace(config, model=model), world, "float32")
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            if parameter.requires_grad:
                parameter.to_local().normal_(std=0.3)  # type: ignore[attr-defined]
    save_checkpoint(run / "checkpoints", learner, CheckpointManifest(step=1, trainer_epoch=1))
    (run / "config.yaml").write_bytes(msgspec.yaml.encode(learner.config))
    expected = plain_model(path).float()
    base = logits(expected)
    expected.load_state_dict(full_state(learner.policy), strict=False)
    policy = logits(expected)
    assert (policy - base).abs().max() > 0.01

    given = str(run / "checkpoints" / "step-1")
    assert cli.main(["merge", given, str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert torch.equal(logits(merged), policy)

    assert cli.main(["merge", str(run), str(tmp_path / "apart"), "--adapters", "apart"]) == 0
    assert (logits(applied(path, tmp_path / "apart")) - policy).abs().max() < 1e-5


def applied(path: str, adapters: Path) -> nn.Module:
    """The base model with adapters as PEFT applies them: W·x + (lora_alpha/r)·B·A·x."""
    settings = json.loads((adapters / "adapter_config.json").read_text())
    tensors = load_file(adapters / "adapter_model.safetensors")
    model = plain_model(path).float()
    scale = settings["lora_alpha"] / settings["r"]
    assert settings["target_modules"] and len(tensors) == 2 * len(settings["target_modules"])
    for name in settings["target_modules"]:
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        layer = model.get_submodule(name)
        assert settings["fan_in_fan_out"] == (not isinstance(layer, nn.Linear))
        layer.register_forward_hook(lambda _, x, y, a=a, b=b: y + scale * x[0] @ a.T @ b.T)
    return model


def test_what_cannot_be_written_is_said(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = make_learner(tiny_config(save_tiny_model(tmp_path)), world, "float32")
    step = save_checkpoint(tmp_path / "checkpoints", learner, CheckpointManifest(step=1, trainer_epoch=1))
    (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(learner.config))
    out = tmp_path / "out"
    assert cli.main(["merge", str(step), str(out), "--adapters", "apart"]) == 2
    assert "all weights were trained" in capsys.readouterr().err and not out.exists()
    weights = step / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert cli.main(["merge", str(step), str(out)]) == 2
    assert "hf/model.safetensors differs from its checksum" in capsys.readouterr().err and not out.exists()
    out.mkdir()
    assert cli.main(["merge", str(step), str(out)]) == 2
    assert "exists" in capsys.readouterr().err
