from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from asyncrl.trainer.world import World, join, leave


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """This process as the only rank of a trainer."""
    torch.set_num_threads(1)
    yield join(0, 1, device="cpu")
    leave()
