from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.trainer import checkpoint
from asyncrl.trainer.checkpoint import CheckpointError, CheckpointManifest
from asyncrl.trainer.step import Learner
from asyncrl.trainer.world import World
from tests.fakes.training import Recorder, full_state, make_learner, run_batch, tiny_config


@pytest.fixture
def learner(world: World, model_path: str) -> Learner:
    return make_learner(tiny_config(model_path), world, "float32")


@pytest.fixture
def cut(model: Any) -> list[Any]:
    return [[Recorder(model, seed=1).groups(2, 4, [0])]]


def manifest(step: int) -> CheckpointManifest:
    return CheckpointManifest(step=step, trainer_epoch=2, parent=step - 1, trained=("a", "b"))


def test_a_loaded_checkpoint_continues_as_if_nothing_had_happened(
    learner: Learner, world: World, model_path: str, cut: list[Any], directory: Path
) -> None:
    run_batch(learner, cut)
    path = checkpoint.save(directory, learner, manifest(1))
    rng = torch.get_rng_state()
    run_batch(learner, cut)
    torch.rand(3)
    other = make_learner(tiny_config(model_path), world, "float32")
    loaded = checkpoint.load(path, other)
    assert (loaded.step, loaded.trained, loaded.parent, other.step) == (1, ("a", "b"), 0, 1)
    assert torch.equal(torch.get_rng_state(), rng)
    run_batch(other, cut)
    wanted, found = full_state(learner.policy), full_state(other.policy)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_checkpoint_before_the_first_step_holds_the_initial_weights(
    learner: Learner, world: World, model_path: str, cut: list[Any], directory: Path
) -> None:
    before = full_state(learner.policy)
    checkpoint.save(directory, learner, manifest(0))
    run_batch(learner, cut)
    checkpoint.load(directory / "step-0", learner)
    assert learner.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state(learner.policy).items())


def test_the_export_loads_with_transformers(learner: Learner, directory: Path, model_path: str) -> None:
    (Path(model_path) / "chat_template.jinja").write_text("{{ messages }}")
    path = checkpoint.save(directory, learner, manifest(1))
    exported = AutoModelForCausalLM.from_pretrained(path / "hf")
    state = full_state(learner.policy)
    assert all(torch.equal(p, state[name]) for name, p in exported.named_parameters())
    assert exported.lm_head.weight is exported.get_input_embeddings().weight
    assert (path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_newest_falls_back_to_the_one_before(
    learner: Learner, directory: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = checkpoint.save(directory, learner, manifest(1), hf=False)
    second = checkpoint.save(directory, learner, manifest(2), hf=False)
    assert checkpoint.newest(directory) == second
    victim = next((second / "state").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "flip":
            victim.write_bytes(content)
        case "cut":
            victim.write_bytes(content[:-1])
        case "remove":
            victim.unlink()
        case "manifest":
            (second / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(directory) == first
    assert "step-2" in caplog.text and "damaged" in caplog.text


def test_a_half_written_checkpoint_does_not_exist(learner: Learner, directory: Path) -> None:
    assert checkpoint.newest(directory) is None
    path = checkpoint.save(directory, learner, manifest(9), hf=False)
    path.rename(directory / "step-9.tmp")
    assert checkpoint.newest(directory) is None
    with pytest.raises(CheckpointError, match="no readable manifest"):
        checkpoint.load(directory / "step-9", learner)


def test_prune_keeps_the_newest_and_sweeps_leftovers(learner: Learner, directory: Path) -> None:
    for step in (1, 9, 10):
        checkpoint.save(directory, learner, manifest(step), hf=False)
    (directory / "step-11.tmp").mkdir()
    checkpoint.prune(directory, keep=2)
    assert sorted(path.name for path in directory.iterdir()) == ["step-10", "step-9"]


def test_a_step_reached_again_is_replaced(learner: Learner, directory: Path) -> None:
    checkpoint.save(directory, learner, manifest(1), hf=False)
    again = CheckpointManifest(step=1, trainer_epoch=3)
    path = checkpoint.save(directory, learner, again, hf=False)
    assert checkpoint.read_manifest(path).trainer_epoch == 3
    assert [p.name for p in directory.iterdir()] == ["step-1"]


def test_another_models_checkpoint_is_refused(
    learner: Learner, world: World, directory: Path, tmp_path: Path
) -> None:
    from tests.fakes.training import save_tiny_qwen

    path = checkpoint.save(directory, learner, manifest(1), hf=False)
    other = make_learner(tiny_config(save_tiny_qwen(tmp_path / "other")), world, "float32")
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoint.load(path, other)
