from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from tests.fakes.training import BuildLearner, make_learner, plain_model, save_tiny_model, tiny_config


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(model_path: str) -> Any:
    """The tiny model without any of the trainer around it, in float64."""
    return plain_model(model_path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def build_learner(world: World, model_path: str) -> BuildLearner:
    """Makes a learner of the tiny model; keyword arguments are sections of the config."""

    def make(step: int = 0, dtype: str = "float64", **sections: Any) -> Learner:
        learner = make_learner(tiny_config(model_path, **copy.deepcopy(sections)), world, dtype)
        learner.step = step
        return learner

    return make
