from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.config import ModelConfig
from asyncrl.trainer.model import Policy, Selected, load_policy, score_ids
from asyncrl.trainer.scores import SplitModel
from asyncrl.trainer.world import World
from tests.fakes.models import save_small, small_model
from tests.fakes.training import few_tokens, full_state, plain_model, save_tiny_model, save_tiny_qwen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["gpt2", "qwen2 tied", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "gpt2":
        return save_tiny_model(directory)
    return save_tiny_qwen(directory, tied=request.param == "qwen2 tied")


def plain_table(model: Any, t: Selected) -> torch.Tensor:
    """[4, vocabulary]: log-probs by the plain model."""
    logits = model(t.ids).logits.flatten(0, 1)[t.predictor_index] / t.temperature[:, None]
    return cast(torch.Tensor, logits.log_softmax(-1))


def test_scores_are_log_softmax_at_the_temperature(world: World, path: str) -> None:
    t = few_tokens()
    scores = load_policy(ModelConfig(path=path, dtype="float64"), world)(t)
    table = plain_table(plain_model(path), t)
    assert torch.allclose(scores.logp, table.gather(1, t.labels[:, None])[:, 0])
    assert torch.allclose(scores.entropy, -(table.exp() * table).sum(-1))
    assert scores.logp.requires_grad and not scores.entropy.requires_grad
    assert scores.collision is None


@pytest.mark.parametrize("chunk", [3, 512])
def test_gradients_are_those_of_the_plain_model(
    world: World, path: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.trainer.scores.CHUNK_TOKENS", chunk)
    t = few_tokens()
    policy = load_policy(ModelConfig(path=path, dtype="float64"), world)
    plain = plain_model(path)
    policy(t).logp.sum().backward()
    plain_table(plain, t).gather(1, t.labels[:, None]).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    gradients = {name: p.grad for name, p in policy.lm.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient.full_tensor(), wanted[name], rtol=1e-5, atol=1e-6), name


def test_parameters_are_sharded_again_after_scoring(world: World, path: str) -> None:
    policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
    score_ids(policy, (1, 2, 3), world.device)
    assert all(isinstance(p, DTensor) for p in policy.parameters())


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(world: World, path: str) -> None:
    policy = load_policy(ModelConfig(path=path, dtype="bfloat16"), world)
    t = few_tokens()
    scores = policy(t)
    scores.logp.sum().backward()
    assert scores.logp.dtype == torch.float32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}
    assert {tensor.dtype for tensor in full_state(policy).values()} == {torch.bfloat16}
    exact = load_policy(ModelConfig(path=path, dtype="float32"), world)(t).logp
    assert torch.allclose(scores.logp, exact, atol=0.1) and not torch.equal(scores.logp, exact)


def test_large_models_are_sharded_layer_by_layer(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_policy(ModelConfig(path=path, dtype="float64"), world)
    monkeypatch.setattr("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0)
    layered = load_policy(ModelConfig(path=path, dtype="float64"), world)
    assert count_units(layered) == 3 and count_units(whole) == 1
    assert torch.allclose(layered(few_tokens()).logp, whole(few_tokens()).logp)


def save_capped(directory: Path) -> str:
    """A tiny Gemma 2: it caps its logits softly, here at 2."""
    return save_small(directory, "Gemma2", head_dim=8, final_logit_softcapping=2.0)


def save_biased(directory: Path) -> str:
    """A tiny Phi: its output layer has a bias, here not zero."""
    model = small_model("Phi")
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("save", [save_capped, save_biased])
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_model_does_to_its_logits_is_done(
    world: World, tmp_path: Path, save: Any, whole: bool
) -> None:
    path = save(tmp_path)
    t = few_tokens()
    policy = load_policy(ModelConfig(path=path, dtype="float64"), world)
    assert not policy.runs_whole
    policy.runs_whole = whole
    scores = policy(t, entropy_grad=True, with_collision=True)
    table = plain_table(plain_model(path), t)
    assert torch.allclose(scores.logp, table.gather(1, t.labels[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(scores.entropy, -(table.exp() * table).sum(-1), atol=1e-6)
    assert torch.allclose(scores.collision, table.exp().square().sum(-1), atol=1e-6)
    assert scores.entropy.requires_grad


def test_a_model_that_scores_otherwise_when_cut_is_not_cut(
    world: World,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = load_policy(ModelConfig(path=path, dtype="float64"), world)(few_tokens()).logp
    split = SplitModel.split

    def wrong(cut: SplitModel, given: Selected) -> Any:
        features, logits_of = split(cut, given)
        return 1.1 * features, logits_of

    monkeypatch.setattr(SplitModel, "split", wrong)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was found before
    with caplog.at_level(logging.WARNING):
        policy = load_policy(ModelConfig(path=path, dtype="float64"), world)
    assert policy.runs_whole and "not chunked" in caplog.text
    assert torch.allclose(policy(few_tokens()).logp, wanted)


def test_fp32_head_multiplies_in_float32(world: World, path: str) -> None:
    t = few_tokens()
    policy = load_policy(ModelConfig(path=path, dtype="bfloat16", fp32_head=True), world)
    plain = plain_model(path, torch.bfloat16)
    hidden = t.predictors(plain.base_model(t.ids).last_hidden_state)
    logits = hidden.float() @ plain.get_output_embeddings().weight.float().T / t.temperature[:, None]
    wanted = logits.log_softmax(-1).gather(1, t.labels[:, None])[:, 0]
    scores = policy(t)
    assert torch.allclose(scores.logp, wanted, atol=1e-5)
    rounded = load_policy(ModelConfig(path=path, dtype="bfloat16"), world)(t).logp
    assert not torch.allclose(rounded, wanted, atol=1e-4)
    policy.runs_whole = True
    assert torch.allclose(policy(t).logp, wanted, atol=1e-5)
    scores.logp.sum().backward()
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


def distributed(tensor: torch.Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(tensor.to(like.dtype), like.device_mesh, like.placements)


def count_units(policy: Policy) -> int:
    return sum(type(module).__name__.startswith("FSDP") for module in policy.modules())
