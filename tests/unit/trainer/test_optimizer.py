from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.optimizer import learning_rate, make_optimizer
from asyncrl.trainer.world import World
from tests.fakes.training import (
    make_learner,
    save_tiny_model,
    tiny_config,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_steps_as_torchs_adamw_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 2).to(dtype)
    second = copy.deepcopy(first)
    ours = make_optimizer(first, TrainerConfig(betas=(0.8, 0.9), weight_decay=0.1), lr=0.05)
    theirs = torch.optim.AdamW(second.parameters(), lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    for step in range(4):
        x = torch.randn(5, 3, dtype=dtype)
        for model, optimizer in ((first, ours), (second, theirs)):
            (model(x) ** 2).sum().backward()
            if step < 2:  # its moments begin, and its steps count, when its first gradient comes
                model.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        for name, value in theirs.state[b].items():
            assert torch.equal(ours.state[a][name], value) and ours.state[a][name].dtype == value.dtype
    assert [float(of["step"]) for of in ours.state.values()] == [4, 2]


@pytest.mark.parametrize(
    ("chosen", "theirs"),
    [
        ({"sgd": {"momentum": 0.9}}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
        ("torch.optim:Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01)),
        ({"adamw": {"fused": False}}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01)),
    ],
)
def test_others_by_name(chosen: Any, theirs: Callable[..., torch.optim.Optimizer]) -> None:
    """Made with a first step that does not count: from there on as torch's own, and it saves as much."""
    torch.manual_seed(0)
    first = nn.Linear(3, 2)
    second = copy.deepcopy(first)
    config = TrainerConfig(optimizer=chosen, weight_decay=0.01, betas=(0.9, 0.999))
    pairs = ((first, make_optimizer(first, config, lr=0.1)), (second, theirs(second.parameters())))
    assert torch.equal(first.weight, second.weight)
    for _ in range(3):
        x = torch.randn(5, 3)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
        assert torch.equal(first.weight, second.weight)
    found, wanted = (optimizer.state_dict()["state"] for _, optimizer in pairs)
    assert found.keys() == wanted.keys() and all(found[i].keys() == wanted[i].keys() for i in wanted)


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ("adam", "did you mean adamw"),
        ({"sgd": {"speed": 1}}, "trainer.optimizer: sgd cannot be built .*speed"),
        ("builtins:dict", "trainer.optimizer: builtins:dict"),
    ],
)
def test_refusals_name_the_key(chosen: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_optimizer(nn.Linear(3, 2), TrainerConfig(optimizer=chosen), lr=0.1)


def test_what_does_not_train_has_no_state() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, TrainerConfig(), lr=0.5)
    assert list(optimizer.state) == [model.weight] and optimizer.param_groups[0]["lr"] == 0.5
    state = optimizer.state[model.weight]
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (2, 3) and state["step"] == 0


def test_one_that_cannot_step_on_shards_is_refused(world: World, tmp_path: Path) -> None:
    config = tiny_config(save_tiny_model(tmp_path), trainer={"optimizer": "torch.optim:Adafactor"})
    with pytest.raises(ConfigError, match=r"trainer\.optimizer: cannot update sharded weights"):
        make_learner(config, world)


@pytest.mark.parametrize(
    ("keys", "total", "wanted"),
    [
        ({"warmup_steps": 2}, 4, [0.5, 1.0, 1.0, 1.0]),
        ({"lr_schedule": "linear", "lr_end": 0.2}, 5, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "cosine", "lr_end": 0.0}, 3, [1.0, 0.5, 0.0]),
        ({"lr_schedule": "linear"}, 2, [1.0, 0.1, 0.1, 0.1]),  # the final rate stays
    ],
    ids=["warm-up", "linear", "cosine", "beyond the end"],
)
def test_the_learning_rate(keys: dict[str, object], total: int, wanted: list[float]) -> None:
    config = msgspec.convert({"lr": 1.0, **keys}, TrainerConfig)
    assert [learning_rate(config, step, total) for step in range(len(wanted))] == pytest.approx(wanted)
