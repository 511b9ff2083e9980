"""Replicas of the weights average their gradients once a step, and a batch that is dropped leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.trainer import world as ranks
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.memory import try_largest
from asyncrl.trainer.optimizer import LEAST_NORMS, record_norm
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.recipes import RECIPES
from tests.fakes.training import (
    Episode,
    Recorder,
    difference,
    gradients_and_metrics,
    make_learner,
    plain_model,
    random_cut,
    run_batch,
    save_tiny_model,
    tiny_config,
)

pytestmark = pytest.mark.slow

RANKS = 4
REPLICAS = 2
MICRO_BATCHES = 3
SMALL_BUCKET = 200  # bytes: of the shards of 16 adapter matrices some are larger, others go together
REPLICATE_GROUPS = ([0, 2], [1, 3])  # ranks with equal shards
CONFIGS: dict[str, dict[str, Any]] = {
    "all weights, a critic": RECIPES["gae"],
    "adapters, several buckets": {"model": {"lora_rank": 2}},
}


@contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """Sizes of the tensors that this rank all-reduces with the other replicas."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        if group is not None and dist.get_process_group_ranks(group) in REPLICATE_GROUPS:
            sizes.append(tensor.numel())
        return all_reduce(tensor, op, group, **options)

    with mock.patch.object(dist, "all_reduce", counting):
        yield sizes


def batch_gradients(
    config: Any, world: World, batches: Sequence[Sequence[Episode]]
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Gradients of a first batch, of one after a trial of the largest micro-batch, and of one after a skipped
    step; and the all-reduces of the first one."""
    torch.manual_seed(0)  # adapters begin at random
    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
        learner = make_learner(config, world, "float32")
    first, second = (random_cut(batch, world.data_ranks, MICRO_BATCHES, seed=3) for batch in batches)
    with counted_all_reduces() as sizes:
        found = [gradients_and_metrics(learner, first)[0]]

    with mock.patch("asyncrl.trainer.memory.LAYER_MIN_PARAMETERS", 0):
        try_largest(learner)
    found.append(gradients_and_metrics(learner, second)[0])

    skip_as_spike(learner, first)
    found.append(gradients_and_metrics(learner, second)[0])
    return found, sizes


def skip_as_spike(learner: Learner, cut: list[list[list[Episode]]]) -> None:
    """Train a batch whose norm is over the limit, so that it changes nothing."""
    learner.on_spike = "skip"
    state = dict(learner.state)
    for step in range(LEAST_NORMS):
        record_norm(learner.state, step, 1e-12)
    assert run_batch(learner, cut)["actor/skipped_steps"] == 1
    learner.state = state
    learner.step -= 1


def work(world: World, folder: Path) -> dict[str, Any]:
    """The largest difference of gradients from those that FSDP2 all-reduces itself, and the all-reduces of a
    batch by both ways."""
    path, batches = torch.load(folder.parent / "recorded.pt", weights_only=False)
    shape = (REPLICAS, RANKS // REPLICAS)
    by_fsdp = replace(world, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    by_step = world.arranged(REPLICAS, 1)
    found = {}
    for name, sections in CONFIGS.items():
        rollout = {"max_tokens": 64, "max_new_tokens": 16}
        config = tiny_config(path, trainer={"spike_factor": 2.0}, rollout=rollout, **sections)
        wanted, wanted_sizes = batch_gradients(config, by_fsdp, batches)
        bucket_bytes = SMALL_BUCKET if "several buckets" in name else ranks.GRADIENT_BYTES
        with mock.patch.object(ranks, "GRADIENT_BYTES", bucket_bytes):
            gradients, sizes = batch_gradients(config, by_step, batches)
        gaps = [difference(*pair) for pair in zip(gradients, wanted, strict=True)]
        found[name] = {"gaps": gaps, "sizes": sizes, "by_fsdp": wanted_sizes}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("replicas")
    path = save_tiny_model(folder / "model")
    recorder = Recorder(plain_model(path), seed=7, noise=0.2)
    torch.save((path, [recorder.groups(4, 3, [0]) for _ in range(2)]), folder / "recorded.pt")
    return run_ranks(RANKS, work, folder / "ranks")


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_an_all_reduce_in_every_micro_batch(found: Any, name: str) -> None:
    """Also after gradients that were dropped: of a trial, and of a step that was skipped."""
    assert len(found[name]["gaps"]) == 3
    assert max(found[name]["gaps"]) <= 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_replicas_exchange_gradients_once_a_step(found: Any, name: str) -> None:
    models = 2 if "critic" in name else 1
    sizes = found[name]["sizes"]
    if "several buckets" in name:
        assert 1 < len(sizes) < 16
        assert any(4 * size > SMALL_BUCKET for size in sizes), "a larger shard is alone"
    else:
        assert len(sizes) == models  # a tiny model's gradients fit one all-reduce
    assert len(found[name]["by_fsdp"]) >= MICRO_BATCHES * models * 2  # layers
    assert sum(found[name]["by_fsdp"]) >= MICRO_BATCHES * sum(found[name]["sizes"])
