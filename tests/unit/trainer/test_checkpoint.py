from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.store.checkpoints import CheckpointError, CheckpointManifest, Checkpoints, Files
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    BuildLearner,
    Recorder,
    full_state,
    load_checkpoint,
    make_learner,
    newest_checkpoint,
    plain_model,
    run_batch,
    save_checkpoint,
    save_tiny_model,
    tiny_config,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def learner(build_learner: BuildLearner) -> Learner:
    return build_learner(dtype="float32")


@pytest.fixture
def cut(model: Any) -> list[Any]:
    return [[Recorder(model, seed=1).groups(2, 4, [0])]]


PPO = {
    "algorithm": {"advantage": "gae", "loss": "reinforce"},
    "buffer": {"filter_zero_variance": False},
}


def manifest(step: int) -> CheckpointManifest:
    return CheckpointManifest(step=step, trainer_epoch=2, parent=step - 1, trained=("a", "b"))


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """All that trains, critic included. A collective."""
    models = {"policy": learner.policy.lm, "critic": learner.critic}
    return {
        f"{of}.{name}": parameter.full_tensor().clone()
        for of, model in models.items()
        if model is not None
        for name, parameter in model.named_parameters()
    }


ADAPTS = {"where": "loss", "target": 0.1}
CONTINUED: dict[str, dict[str, Any]] = {
    "the default": {},
    **{f"a critic, LoRA {rank}": {**PPO, "kl": ADAPTS, "model": {"lora_rank": rank}} for rank in (0, 2)},
    "sgd": {"trainer": {"optimizer": "sgd"}},
    "momentum": {"trainer": {"optimizer": {"sgd": {"momentum": 0.9}}}},
    "in main memory": {"trainer": {"optimizer": "torch.optim:RMSprop", "offload_optimizer": True}},
}


@pytest.mark.parametrize("case", CONTINUED)
def test_a_loaded_checkpoint_continues_as_if_nothing_had_happened(
    case: str, build_learner: BuildLearner, cut: list[Any], directory: Path
) -> None:
    """Models, optimizers' moments, adapters, state and RNG."""
    learner, other = (build_learner(dtype="float32", **CONTINUED[case]) for _ in range(2))
    initial = whole(learner)
    run_batch(learner, cut)
    if "kl" in CONTINUED[case]:
        learner.state["kl_coef"] = 0.125
    path = save_checkpoint(directory, learner, manifest(1))
    saved = whole(learner)
    state = {**learner.state}
    rng = torch.get_rng_state()
    run_batch(learner, cut)
    torch.rand(3)
    loaded = load_checkpoint(path, other)
    assert (loaded.step, loaded.trained, loaded.parent, other.step) == (1, ("a", "b"), 0, 1)
    assert torch.equal(torch.get_rng_state(), rng)
    assert "kl" not in CONTINUED[case] or other.state == loaded.state == state
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole(other).items())
    assert any("value_head" in name for name in saved) == ("critic" in case)
    assert any("lora" in name for name in saved) == ("LoRA 2" in case)
    run_batch(other, cut)
    wanted = whole(learner)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in whole(other).items())
    for before, after in ((initial, saved), (saved, wanted)):
        moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        assert moved and ("critic" not in case or any("value_head" in name for name in moved))


def test_a_checkpoint_before_the_first_step_holds_the_initial_weights(
    learner: Learner, cut: list[Any], directory: Path
) -> None:
    before = full_state(learner.policy)
    save_checkpoint(directory, learner, manifest(0))
    run_batch(learner, cut)
    load_checkpoint(directory / "step-0", learner)
    assert learner.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state(learner.policy).items())


def test_the_export_loads_with_transformers(learner: Learner, directory: Path, model_path: str) -> None:
    (Path(model_path) / "chat_template.jinja").write_text("{{ messages }}")
    path = save_checkpoint(directory, learner, manifest(1))
    exported = AutoModelForCausalLM.from_pretrained(path / "hf")
    state = full_state(learner.policy)
    assert all(torch.equal(p, state[name]) for name, p in exported.named_parameters())
    assert exported.lm_head.weight is exported.get_input_embeddings().weight
    assert (path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"
    model = msgspec.structs.replace(learner.config.model, template="{{ 'ä' }}")
    learner.config = msgspec.structs.replace(learner.config, model=model)
    path = save_checkpoint(directory, learner, manifest(1))
    assert (path / "hf" / "chat_template.jinja").read_text(encoding="utf-8") == "{{ 'ä' }}"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no text", "of another step"])
def test_a_damaged_newest_falls_back_to_the_one_before(
    learner: Learner, directory: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = save_checkpoint(directory, learner, manifest(1), hf=False)
    second = save_checkpoint(directory, learner, manifest(2), hf=False)
    assert newest_checkpoint(directory) == second
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
        case "no text":
            written = (second / "manifest.json").read_bytes()
            (second / "manifest.json").write_bytes(written.replace(b"state/", b"st\xffte/"))
        case "of another step":
            shutil.rmtree(second)
            shutil.copytree(first, second)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(directory) == first
    assert "step-2" in caplog.text and "damaged" in caplog.text


@pytest.mark.parametrize("name", ["sft::v1", "a?b#c", "~", "%20", "file:x"])
def test_a_directory_of_any_name_holds_its_own_checkpoints(tmp_path: Path, name: str) -> None:
    place = Checkpoints(tmp_path / name / "checkpoints")
    assert place.is_local and place.root == f"{tmp_path}/{name}/checkpoints"


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(learner: Learner, directory: Path) -> None:
    """Files may be at most 1,000 bytes long here: what a full disk does to torch's own writer, too."""
    first = save_checkpoint(directory, learner, manifest(1), hf=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"(File too large|RuntimeError).*; checkpoint .*/step-2"):
            save_checkpoint(directory, learner, manifest(2), hf=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(directory.iterdir()) == [first]
    assert save_checkpoint(directory, learner, manifest(2), hf=False) == newest_checkpoint(directory)


@pytest.mark.timeout(60)  # instead of an endless loop
@pytest.mark.parametrize("parent", [3, 5])
def test_a_lineage_leads_to_earlier_steps(directory: Path, parent: int) -> None:
    checkpoints = Checkpoints(directory)
    checkpoints.prepare_step(3)
    checkpoints.write_manifest(CheckpointManifest(step=3, trainer_epoch=0, parent=parent))
    with pytest.raises(CheckpointError, match="step-3: the parent is not an earlier checkpoint"):
        checkpoints.lineage(3, trained_steps=0)


def test_a_half_written_checkpoint_does_not_exist(learner: Learner, directory: Path) -> None:
    assert newest_checkpoint(directory) is None
    path = save_checkpoint(directory, learner, manifest(9), hf=False)
    (path / "manifest.json").unlink()
    assert newest_checkpoint(directory) is None
    with pytest.raises(CheckpointError, match="no readable manifest"):
        load_checkpoint(path, learner)


@pytest.mark.parametrize(("best", "kept"), [(-1, [9, 10]), (1, [1, 9, 10]), (9, [9, 10]), (15, [9, 10])])
def test_prune_keeps_the_newest_and_the_best_and_sweeps_leftovers(
    directory: Path, best: int, kept: list[int]
) -> None:
    """Neither files without a manifest nor half a manifest are a checkpoint that counts, nor one beyond the
    step that was just written: it was passed over as damaged."""
    checkpoints = Checkpoints(directory)
    for step in (1, 5, 9, 10, 12, 15):
        files: Files = {}
        with checkpoints.create_file(step, "state/x", files) as file:
            file.write(b"12")
        if step != 12:
            checkpoints.write_manifest(CheckpointManifest(step=step, trainer_epoch=0, files=files))
    (directory / "step-11").mkdir()
    (directory / "step-11" / "manifest.json").write_text('{"step": 1')
    checkpoints.prune_steps(10, keep=2, best=best)
    assert sorted(checkpoints.steps()) == kept
    assert sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir()) == kept


def test_nothing_is_read_back_and_nothing_renamed(
    learner: Learner, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*about: Any, **more: Any) -> None:
        raise AssertionError(f"{about}")

    with monkeypatch.context() as during:
        for place, name in ((os, "rename"), (os, "replace"), (shutil, "move"), (Checkpoints, "open_file")):
            during.setattr(place, name, forbidden)
        path = save_checkpoint(directory, learner, manifest(1))
    assert newest_checkpoint(directory) == path
    assert len(Checkpoints(directory).manifest(1).files) > 3


def test_a_step_reached_again_is_replaced(learner: Learner, directory: Path) -> None:
    save_checkpoint(directory, learner, manifest(1), hf=False)
    again = CheckpointManifest(step=1, trainer_epoch=3)
    save_checkpoint(directory, learner, again, hf=False)
    assert Checkpoints(directory).manifest(1).trainer_epoch == 3
    assert [p.name for p in directory.iterdir()] == ["step-1"]


def test_another_models_checkpoint_is_refused(
    learner: Learner, world: World, directory: Path, tmp_path: Path
) -> None:
    from tests.fakes.training import save_tiny_qwen

    path = save_checkpoint(directory, learner, manifest(1), hf=False)
    other = make_learner(tiny_config(save_tiny_qwen(tmp_path / "other")), world, "float32")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(path, other)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Step, first and second moment of each parameter."""
    state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [getattr(t, "full_tensor", lambda t=t: t)().clone() for of in state for t in of.values()]


NARROW = {"mask": {"low": 0.999999, "high": 1.000001}, "truncate": {}}
EARLY: dict[str, dict[str, Any]] = {
    "nothing was trained": {},
    "the first batch is under way": {},
    "the first batch was skipped": {"algorithm": {"correction": NARROW, "ess_lr": True}},
    "a parameter never got a gradient": {},
    "a critic warms up": {**PPO, "critic": {"warmup_steps": 5}},
}


@pytest.mark.parametrize("case", EARLY)
def test_a_run_stopped_early_goes_on(
    build_learner: BuildLearner, case: str, model: Any, cut: list[Any], directory: Path
) -> None:
    learner = build_learner(dtype="float32", **EARLY[case])
    match case:
        case "nothing was trained":
            pass
        case "the first batch is under way":
            learner.accumulate(cut[0][0])
        case "the first batch was skipped":
            far = Recorder(model, seed=1, noise=3.0).groups(2, 3, [0])
            assert run_batch(learner, [[far]])["actor/skipped_steps"] == 1
        case "a parameter never got a gradient":
            learner.policy.lm.transformer.wpe.weight.requires_grad_(False)
            run_batch(learner, cut)
        case _:
            run_batch(learner, cut)
    before = moments(learner.optimizer)
    path = save_checkpoint(directory, learner, manifest(learner.step), hf=False)
    other = build_learner(dtype="float32", **EARLY[case])
    load_checkpoint(path, other)
    for found in (learner, other):  # saving changed nothing, loading found all
        assert all(torch.equal(a, b) for a, b in zip(moments(found.optimizer), before, strict=True))
    wanted = whole(learner)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in whole(other).items())


def test_a_checkpoint_of_an_optimizer_that_made_its_state_late_loads(
    build_learner: BuildLearner, learner: Learner, cut: list[Any], directory: Path
) -> None:
    learner.optimizer = torch.optim.AdamW(learner.policy.parameters(), lr=1e-2, betas=(0.9, 0.95))
    run_batch(learner, cut)
    path = save_checkpoint(directory, learner, manifest(1), hf=False)
    other = build_learner(dtype="float32")
    load_checkpoint(path, other)
    wanted = moments(learner.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(moments(other.optimizer), wanted, strict=True))


@pytest.mark.parametrize(
    ("saved", "target", "wanted"), [(0.125, 0.0, 0.5), (0.125, 0.1, 0.125), (None, 0.1, 0.5)]
)
def test_only_a_coefficient_that_adapts_is_restored(
    saved: float | None, target: float, wanted: float, build_learner: BuildLearner, directory: Path
) -> None:
    """One that nobody used is not saved."""
    learner = build_learner(dtype="float32", **({} if saved is None else {"kl": ADAPTS}))
    if saved is not None:
        learner.state["kl_coef"] = saved
    path = save_checkpoint(directory, learner, manifest(1), hf=False)
    other = build_learner(dtype="float32", kl={"where": "loss", "target": target, "coef": 0.5})
    load_checkpoint(path, other)
    assert other.state["kl_coef"] == wanted


def test_the_optimizers_settings_are_those_of_the_config(
    build_learner: BuildLearner, learner: Learner, directory: Path
) -> None:
    path = save_checkpoint(directory, learner, manifest(1), hf=False)
    changed = {"weight_decay": 0.25, "betas": (0.5, 0.75)}
    other = build_learner(dtype="float32", trainer=changed)
    load_checkpoint(path, other)
    (group,) = other.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], len(group["params"])) == (0.25, (0.5, 0.75), 28)


def test_the_reference_stays_the_initial_policy(
    build_learner: BuildLearner, cut: list[Any], directory: Path
) -> None:
    learner, other = (build_learner(dtype="float32", kl={"where": "loss"}) for _ in range(2))
    assert learner.reference is not None
    before = full_state(learner.reference.policy)
    run_batch(learner, cut)
    path = save_checkpoint(directory, learner, manifest(1), hf=False)
    load_checkpoint(path, other)
    assert other.reference is not None
    weights = full_state(other.reference.policy)
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert not all(torch.equal(weights[name], t) for name, t in full_state(other.policy).items())


def test_a_checkpoint_from_before_there_were_critics_loads(
    build_learner: BuildLearner, learner: Learner, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_checkpoint(directory, learner, manifest(1), hf=False)
    old = json.loads((path / "manifest.json").read_text())
    del old["state"]
    (path / "manifest.json").write_text(json.dumps(old))
    other = build_learner(dtype="float32", **PPO)
    with caplog.at_level(logging.WARNING):
        load_checkpoint(path, other)
    assert other.step == 1 and other.state["kl_coef"] == other.config.kl.coef
    assert "no critic" in caplog.text


def train_with_critic(world: World, folder: Path) -> Any:
    """Save on these ranks after a step; what training on from there gives them."""
    model_path = str(folder.parent / "model")
    learner = make_learner(tiny_config(model_path, **PPO), world)
    episodes = Recorder(plain_model(model_path), seed=1).groups(2, 4, [0])
    share = [[episodes[rank :: world.size] for rank in range(world.size)]]
    latest = folder.parent / "checkpoints" / "step-1"
    if latest.exists():
        load_checkpoint(latest, learner)
    else:
        run_batch(learner, share)
        full = patch("asyncrl.trainer.export.write_file", side_effect=OSError(28, "No space left on device"))
        with full, pytest.raises(CheckpointError, match="No space left"):  # on all ranks, and none hangs
            save_checkpoint(folder, learner, manifest(1))
        save_checkpoint(folder.parent / "checkpoints", learner, manifest(1), hf=False)
    run_batch(learner, share)
    return whole(learner)


def test_a_critic_goes_on_with_other_ranks(world: World, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "one").mkdir()
    one = train_with_critic(world, tmp_path / "one")
    two = run_ranks(2, train_with_critic, tmp_path / "two")
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, rtol=1e-4, atol=1e-6), name
