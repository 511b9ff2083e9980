"""Supervised batches: the gradient is that of cross-entropy. (On several ranks: test_recipes_on_ranks.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from asyncrl.algorithms.recipe import compose
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import ZERO_ADVANTAGE
from asyncrl.trainer.report import RatioRecorder
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult
from tests.fakes.training import (
    Episode,
    Recorder,
    export,
    gradient_gap,
    make_learner,
    plain_model,
    run_batch,
    save_tiny_model,
    tiny_config,
)

TOLERANCE = 1e-6
IGNORED = -100


def supervised(path: str, **sections: dict[str, Any]) -> RunConfig:
    buffer = {"episodes_per_group": 1, "filter_zero_variance": False, "max_staleness": 1000}
    algorithm = {"loss": "sft", "advantage": "constant", **sections.pop("algorithm", {})}
    return tiny_config(path, buffer=buffer | sections.pop("buffer", {}), algorithm=algorithm, **sections)


def conversations(path: str) -> list[Episode]:
    """Of several turns, without rewards, each a group of its own; log-probs and versions mean nothing."""
    model = plain_model(path, torch.float32)
    found = []
    for row, turns in Recorder(model, seed=3, noise=5.0).groups(9, 1, (0, 3, 40)):
        nothing = EpisodeResult(0.0, row.own.tokens)
        found.append((msgspec.structs.replace(row, own=nothing, siblings=(nothing,)), turns))
    return found


def plain_gradients(path: str, episodes: list[Episode]) -> tuple[dict[str, Tensor], float]:
    """A torch loop over the conversations, with the labels and the loss of transformers; and the loss."""
    model = plain_model(path, torch.float32)
    total = torch.zeros(())
    count = 0
    for _, turns in episodes:
        ids = [token for turn in turns for token in (*turn.context, *turn.generation.ids)]
        labels = [t for turn in turns for t in (*(IGNORED for _ in turn.context), *turn.generation.ids)]
        logits = model(torch.tensor([ids])).logits[0, :-1]
        total = total + cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=IGNORED, reduction="sum")
        count += sum(len(turn.generation.ids) for turn in turns)
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}, (total / count).item()


def test_the_gradient_is_that_of_cross_entropy(world: World, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    episodes = conversations(path)
    wanted, loss = plain_gradients(path, episodes)
    learner = make_learner(supervised(path), world, "float32")
    learner.step = 500
    assert gradient_gap(learner, episodes, wanted) < TOLERANCE
    learner.ratio_recorder = RatioRecorder(tmp_path, rank=0, groups_per_batch=100)
    metrics = run_batch(learner, [[episodes]])
    learner.ratio_recorder.save_step(learner.step)
    assert not list(tmp_path.glob("ratios/*"))  # nor is there a mu for them
    assert metrics["actor/nll"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["rollout_corr/rho_max"] == metrics["rollout_corr/rho_min"] == 1.0  # there is no mu
    assert not [name for name in metrics if "lag" in name or name.startswith(("staleness/", ZERO_ADVANTAGE))]


def test_adapters_alone_learn_and_the_export_holds_them(world: World, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    episodes = conversations(path)
    config = supervised(path, model={"lora_rank": 2, "lora_alpha": 2.0}, trainer={"lr": 0.05})
    learner = make_learner(config, world, "float32")
    start = {name: p.full_tensor().clone() for name, p in learner.policy.lm.named_parameters()}
    (_, before), batch = plain_gradients(path, episodes), [[episodes]]
    assert run_batch(learner, batch)["actor/nll"] == pytest.approx(before, rel=1e-5)  # they start as nothing
    now = {name: p.full_tensor() for name, p in learner.policy.lm.named_parameters()}
    moved = {name for name in start if not torch.equal(now[name], start[name])}
    assert moved and all(name.endswith(("lora_a", "lora_b")) for name in moved)
    exported = export(tmp_path, learner.policy, world, path)
    _, after = plain_gradients(exported, episodes)
    assert after < before - 0.01
    assert run_batch(learner, batch)["actor/nll"] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"buffer": {"episodes_per_group": 4}},
            r"episodes_per_group: .* 'sft' would train on each conversation 4 times",
        ),
        ({"rollout": {"temperature": 0.7}}, r"temperature \(0.7\): .* uses the likelihood at temperature 1"),
        ({"algorithm": {"shaping": {"overlong": {}}}}, r"'sft' ignores the reward; remove"),
        ({"buffer": {"filter_zero_variance": True}}, "filter_zero_variance would discard groups"),
        ({"algorithm": {"advantage": "grpo"}}, "compares siblings"),
    ],
)
def test_what_makes_no_sense_of_conversations_is_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        compose(supervised("m", **sections))
