from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.model import Policy, load_policy, load_reference
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from asyncrl.types import TokenScores, Turn
from tests.fakes.training import (
    VOCABULARY,
    Recorder,
    difference,
    few_tokens,
    final_gradients,
    full_state,
    gradients_and_metrics,
    make_learner,
    plain_logp,
    plain_model,
    save_tiny_model,
    save_tiny_qwen,
    tiny_config,
    with_generation,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def exact(path: str, rank: int = 0, **kl: Any) -> RunConfig:
    config = tiny_config(path, kl=kl)
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, dtype="float64", lora_rank=rank)
    )


@torch.no_grad()
def change(policy: Policy) -> None:
    """As if it had trained."""
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)


@pytest.mark.parametrize("kl", [{}, {"offload": True}])
@pytest.mark.parametrize("rank", [0, 2])
def test_it_stays_the_initial_policy(world: World, path: str, rank: int, kl: dict[str, Any]) -> None:
    config = exact(path, rank, **kl)
    t = few_tokens()
    policy = load_policy(config.model, world)
    reference = load_reference(config, world, policy)
    change(policy)
    reference_logprobs = reference.logp(t)
    wanted = plain_logp(plain_model(path), t)
    assert torch.allclose(reference_logprobs, wanted) and not reference_logprobs.requires_grad
    assert not torch.allclose(policy(t).logp, wanted, atol=1e-3)


def test_nothing_is_kept_between_forwards(world: World, path: str) -> None:
    config = exact(path)
    reference = load_reference(config, world, load_policy(config.model, world))
    reference.logp(few_tokens())
    assert all(isinstance(p, DTensor) and not p.requires_grad for p in reference.policy.parameters())


def test_adapters_need_no_copy(world: World, path: str) -> None:
    config = exact(path, 2)
    policy = load_policy(config.model, world)
    assert load_reference(config, world, policy).policy is policy


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_scored_between_forward_and_backward_it_changes_no_gradient(
    world: World, path: str, rank: int, layered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layered:
        monkeypatch.setattr("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0)
    config = exact(path, rank)
    t = few_tokens()
    gradients = []
    for scored in (False, True):
        torch.manual_seed(0)
        policy = load_policy(config.model, world)
        reference = load_reference(config, world, policy)
        change(policy)
        logp = policy(t).logp
        if scored:
            assert torch.allclose(reference.logp(t), plain_logp(plain_model(path), t))
        logp.sum().backward()
        gradients.append([p.grad.full_tensor() for p in policy.parameters() if p.grad is not None])
    assert len(gradients[0]) > 4
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_model_of_its_own(world: World, path: str, tmp_path: Path) -> None:
    other = save_tiny_qwen(tmp_path / "other")
    config = exact(path, 2, reference=other)
    policy = load_policy(config.model, world)
    assert torch.allclose(
        load_reference(config, world, policy).logp(few_tokens()),
        plain_logp(plain_model(other), few_tokens()),
        atol=1e-6,
    )
    missing = exact(path, reference=str(tmp_path))
    with pytest.raises(ConfigError, match=r"kl\.reference"):
        load_reference(missing, world, policy)


# -- as a teacher, over the whole vocabulary ---------------------------------------------------------------


def plain_table(model: Any, tokens: Selected) -> torch.Tensor:
    logits = model(tokens.ids).logits.flatten(0, 1)[tokens.predictor_index] / tokens.temperature[:, None]
    return logits.log_softmax(-1)


def textbook(model: Any, teacher: torch.Tensor, tokens: Selected) -> torch.Tensor:
    """KL(T, pi), by nothing of the trainer."""
    return (teacher.exp() * (teacher - plain_table(model, tokens))).sum(-1)


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize(("rank", "named"), [(0, True), (0, False), (2, False), (2, True)])
def test_gradients_of_a_divergence_are_those_of_two_plain_models(
    world: World,
    path: str,
    tmp_path: Path,
    rank: int,
    named: bool,
    layered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A policy that has moved away, or its adapters, against a model of its own, the initial policy, or the
    base; twice, as micro-batches follow each other."""
    if layered:
        monkeypatch.setattr("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0)
    monkeypatch.setattr("asyncrl.trainer.scores.CHUNK_TOKENS", 3)
    teacher = save_tiny_qwen(tmp_path / "other") if named else path
    config = exact(path, rank, reference=teacher if named else "")
    t = few_tokens()
    policy = load_policy(config.model, world)
    change(policy)
    reference = load_reference(config, world, policy)
    student = plain_model(path)
    with torch.no_grad():
        table = plain_table(plain_model(teacher), t)
        for name, weight in full_state(policy).items():
            student.get_parameter(name).copy_(weight)
    wanted = textbook(student, table, t)
    for _ in range(2):
        policy_output = policy(t, teacher=reference.teacher(t, "forward", 0))
        policy_output.divergence.sum().backward()
        reference.release()
    assert policy_output.divergence is not None and torch.allclose(
        policy_output.divergence, wanted, atol=1e-12
    )
    assert torch.allclose(policy_output.reference, plain_logp(plain_model(teacher), t), atol=1e-12)
    assert wanted.max() > 1e-3 and torch.allclose(policy_output.logp, plain_logp(student, t), atol=1e-12)
    if not rank:
        assert all(isinstance(p, DTensor) for p in reference.policy.parameters())
        (2 * wanted.sum()).backward()
        for name, p in policy.lm.named_parameters():
            assert p.grad is not None
            assert torch.allclose(p.grad.full_tensor(), student.get_parameter(name).grad, atol=1e-10), name


def test_two_vocabularies_are_compared_by_classes_only(world: World, path: str, tmp_path: Path) -> None:
    other = tmp_path / "wider"
    wide = plain_model(path)
    wide.resize_token_embeddings(VOCABULARY + 8)
    wide.save_pretrained(other)
    for top_k in (0, 4):
        config = exact(path, reference=str(other), where="loss", estimator="js", top_k=top_k)
        policy = load_policy(config.model, world)
        if not top_k:
            with pytest.raises(ConfigError, match=r"kl\.reference.*kl\.top_k"):
                load_reference(config, world, policy)
            continue
        reference = load_reference(config, world, policy)
        divergences = policy(few_tokens(), teacher=reference.teacher(few_tokens(), "js", top_k)).divergence
        assert divergences is not None and (divergences > 0).all() and divergences.isfinite().all()
    config = exact(str(other), reference=path, where="loss", estimator="js", top_k=4)
    with pytest.raises(
        ConfigError, match=rf"kl\.reference: .*{VOCABULARY} onward .*embeddings.{VOCABULARY + 8}"
    ):
        load_reference(config, world, load_policy(config.model, world))


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_from_a_scorer_it_makes_the_same_gradients(
    world: World, path: str, tmp_path: Path, where: str
) -> None:
    """Its log-probs are in float32. A turn that no scorer has read is left out."""
    changed = plain_model(path, torch.float32)
    other = str(tmp_path)
    for number, parameter in enumerate(changed.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    changed.save_pretrained(other)
    episodes = Recorder(plain_model(path), noise=0.2).groups(2, 2, [0])
    buffer = {"group_policy": "complete", "filter_zero_variance": False}
    keys: dict[str, Any] = {"kl": {"where": where, "coef": 0.5}, "buffer": buffer}
    scorer = Recorder(plain_model(other))

    def read(turns: list[Turn]) -> list[Turn]:
        pairs = zip(turns, scorer.scored(turns, random.Random(0)), strict=True)
        scored_turns = [
            (turn, np.array(scored.generation.logprobs, "<f4").tobytes()) for turn, scored in pairs
        ]
        return [with_generation(t, scores=TokenScores(log)) for t, log in scored_turns]

    in_rank = tiny_config(path, **keys | {"kl": keys["kl"] | {"reference": other}})
    wanted = final_gradients(make_learner(in_rank, world), [[episodes]])
    learner = make_learner(tiny_config(path, **keys, scorers={"reference": {"path": other}}), world)
    assert learner.reference is None
    scored = [(row, read(turns)) for row, turns in episodes]
    gradients, metrics = gradients_and_metrics(learner, [[scored]])
    assert difference(gradients, wanted) < 1e-6 and "timing_s/ref" not in metrics
    assert metrics["actor/ref_kl"] > 0.01
    silent = [(row, [with_generation(turn, scores=None) for turn in turns]) for row, turns in scored[:1]]
    partly, metrics = gradients_and_metrics(learner, [[[*silent, *scored[1:]]]])
    assert difference(partly, wanted) > 1e-3 and np.isfinite(metrics["actor/grad_norm"])
