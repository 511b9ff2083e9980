from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.model import Policy, Selected, load_policy, score
from asyncrl.trainer.world import World
from tests.fakes.training import full_state, plain_model, save_tiny_model, save_tiny_qwen


@pytest.fixture(scope="module", params=["gpt2", "qwen2 tied", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "gpt2":
        return save_tiny_model(directory)
    return save_tiny_qwen(directory, tied=request.param == "qwen2 tied")


def tokens() -> Selected:
    """Two rows of different length, four tokens, two temperatures."""
    ids = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    row, position = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 6, 3, 10])
    return Selected(ids, row, position, torch.tensor([1.0, 1.0, 0.7, 0.7]))


def test_scores_are_log_softmax_at_the_temperature(world: World, path: str) -> None:
    t = tokens()
    scores = load_policy(ModelConfig(path=path, dtype="float64"), world)(t)
    logits = plain_model(path)(t.ids).logits[t.row, t.position - 1] / t.temperature[:, None]
    table = logits.log_softmax(-1)
    assert torch.allclose(scores.logp, table.gather(1, t.ids[t.row, t.position][:, None])[:, 0])
    assert torch.allclose(scores.entropy, -(table.exp() * table).sum(-1))
    assert scores.logp.requires_grad and not scores.entropy.requires_grad


def test_gradients_are_those_of_the_plain_model(world: World, path: str) -> None:
    t, policy, plain = (
        tokens(),
        load_policy(ModelConfig(path=path, dtype="float64"), world),
        plain_model(path),
    )
    policy(t).logp.sum().backward()
    logits = plain(t.ids).logits[t.row, t.position - 1] / t.temperature[:, None]
    logits.log_softmax(-1).gather(1, t.ids[t.row, t.position][:, None]).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    found = {name: p.grad for name, p in policy.lm.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient.full_tensor(), wanted[name], rtol=1e-5, atol=1e-6), name


def test_padding_on_the_right_changes_nothing(world: World, path: str) -> None:
    policy, t = load_policy(ModelConfig(path=path, dtype="float64"), world), tokens()
    longer = Selected(torch.cat([t.ids, t.ids[:, :3]], dim=1), t.row, t.position, t.temperature)
    assert torch.allclose(policy(t).logp, policy(longer).logp, atol=1e-6)


def test_parameters_are_sharded_and_the_export_is_whole(world: World, path: str) -> None:
    policy, plain = (
        load_policy(ModelConfig(path=path, dtype="float32"), world),
        plain_model(path, torch.float32),
    )
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    state = full_state(policy)
    wanted = dict(plain.named_parameters())  # a tied tensor once
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_parameters_are_sharded_again_after_scoring(world: World, path: str) -> None:
    policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
    score(policy, (1, 2, 3), world.device)
    assert all(isinstance(p, DTensor) for p in policy.parameters())


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(world: World, path: str) -> None:
    policy, t = load_policy(ModelConfig(path=path, dtype="bfloat16"), world), tokens()
    scores = policy(t)
    scores.logp.sum().backward()
    assert scores.logp.dtype == torch.float32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}
    assert {tensor.dtype for tensor in full_state(policy).values()} == {torch.bfloat16}
    exact = load_policy(ModelConfig(path=path, dtype="float32"), world)(t).logp
    assert torch.allclose(scores.logp, exact, atol=0.1) and not torch.equal(scores.logp, exact)


def test_a_directory_without_a_model_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(ModelConfig(path=str(tmp_path)), world)


def test_large_models_are_sharded_layer_by_layer(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_policy(ModelConfig(path=path, dtype="float64"), world)
    monkeypatch.setattr("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0)
    layered = load_policy(ModelConfig(path=path, dtype="float64"), world)
    assert count_units(layered) == 3 and count_units(whole) == 1
    assert torch.allclose(layered(tokens()).logp, whole(tokens()).logp)


def count_units(policy: Policy) -> int:
    return sum(type(module).__name__.startswith("FSDP") for module in policy.modules())
