from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.trainer.world import World, join, leave


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """This process as the only rank of a trainer."""
    torch.set_num_threads(1)
    yield join(0, 1, device="cpu")
    leave()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` a file is run by one worker. The files that share SGLang servers are one
    group, and the first one: it takes longest."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item.path)))
    items.sort(key=lambda item: _group(item.path) != "sglang")


def _group(path: Path) -> str:
    return "sglang" if path.parent.name == "sglang" and path.stem != "test_training" else str(path)
