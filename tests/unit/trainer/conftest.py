from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.training import plain_model, save_tiny_model


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
