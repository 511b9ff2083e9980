from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModel

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.trainer.model import Critic, load_critic
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.training import few_tokens, save_tiny_model, save_tiny_qwen, tiny_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["gpt2", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    return save_tiny_model(directory) if request.param == "gpt2" else save_tiny_qwen(directory, tied=False)


def set_head(critic: Critic) -> Tensor:
    """A head that is not zero; its weight [H]."""
    wanted = torch.linspace(-1, 1, 16)
    head: Any = critic.backbone.value_head
    with torch.no_grad():
        weight: DTensor = head.weight
        shard = distribute_tensor(wanted.to(weight.dtype)[None], weight.device_mesh, weight.placements)
        weight.copy_(shard)
        head.bias.fill_(0.5)
    return wanted


def test_values_read_the_hidden_state_that_predicts_the_token(world: World, path: str) -> None:
    critic = load_critic(tiny_config(path), world)
    t = few_tokens()
    weight = set_head(critic)
    values = critic(t)
    hidden = AutoModel.from_pretrained(path).eval()(t.ids).last_hidden_state
    wanted = [state @ weight + 0.5 for state in t.predictors(hidden)]
    assert torch.allclose(values, torch.stack(wanted), atol=1e-5)
    values.sum().backward()
    assert all(p.grad is not None for p in critic.parameters() if p.numel())


@pytest.mark.parametrize(("changed", "moves"), [(5, True), (6, False), (9, False)])
def test_a_value_knows_nothing_of_its_token(world: World, path: str, changed: int, moves: bool) -> None:
    critic = load_critic(tiny_config(path), world)
    t = few_tokens()
    set_head(critic)
    before = critic(t)[1]  # of the token at 6
    t.ids[0, changed] = (t.ids[0, changed] + 1) % 40
    assert bool(critic(t)[1] != before) == moves


def test_it_starts_at_zero_with_an_optimizer_of_its_own(world: World, path: str) -> None:
    critic = load_critic(tiny_config(path, critic={"lr": 0.25}), world)
    assert torch.equal(critic(few_tokens()), torch.zeros(4))
    (group,) = critic.optimizer.param_groups
    assert group["lr"] == 0.25 and len(group["params"]) == len(list(critic.parameters()))


def test_bfloat16_gives_float32_values(world: World, path: str) -> None:
    config = parse({"name": "t", "data": {"train": "x"}, "model": {"path": path, "dtype": "bfloat16"}})
    critic = load_critic(config, world)
    set_head(critic)
    values = critic(few_tokens())
    values.sum().backward()
    assert values.dtype == torch.float32 and {p.dtype for p in critic.parameters()} == {torch.float32}


def test_a_directory_of_its_own(world: World, path: str, tmp_path: Path) -> None:
    other = save_tiny_qwen(tmp_path / "other")
    critic = load_critic(tiny_config(path, critic={"path": other}), world)
    assert type(critic.backbone).__name__ == "Qwen2Model"
    with pytest.raises(ConfigError, match=r"critic\.path"):
        load_critic(tiny_config(path, critic={"path": str(tmp_path)}), world)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_critic(tiny_config(str(tmp_path)), world)


def step_of(world: World, folder: Path) -> Any:
    """Values before and after an optimizer step, every rank with all tokens."""
    if world.rank == 0:
        save_tiny_qwen(folder / "model")
    world.gather(0, int)
    config: RunConfig = tiny_config(str(folder / "model"), critic={"lr": 0.1})
    critic = load_critic(config, world)
    set_head(critic)
    first = critic(few_tokens())
    (first**2).sum().backward()  # the average over ranks of the same gradient
    critic.optimizer.step()
    return first.detach(), critic(few_tokens()).detach()


def test_two_ranks_do_what_one_does(world: World, tmp_path: Path) -> None:
    one = step_of(world, tmp_path / "one")
    two = run_ranks(2, step_of, tmp_path / "two")
    for found, wanted in zip(two, one, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    assert not torch.allclose(one[0], one[1], atol=1e-3)
