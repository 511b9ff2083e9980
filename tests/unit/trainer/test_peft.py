"""`asyncrl merge`: what it writes is the trained policy, in one directory or as base model and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from asyncrl import cli
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.world import World
from tests.fakes.training import (
    full_state,
    make_learner,
    plain_model,
    save_checkpoint,
    save_tiny_model,
    save_tiny_qwen,
    tiny_config,
)

pytestmark = pytest.mark.slow

IDS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("save", [save_tiny_model, save_tiny_qwen])  # GPT-2 keeps its weights transposed
def test_merged_or_apart_it_is_the_policy(save: Any, world: World, tmp_path: Path) -> None:
    path, run = save(tmp_path), tmp_path / "run"
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
    model, scale = plain_model(path).float(), settings["lora_alpha"] / settings["r"]
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
    assert "hf/model.safetensors is not as written" in capsys.readouterr().err and not out.exists()
    out.mkdir()
    assert cli.main(["merge", str(step), str(out)]) == 2
    assert "exists" in capsys.readouterr().err
