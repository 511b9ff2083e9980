"""Ranks, and how they are arranged, are a matter of speed only; and a checkpoint does not remember them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import PublishedShards
from asyncrl.trainer.world import World
from asyncrl.types import PolicyVersion
from asyncrl.weights.shards import HostShards
from asyncrl.weights.snapshot import Tensors
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    Episode,
    Recorder,
    balanced_cut,
    full_state,
    load_checkpoint,
    make_learner,
    newest_checkpoint,
    plain_model,
    run_batch,
    save_checkpoint,
    save_tiny_qwen,
    tiny_config,
)
from tests.fakes.weights import buckets

STEPS = 5
SAVED_AT = 3
# Not trainer/kept_tokens: which episodes without advantage are scored, and may be masked, depends on the cut.
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/advantages/mean", "trainer/model_tokens")


class Runs:
    """The same recorded batches on any number of ranks, each run once."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self.world = world
        self.done: dict[int, dict[str, Any]] = {}
        path = save_tiny_qwen(folder / "model")
        model = plain_model(path, torch.float32)
        batches = [
            Recorder(model, seed=step, noise=0.2, prompt=30).groups(4, 4, [max(step - 1, 0), step])
            for step in range(STEPS)
        ]
        torch.save((path, batches), folder / "recorded.pt")

    def on(self, ranks: int) -> dict[str, Any]:
        if ranks not in self.done:
            directory = self.folder / f"{ranks}-ranks"
            self.done[ranks] = (
                work(self.world, directory) if ranks == 1 else run_ranks(ranks, work, directory)
            )
        return self.done[ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, world: World) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"), world)


def train(learner: Learner, batches: list[list[Episode]]) -> list[dict[str, float]]:
    """AdamW with clipping, float32, micro-batches packed as in a run."""
    curve = []
    for batch in batches:
        metrics = run_batch(learner, balanced_cut(batch, learner.world.data_ranks, budget=150))
        curve.append({name: metrics[name] for name in COMPARED})
    return curve


def work(world: World, directory: Path) -> dict[str, Any]:
    """Four ranks hold two replicas; from the checkpoint on two of them share a micro-batch instead."""
    path, batches = torch.load(directory.parent / "recorded.pt", weights_only=False)
    config = tiny_config(path, trainer={"grad_clip": 1.0})
    learner = make_learner(config, world.arranged(2, 1) if world.size == 4 else world, "float32")
    curve = train(learner, batches[:SAVED_AT])
    manifest = CheckpointManifest(step=SAVED_AT, trainer_epoch=0)
    saved = save_checkpoint(directory / "checkpoints", learner, manifest, hf=world.size == 4)
    if world.size == 4:
        published = published_by(learner, world)
        learner = make_learner(config, world.arranged(1, 2), "float32")
        load_checkpoint(saved, learner)
        if world.rank == 0:
            exported = load_file(saved / "hf" / "model.safetensors")
            assert all(torch.equal(tensor, exported[name]) for name, tensor in published.items())
    curve += train(learner, batches[SAVED_AT:])
    return {"curve": curve, "weights": full_state(learner.policy)}


def published_by(learner: Learner, world: World) -> Tensors:
    """What engines would be given; nothing on ranks other than the first."""
    policy = learner.policy
    host = HostShards(PublishedShards(policy), policy.published, torch.float32, 60.0)
    gather = lambda busy: world.gather(busy, list[int])  # noqa: E731
    snapshot = host.copy_version(PolicyVersion(0, SAVED_AT), PublishedShards(policy), gather)
    wanted = full_state(policy)
    published: Tensors = {}
    if world.rank == 0:
        for bucket in buckets(snapshot, 1000):
            published |= {name: tensor.clone() for name, tensor in bucket.items()}
        assert all(torch.equal(published[name], tensor) for name, tensor in wanted.items())
    world.gather(0, int)
    host.close(60.0)
    return published


def resume(world: World, directory: Path) -> dict[str, Any]:
    """Continue a checkpoint that two ranks have written."""
    path, batches = torch.load(directory.parent / "recorded.pt", weights_only=False)
    learner = make_learner(tiny_config(path, trainer={"grad_clip": 1.0}), world, "float32")
    newest = newest_checkpoint(directory.parent / "2-ranks" / "checkpoints")
    assert newest is not None
    load_checkpoint(newest, learner)
    return {"curve": train(learner, batches[learner.step :]), "weights": full_state(learner.policy)}


def assert_same(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Within the noise of float32 sums in another order."""
    for now, then in zip(actual["curve"], wanted["curve"], strict=True):
        assert now == pytest.approx(then, rel=1e-3, abs=1e-5)
    for name, tensor in wanted["weights"].items():
        assert torch.allclose(actual["weights"][name], tensor, atol=1e-3), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_loss_curve_is_that_of_one_rank(runs: Runs, ranks: int) -> None:
    assert_same(runs.on(ranks), runs.on(1))


def test_a_checkpoint_of_two_ranks_continues_on_one(runs: Runs, world: World) -> None:
    wanted = runs.on(2)
    resumed = resume(world, runs.folder / "resumed")
    assert_same(resumed, {"curve": wanted["curve"][SAVED_AT:], "weights": wanted["weights"]})
