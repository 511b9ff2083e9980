"""Too little memory in mid-batch: all ranks end, and new ones repeat the batch in smaller micro-batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from asyncrl.errors import lacks_memory
from asyncrl.trainer import learner as learning
from asyncrl.trainer import objective
from asyncrl.trainer.batch import MicroBatch
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    Episode,
    Recorder,
    full_state,
    make_learner,
    plain_model,
    random_cut,
    run_batch,
    save_tiny_model,
    tiny_config,
)

pytestmark = pytest.mark.slow

SECTIONS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "barrier": {"algorithm": {"loss": "ppo", "steps_per_batch": 2}},
}
# of the config, and what is learned; random micro-batches have about 200
BUDGET = 400
CUT = 3


def lack(*about: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


class Failing:
    """In place of a function: its call number `at` of this process fails for want of memory."""

    def __init__(self, function: Any, at: int) -> None:
        self.function = function
        self.left = at

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.left -= 1
        if not self.left:
            lack()
        return self.function(*given, **named)


class FailingBackward(Failing):
    """The call gives a loss whose backward fails."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        found = self.function(*given, **named)
        self.left -= 1
        if not self.left:
            found.loss_sum.register_hook(lack)
        return found


PLACES = {
    "forward": lambda: mock.patch.object(objective, "loss_input", Failing(objective.loss_input, 2)),
    "backward": lambda: mock.patch.object(learning, "evaluate", FailingBackward(learning.evaluate, 2)),
    "reduction": lambda: mock.patch.object(fsdp, "foreach_reduce", Failing(fsdp.foreach_reduce, 2)),
}


def learner_of(folder: Path, world: World, sections: dict[str, Any]) -> Learner:
    """The model lies beside the folder of this run."""
    limits = {"max_tokens": 64, "max_new_tokens": 32}
    keys = {"rollout": limits, "trainer": {"micro_batch_tokens": BUDGET}}
    config = tiny_config(str(folder.parent / "model"), **keys, **sections)
    return make_learner(config, world)


def batch_of(folder: Path) -> list[Episode]:
    return Recorder(plain_model(str(folder.parent / "model")), noise=0.2).groups(4, 4, [0])


def fail(place: str, sections: dict[str, Any], world: World, folder: Path) -> Any:
    """Rank 0 lacks memory; what it was working on. The others lose it."""
    learner = learner_of(folder, world, sections)
    lacking = PLACES[place]() if world.rank == 0 else mock.MagicMock()
    with pytest.raises(RuntimeError) as caught, lacking:
        run_batch(learner, random_cut(batch_of(folder), world.size, 3, seed=0))
    assert lacks_memory(caught.value) or world.rank
    return learner.micro_batch_size, learner.step


def train(budget: int, sections: dict[str, Any], world: World, folder: Path) -> Any:
    learner = learner_of(folder, world, sections)
    learner.token_budget = budget
    sizes: list[int] = []
    collate = learner._collate_on_device

    def noted(examples: Any, *images: Any) -> Any:
        sizes.append(len(examples))
        return collate(examples, *images)

    learner._collate_on_device = noted  # type: ignore[method-assign]
    metrics = run_batch(learner, random_cut(batch_of(folder), world.size, 3, seed=0))
    assert not any(learner.micro_batch_size), "none is under way"
    return full_state(learner.policy), sizes, metrics["trainer/trajectories"]


def run(ranks: int, work: Any, world: World, folder: Path) -> Any:
    folder.mkdir()
    return work(world, folder) if ranks == 1 else run_ranks(ranks, work, folder)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_what_lacks_memory_is_reported_and_smaller_micro_batches_give_the_same_weights(
    world: World, tmp_path: Path, place: str, kind: str, ranks: int
) -> None:
    save_tiny_model(tmp_path / "model")
    (tokens, episodes), done = run(ranks, partial(fail, place, SECTIONS[kind]), world, tmp_path / "failed")
    assert episodes > 1 and tokens > CUT and done == 0
    found, small, count = run(ranks, partial(train, CUT, SECTIONS[kind]), world, tmp_path / "again")
    wanted, large, all_of_them = run(ranks, partial(train, BUDGET, SECTIONS[kind]), world, tmp_path / "whole")
    assert len(small) > len(large) and count == all_of_them == 16
    assert all(torch.allclose(found[n], wanted[n], rtol=0, atol=1e-9) for n in wanted)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_micro_batch_that_has_no_room_on_the_device_is_reported_by_its_own_size(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """It is brought there while the one before it is computed."""
    save_tiny_model(tmp_path / "model")
    learner = learner_of(tmp_path / "run", world, {})
    learner.token_budget = BUDGET // CUT
    brought = list[tuple[int, int]]()

    def lacking(micro: MicroBatch, device: torch.device) -> MicroBatch:
        brought.append((micro.selected.ids.numel(), len(micro.episode.unique())))
        if len(brought) == call:
            lack()
        return micro

    monkeypatch.setattr(MicroBatch, "to", lacking)
    with pytest.raises(torch.OutOfMemoryError):
        run_batch(learner, random_cut(batch_of(tmp_path / "run"), world.size, 3, seed=0))
    assert len(brought) == call and learner.micro_batch_size == brought[-1]
