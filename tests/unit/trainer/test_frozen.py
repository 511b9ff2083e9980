"""Frozen weights are kept in bfloat16: everything is, to the last bit, as with frozen weights in float32."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from asyncrl.config import ModelConfig
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.loading import master_dtype
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    Recorder,
    final_gradients,
    full_state,
    load_checkpoint,
    make_learner,
    plain_model,
    random_cut,
    run_batch,
    save_checkpoint,
    save_tiny_model,
    save_tiny_qwen,
    tiny_config,
)

pytestmark = pytest.mark.slow

BFLOAT16 = torch.bfloat16
FLOAT32 = torch.float32
LORA = {"model": {"lora_rank": 3, "lora_alpha": 6.0}}
UNFILTERED = {"buffer": {"filter_zero_variance": False}}
KL = {"where": "loss", "coef": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "adapters and a reference": LORA | UNFILTERED | {"kl": KL | {"reference": "the model"}},
    "adapters": LORA,
    "adapters and the base as the reference": LORA | {"kl": KL},
    "a reference": {"kl": KL},
    "adapters and a teacher": LORA | {"kl": KL | {"estimator": "js"}},
    "adapters and a critic": LORA | UNFILTERED | {"algorithm": {"advantage": "gae"}},
}


def save_model(folder: Path, kind: str, dtype: torch.dtype = BFLOAT16) -> str:
    """GPT-2 keeps its matrices transposed, and ties its output layer."""
    save = save_tiny_model if kind == "gpt2" else partial(save_tiny_qwen, tied=False)
    path = save(folder)
    plain_model(path, BFLOAT16).to(dtype).save_pretrained(path)
    return path


def as_before(parameter: nn.Parameter, dtype: str) -> torch.dtype:
    return master_dtype(dtype)


class Trained(NamedTuple):
    """What a learner computes, on rank 0."""

    dtypes: set[tuple[bool, torch.dtype]]  # of its parameters, and of its reference's: trained or not
    metrics: list[dict[str, float]]  # of two batches, and of a third after resuming
    gradients: dict[str, Tensor]
    published: dict[str, Tensor]
    exported: bytes


def make(path: str, sections: dict[str, Any], world: World) -> Learner:
    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
        torch.manual_seed(0)
        config = tiny_config(path, **sections)
        if config.kl.reference:
            config = msgspec.structs.replace(config, kl=msgspec.structs.replace(config.kl, reference=path))
        return make_learner(config, world, "bfloat16")


def trained(path: str, sections: dict[str, Any], world: World, folder: Path) -> Trained:
    episodes = Recorder(plain_model(path), noise=0.1).groups(2, 2, [0])
    cut = random_cut(episodes, world.size, 2, seed=0)
    learner = make(path, sections, world)
    metrics = [run_batch(learner, cut) for _ in range(2)]
    step = save_checkpoint(folder, learner, CheckpointManifest(step=2, trainer_epoch=1))

    resumed = make(path, sections, world)
    load_checkpoint(step, resumed)
    gradients = final_gradients(resumed, cut)
    metrics.append(run_batch(resumed, cut))
    exported = (step / "hf" / "model.safetensors").read_bytes()
    published = full_state(resumed.policy)
    return Trained(set(dtypes_of(learner)), metrics, gradients, published, exported)


def dtypes_of(learner: Learner) -> Iterator[tuple[bool, torch.dtype]]:
    policies = [learner.policy, *([learner.reference.policy] if learner.reference else [])]
    for policy in policies:
        for parameter in policy.parameters():
            yield parameter.requires_grad, parameter.dtype


def both_ways(case: str, kind: str, world: World, folder: Path) -> tuple[Trained, Trained]:
    """Train with frozen weights in bfloat16, and with all weights in float32. A collective."""
    path = str(folder / "model")
    if world.rank == 0:
        save_model(folder / "model", kind)
    world.gather(0, int)
    now = trained(path, CASES[case], world, folder / "now")
    with mock.patch("asyncrl.trainer.loading.stored_dtype", as_before):
        return now, trained(path, CASES[case], world, folder / "before")


def assert_same_bits(now: Trained, before: Trained) -> None:
    assert now.dtypes == {(True, FLOAT32), (False, BFLOAT16)}
    assert before.dtypes == {(True, FLOAT32), (False, FLOAT32)}
    assert [timeless(metrics) for metrics in now.metrics] == [timeless(metrics) for metrics in before.metrics]
    assert now.gradients.keys() == before.gradients.keys()
    assert all(torch.equal(tensor, before.gradients[name]) for name, tensor in now.gradients.items())
    assert any(tensor.any() for tensor in now.gradients.values())
    assert now.published.keys() == before.published.keys()
    assert all(torch.equal(tensor, before.published[name]) for name, tensor in now.published.items())
    assert now.exported == before.exported


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("timing", "perf"))}


full = pytest.mark.full


@pytest.mark.parametrize(
    ("case", "kind", "ranks"),
    [
        ("adapters and a reference", "gpt2", 2),
        *(pytest.param(case, "qwen2", 1, marks=full) for case in CASES),
        *(pytest.param(case, "gpt2", 2, marks=full) for case in [*CASES][1:]),
        pytest.param("adapters and a teacher", "qwen2", 4, marks=full),
    ],
)
def test_training_is_the_same(world: World, tmp_path: Path, case: str, kind: str, ranks: int) -> None:
    work = partial(both_ways, case, kind)
    assert_same_bits(*(work(world, tmp_path) if ranks == 1 else run_ranks(ranks, work, tmp_path)))


def test_a_checkpoint_of_a_base_in_float32_is_loaded(world: World, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "qwen2")
    cut = random_cut(Recorder(plain_model(path), noise=0.1).groups(2, 2, [0]), 1, 2, seed=0)
    with mock.patch("asyncrl.trainer.loading.stored_dtype", as_before):
        before = make(path, LORA, world)
    run_batch(before, cut)
    step = save_checkpoint(tmp_path / "checkpoints", before, CheckpointManifest(step=1, trainer_epoch=1))

    now = make(path, LORA, world)
    load_checkpoint(step, now)
    assert set(dtypes_of(now)) == {(True, FLOAT32), (False, BFLOAT16)}
    published = full_state(now.policy)
    assert all(torch.equal(published[name], tensor) for name, tensor in full_state(before.policy).items())


def test_adapters_on_a_base_that_is_read_by_rank_0(world: World, tmp_path: Path) -> None:
    path = save_model(tmp_path / "sliced", "qwen2")
    (tmp_path / "pickled").mkdir()
    for file in Path(path).glob("*.json"):
        shutil.copy(file, tmp_path / "pickled")
    torch.save(load_file(f"{path}/model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    sliced, whole = (
        load_policy(ModelConfig(path=str(tmp_path / name), lora_rank=2), world)
        for name in ("sliced", "pickled")
    )
    assert {p.dtype for p in whole.parameters() if not p.requires_grad} == {BFLOAT16}
    assert {p.dtype for p in whole.parameters() if p.requires_grad} == {FLOAT32}
    published = full_state(whole)
    assert all(torch.equal(published[name], tensor) for name, tensor in full_state(sliced).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_frozen_weights_of_larger_types_are_rounded_and_the_log_says_so(
    world: World, tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = plain_model(save_tiny_qwen(tmp_path), torch.float32).to(dtype)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        load_policy(ModelConfig(path=str(tmp_path)), world)
        assert "rounded" not in caplog.text, "trained weights keep all bits"
        policy = load_policy(ModelConfig(path=str(tmp_path), lora_rank=2), world)
    assert caplog.text.count("frozen weights are rounded to bfloat16") == (dtype != BFLOAT16)
    frozen = {name: p.full_tensor() for name, p in policy.lm.named_parameters() if not p.requires_grad}
    assert all(torch.equal(frozen[name], p.to(BFLOAT16)) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_without_adapters_a_frozen_policy_publishes_the_bytes_of_one_that_trains(
    world: World, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = save_tiny_qwen(tmp_path)
    plain_model(path, FLOAT32).to(dtype).save_pretrained(path)
    trained, frozen = (load_policy(ModelConfig(path=path), world, frozen=frozen) for frozen in (False, True))
    assert {p.dtype for p in trained.parameters()} == {FLOAT32}
    assert {p.dtype for p in frozen.parameters()} == {BFLOAT16}
    published = full_state(frozen)
    assert all(torch.equal(published[name], tensor) for name, tensor in full_state(trained).items())
