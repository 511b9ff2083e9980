"""No algorithm depends on the number of ranks, whatever it compares across the batch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.recipes import RECIPES, trained
from tests.fakes.training import Recorder, difference, plain_model, random_cut, save_tiny_model

Weights = dict[str, dict[str, Tensor]]


def all_recipes(world: World, folder: Path) -> Weights:
    """Weights after one batch, by recipe. Runs on every rank."""
    path, episodes = torch.load(folder.parent / "recorded.pt", weights_only=False)
    cut = random_cut(episodes, world.size, 3, seed=5)
    return {name: trained(world, path, name, cut) for name in RECIPES}


def test_two_and_four_ranks_train_as_one(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    episodes = Recorder(plain_model(path), seed=11, noise=0.2).groups(4, 3, [0])
    torch.save((path, episodes), tmp_path / "recorded.pt")
    one, two, four = (run_ranks(size, all_recipes, tmp_path / f"{size}") for size in (1, 2, 4))
    for name in RECIPES:
        assert difference(two[name], one[name]) < 1e-9, name
        assert difference(four[name], one[name]) < 1e-9, name
