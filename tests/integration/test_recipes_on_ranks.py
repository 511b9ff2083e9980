"""No algorithm depends on the number of ranks or on the cut into micro-batches, whatever it compares."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from asyncrl.trainer.world import World
from tests.fakes.models import save_small
from tests.fakes.ranks import run_ranks
from tests.fakes.recipes import COMPARING, RECIPES, trained
from tests.fakes.training import (
    Recorder,
    difference,
    gradients_and_metrics,
    make_learner,
    plain_model,
    random_cut,
    save_tiny_model,
    tiny_config,
)

OTHERS = tuple(name for name in RECIPES if name not in COMPARING)
Weights = dict[str, dict[str, Tensor]]
Layout = tuple[int, int, str]  # replicas of the weights, ranks that share a micro-batch, and a recipe
LAYOUTS: dict[int, list[Layout]] = {
    1: [
        (1, 1, "gae"),
        (1, 1, "gspo"),
        (1, 1, "kl in loss, entropy, batch_std"),
        (1, 1, "js"),
    ],
    2: [(2, 1, "gspo"), (1, 2, "gae"), (1, 2, "kl in loss, entropy, batch_std"), (1, 2, "js")],
    4: [(2, 1, "gae"), (1, 4, "gae"), (2, 2, "gspo")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a batch recorded with it."""
    folder = tmp_path_factory.mktemp("recipes")
    path = save_tiny_model(folder / "model")
    episodes = Recorder(plain_model(path), seed=11, noise=0.2).groups(4, 3, [0])
    torch.save((path, episodes), folder / "recorded.pt")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # its norms compute in the model's dtype
    path = save_small(folder / "grouped", "Starcoder2", **heads, bos_token_id=0, eos_token_id=0)
    episodes = Recorder(plain_model(path), seed=12, noise=0.2, prompt=20).groups(3, 3, [0])
    torch.save((path, episodes), folder / "grouped.pt")
    return folder


def cut_at_random(names: Sequence[str], world: World, folder: Path) -> Weights:
    """Weights after the batch, dealt to micro-batches and ranks at random. Runs on every rank."""
    path, episodes = torch.load(folder.parent / "recorded.pt", weights_only=False)
    cut = random_cut(episodes, world.size, 3, seed=5)
    return {name: trained(world, path, name, cut) for name in names}


def laid_out(world: World, folder: Path) -> dict[Layout, Any]:
    """Gradients and metrics of groups that share their prompt, with every other layer recomputed."""
    path, episodes = torch.load(folder.parent / "grouped.pt", weights_only=False)
    results = {}
    for layout in LAYOUTS[world.size]:
        laid = world.arranged(*layout[:2])
        config = tiny_config(
            path, **copy.deepcopy(RECIPES[layout[2]]), trainer={"activation_checkpointing": 2}
        )
        with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
            learner = make_learner(config, laid)
        assert learner.packing == "tree"
        results[layout] = gradients_and_metrics(learner, random_cut(episodes, laid.data_ranks, 2, seed=3))
    return results


def on_ranks(names: Sequence[str], world: World, folder: Path) -> tuple[Weights, dict[Layout, Any]]:
    return cut_at_random(names, world, folder), laid_out(world, folder)


@pytest.fixture(scope="module")
def as_one(folder: Path, world: World) -> dict[str, Any]:
    return {recipe: result for (_, _, recipe), result in laid_out(world, folder / "one").items()}


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, COMPARING),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, OTHERS), (4, COMPARING))),
    ],
)
def test_neither_ranks_nor_micro_batches_matter(
    folder: Path, world: World, as_one: dict[str, Any], ranks: int, names: Sequence[str]
) -> None:
    """Nor how they are arranged. What is computed twice, as its rows lie on several ranks, is reported so."""
    weights, arranged = run_ranks(ranks, partial(on_ranks, names), folder / f"{ranks} {len(names)}")
    path, episodes = torch.load(folder / "recorded.pt", weights_only=False)
    for name in names:
        assert difference(weights[name], trained(world, path, name, [[episodes]])) < 1e-9, name
    for layout, (gradients, metrics) in arranged.items():
        wanted, expected_metrics = as_one[layout[2]]
        assert difference(gradients, wanted) < 1e-10, layout
        assert metrics.keys() == expected_metrics.keys()
        for name in (name for name in expected_metrics if not name.startswith(("perf/", "global_seqlen/"))):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-9, abs=1e-9), (layout, name)
