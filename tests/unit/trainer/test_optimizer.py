from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from asyncrl.config import TrainerConfig
from asyncrl.trainer.optimizer import make_adamw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_steps_as_torchs_adamw_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 2).to(dtype)
    second = copy.deepcopy(first)
    ours = make_adamw(first, TrainerConfig(betas=(0.8, 0.9), weight_decay=0.1), lr=0.05)
    theirs = torch.optim.AdamW(second.parameters(), lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)
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


def test_what_does_not_train_has_no_state() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = make_adamw(model, TrainerConfig(), lr=0.5)
    assert list(optimizer.state) == [model.weight] and optimizer.param_groups[0]["lr"] == 0.5
    state = optimizer.state[model.weight]
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (2, 3) and state["step"] == 0
