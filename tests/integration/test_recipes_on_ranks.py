"""No algorithm depends on the number of ranks or on the cut into micro-batches, whatever it compares."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.recipes import COMPARING, RECIPES, trained
from tests.fakes.training import Recorder, difference, plain_model, random_cut, save_tiny_model

Weights = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a batch recorded with it."""
    folder = tmp_path_factory.mktemp("recipes")
    path = save_tiny_model(folder / "model")
    episodes = Recorder(plain_model(path), seed=11, noise=0.2).groups(4, 3, [0])
    torch.save((path, episodes), folder / "recorded.pt")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, world: World) -> Weights:
    """Weights after the batch in one piece, on one rank."""
    path, episodes = torch.load(folder / "recorded.pt", weights_only=False)
    return {name: trained(world, path, name, [[episodes]]) for name in RECIPES}


def cut_at_random(names: Sequence[str], world: World, folder: Path) -> Weights:
    """Weights after the batch, dealt to micro-batches and ranks at random. Runs on every rank."""
    path, episodes = torch.load(folder.parent / "recorded.pt", weights_only=False)
    cut = random_cut(episodes, world.size, 3, seed=5)
    return {name: trained(world, path, name, cut) for name in names}


@pytest.mark.parametrize(("ranks", "names"), [(2, tuple(RECIPES)), (4, COMPARING)])
def test_neither_ranks_nor_micro_batches_matter(
    folder: Path, alone: Weights, ranks: int, names: Sequence[str]
) -> None:
    found = run_ranks(ranks, partial(cut_at_random, names), folder / f"{ranks}")
    for name in names:
        assert difference(found[name], alone[name]) < 1e-9, name
