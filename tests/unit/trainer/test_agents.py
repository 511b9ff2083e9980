"""Agents with adapters of their own, trained in one batch."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

from asyncrl import cli
from asyncrl.config import parse
from asyncrl.conversation.requests import AgentRequest
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import ConfigError
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import score_ids
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.weights.adapters import role_name
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.fakes.models import VOCABULARY
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    Episode,
    final_gradients,
    load_checkpoint,
    make_learner,
    plain_model,
    random_cut,
    run_batch,
    save_checkpoint,
    save_tiny_model,
    save_tiny_qwen,
    tiny_config,
)
from tests.unit.trainer.test_lora import applied, logits

pytestmark = pytest.mark.slow

ALPHA = 6.0
RANKS = {"planner": 3, "coder": 2}
AGENTS = {name: {"lora_rank": rank} for name, rank in RANKS.items()}
TWO: dict[str, Any] = {
    "agents": AGENTS,
    "model": {"lora_alpha": ALPHA},
    "rollout": {"agent": "some.py:agent"},
}
PROMPT = tuple(range(1, 25))  # of both agents: long enough that a tree would share it


def games(groups: int, *, of: tuple[str, ...] = ("planner", "coder"), seed: int = 0) -> list[Episode]:
    """Groups of three episodes, in which each agent has a row of two turns and a reward of its own."""
    rng = random.Random(seed)
    episode_list = list[Episode]()
    for group in range(groups):
        members = [_turns(rng, of) for _ in range(3)]
        results = tuple(_result(rng, turns) for turns in members)
        for place, turns in enumerate(members):
            planned = PlannedTrajectory(
                *(f"{group}/{place}", str(group), len(turns), results[place], results, place, 3, 1.0)
            )
            episode_list.append((planned, turns))
    return episode_list


def _turns(rng: random.Random, of: tuple[str, ...]) -> list[Turn]:
    turns = list[Turn]()
    for turn in range(2):
        for row, agent in enumerate(of):
            ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6)))
            context = (rng.randrange(VOCABULARY),) if turn else (*PROMPT, rng.randrange(VOCABULARY))
            mu = tuple(rng.uniform(-4.5, -3.5) for _ in ids)
            spans = (VersionSpan(0, len(ids), 0, 0),)
            turns.append(
                Turn(len(turns), context, Generation(ids, mu, spans, StopReason.STOP), row=row, agent=agent)
            )
    return turns


def _result(rng: random.Random, turns: list[Turn]) -> EpisodeResult:
    rewards = tuple(rng.choice([-1.0, 0.0, 1.0]) for _ in turns)
    tokens = tuple(len(turn.generation.ids) for turn in turns)
    agents = tuple(turn.agent for turn in turns)
    return EpisodeResult(sum(rewards), sum(tokens), rewards, agents=agents, turn_tokens=tokens)


def alone(episode: Episode, agent: str) -> Episode:
    """The same episode, as if the agent had been by itself."""
    planned, turns = episode
    mine = [msgspec.structs.replace(turn, row=0) for turn in turns if turn.agent == agent]
    mine = [msgspec.structs.replace(turn, index=index) for index, turn in enumerate(mine)]
    own = planned.own.of(agent)
    siblings = tuple(one.of(agent) for one in planned.siblings)
    return msgspec.structs.replace(planned, frames=len(mine), own=own, siblings=siblings), mine


def filled(learner: Learner) -> Learner:
    """With adapters that do something: those of an agent are the same whatever others there are."""
    with torch.no_grad():
        for name, parameter in learner.policy.lm.named_parameters():
            if parameter.requires_grad:
                draw = torch.Generator().manual_seed(sum(map(ord, name)))
                whole = 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                local: Any = parameter
                (chunk,) = local.__create_chunk_list__()
                start = chunk.offsets[0]
                count = chunk.sizes[0]
                local.to_local().copy_(whole[start : start + count])
    return learner


def made(path: str, world: World, dtype: str = "float64", **sections: Any) -> Learner:
    return filled(make_learner(tiny_config(path, **copy.deepcopy(TWO | sections)), world, dtype))


def single(path: str, world: World, agent: str, like: Learner, **sections: Any) -> Learner:
    """A learner whose only adapter is that of the agent."""
    model = {"lora_rank": RANKS[agent], "lora_alpha": ALPHA}
    config = tiny_config(path, model=model, **copy.deepcopy(sections))
    learner = make_learner(config, world)
    theirs = dict(like.policy.lm.named_parameters())
    with torch.no_grad():
        for name, parameter in learner.policy.lm.named_parameters():
            if parameter.requires_grad:
                layer, _, role = name.rpartition(".")
                parameter.copy_(theirs[f"{layer}.{role_name(role, agent)}"])
    return learner


SEQUENCES = {"loss": "gspo", "prox": "mu", "correction": {}}  # its ratio is of a whole episode


@pytest.mark.parametrize("packing", ["padded", "packed", "tree"])
@pytest.mark.parametrize("algorithm", [{}, SEQUENCES], ids=["by token", "by episode"])
def test_each_learns_as_if_it_were_alone(
    model_path: str, world: World, packing: str, algorithm: dict[str, Any]
) -> None:
    """But for D, which is of all tokens of the batch: the batch has one loss."""
    episodes = games(3)
    more: dict[str, Any] = {"algorithm": algorithm, "trainer": {"packing": packing}}
    more["buffer"] = {"max_staleness": 0}
    learner = made(model_path, world, **more)
    assert learner.packing == packing
    probe = torch.tensor(score_ids(learner.policy, PROMPT, world.device)).view(len(RANKS), -1)
    gradients = final_gradients(learner, random_cut(episodes, 1, 3, seed=0))
    checked = 0
    tokens = sum(len(turn.generation.ids) for _, turns in episodes for turn in turns)
    for agent, scores in zip(RANKS, probe, strict=True):
        mine = [alone(episode, agent) for episode in episodes]
        own = sum(len(turn.generation.ids) for _, turns in mine for turn in turns)
        only = single(model_path, world, agent, learner, **more)
        assert score_ids(only.policy, PROMPT, world.device) == pytest.approx(scores.tolist(), abs=1e-6)
        wanted = final_gradients(only, [[mine]])
        for name, gradient in wanted.items():
            layer, _, role = name.rpartition(".")
            theirs = gradients[f"{layer}.{role_name(role, agent)}"]
            scale = own / tokens if learner.config.algorithm.aggregation == "token_mean" else 1.0
            assert torch.allclose(theirs, gradient * scale, rtol=1e-8, atol=1e-12), name
            checked += bool(gradient.abs().max() > 1e-6)
    assert checked == len(gradients) == 2 * 2 * 8


def test_one_that_has_no_tokens_takes_no_step(model_path: str, world: World) -> None:
    learner = made(model_path, world, trainer={"weight_decay": 0.1})
    run_batch(learner, [[games(2)]])
    before = _copies(learner)
    moments = _moments(learner)
    metrics = run_batch(learner, [[games(2, of=("planner",), seed=1)]])
    after = _copies(learner)
    later = _moments(learner)
    for name in before:
        same = torch.equal(before[name], after[name]) and moments[name] == later[name]
        assert same == ("planner" not in name), name
    assert metrics["actor/agent/coder/tokens"] == 0 < metrics["actor/agent/planner/tokens"]


def _copies(learner: Learner) -> dict[str, Tensor]:
    named = learner.policy.lm.named_parameters()
    return {name: p.detach().full_tensor().clone() for name, p in named if p.requires_grad}  # type: ignore


def _moments(learner: Learner) -> dict[str, list[float]]:
    state = learner.optimizer.state
    named = learner.policy.lm.named_parameters()
    return {
        name: [float(state[p][key].abs().sum()) for key in ("exp_avg", "exp_avg_sq", "step")]
        for name, p in named
        if p.requires_grad
    }


def test_clips_and_metrics_are_by_agent(model_path: str, world: World) -> None:
    free = made(model_path, world)
    clipped = made(model_path, world, trainer={"grad_clip": 1e-3})
    cut = [[games(3)]]
    norms = {}
    gradients = final_gradients(clipped, cut)
    metrics = run_batch(free, cut)
    for agent in RANKS:
        own = [gradient for name, gradient in gradients.items() if name.endswith(agent)]
        norms[agent] = float(torch.stack([one.norm() for one in own]).norm())
        assert norms[agent] == pytest.approx(1e-3, rel=1e-2)
    parts = [metrics[f"actor/agent/{agent}/grad_norm"] for agent in RANKS]
    assert metrics["actor/grad_norm"] == pytest.approx(sum(norm**2 for norm in parts) ** 0.5)
    losses = [metrics[f"actor/agent/{agent}/pg_loss"] for agent in RANKS]
    assert sum(losses) == pytest.approx(metrics["actor/pg_loss"]) and min(map(abs, losses)) > 0


def sharing(world: World, folder: Path) -> Any:
    """Ranks that compute each sequence together."""
    return trained(world.arranged(1, world.size), folder)


def trained(world: World, folder: Path) -> Any:
    """Two steps, the second resumed; one rank may have no tokens of an agent, or none at all."""
    if world.rank == 0 and not (folder / "model").is_dir():
        save_tiny_qwen(folder / "model")
    world.gather(0, int)
    path = str(folder / "model")
    parallel = world.sequence.count if world.sequence else 1
    ranks = {"ranks": world.size, "sequence_parallel": parallel, "packing": "tree"}
    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
        learner, other = (made(path, world, trainer=dict(ranks)) for _ in range(2))
    first = [episode if i % 2 else alone_named(episode, "planner") for i, episode in enumerate(games(2))]
    run_batch(learner, [[first] + [[]] * (world.data_ranks - 1)])
    step = save_checkpoint(folder / "checkpoints", learner, CheckpointManifest(step=1, trainer_epoch=1))
    load_checkpoint(step, other)
    for one in (learner, other):
        run_batch(one, random_cut(games(2, seed=1), world.data_ranks, 2, seed=0))
    assert all(
        torch.equal(a, b) for a, b in zip(*(_copies(one).values() for one in (learner, other)), strict=True)
    )
    return _copies(learner)


def alone_named(episode: Episode, agent: str) -> Episode:
    planned, turns = alone(episode, agent)
    own = msgspec.structs.replace(
        planned.own,
        agents=(agent,) * len(turns),
        turn_tokens=tuple(len(turn.generation.ids) for turn in turns),
    )
    return msgspec.structs.replace(planned, own=own, siblings=(own,), place=0), turns


@pytest.mark.full
@pytest.mark.parametrize("work", [trained, sharing])
def test_two_ranks_do_what_one_does_and_a_checkpoint_goes_on(work: Any, world: World, tmp_path: Path) -> None:
    one = trained(world, tmp_path / "one")
    two = run_ranks(2, work, tmp_path / "two")
    assert one.keys() == two.keys() and len(one) == 2 * 2 * 14
    assert all(torch.allclose(one[name], two[name], rtol=1e-6, atol=1e-9) for name in one)


@pytest.mark.parametrize("save", [save_tiny_model, save_tiny_qwen])
def test_each_is_written_by_itself(
    save: Any, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path)
    run = tmp_path / "run"
    learner = made(path, world, "float32", model={"lora_rank": 1, "lora_alpha": ALPHA})
    save_checkpoint(run / "checkpoints", learner, CheckpointManifest(step=1, trainer_epoch=1))
    (run / "config.yaml").write_bytes(msgspec.yaml.encode(learner.config))
    out = tmp_path / "apart"
    assert cli.main(["merge", str(run), str(out)]) == 2, "which of them would be merged?"
    assert "add --adapters apart" in capsys.readouterr().err and not out.exists()
    assert cli.main(["merge", str(run), str(out), "--adapters", "apart"]) == 0
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert sorted(str(file.relative_to(out)) for file in out.rglob("*.*")) == sorted(
        f"{folder}{name}" for folder in ("", "planner/", "coder/") for name in names
    )
    own = dict(learner.policy.lm.named_parameters())
    for agent, rank in {"": 1, **RANKS}.items():
        wanted = plain_model(path).float()
        for name, weight in wanted.named_parameters():
            stem = name.removesuffix("weight")
            if (key := stem + role_name("lora_a", agent)) in own:
                a, b = (own[stem + role_name(role, agent)].full_tensor() for role in ("lora_a", "lora_b"))  # type: ignore
                change = ALPHA / rank * (b @ a)
                with torch.no_grad():
                    weight += change if save is save_tiny_qwen else change.t()
                assert key in own
        assert (logits(applied(path, out / agent)) - logits(wanted)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollout": {}}, "set rollout.agent"),
        ({"weights": {"adapters": False}}, "contain only adapters"),
        ({"weights": {"full_every": 2}}, "contain only adapters"),
        ({"engine": {"name": "sglang", "urls": ["http://a"]}}, "adapters=true"),
        ({"agents": {"a.b": {"lora_rank": 1}}}, "agents"),
        ({"agents": {"a": {"lora_rank": 0}}}, "lora_rank"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], said: str) -> None:
    run = {"name": "t", "data": {"train": "x"}, **copy.deepcopy(TWO), "model": {"path": "x"}}
    assert parse(run).agents
    with pytest.raises(ConfigError, match=said):
        parse(run | changed)


def test_what_no_adapter_answers_is_not_trained() -> None:
    run = {"name": "t", "data": {"train": "x"}, **copy.deepcopy(TWO)}
    requests_by_agent = {name: AgentRequest((), agent=name) for name in ("planner", "coder", "other", "")}
    for rank, untrained in ((0, {"other", ""}), (4, set())):
        parts = EpisodeParts(parse(run | {"model": {"path": "x", "lora_rank": rank}}))
        assert {name for name, request in requests_by_agent.items() if parts.untrained(request)} == untrained
