"""Sync is a special case: with max_staleness=0 the gradients are those of a plain synchronous loop.

The loop is that of examples/plain_loop, which knows nothing of versions, ratios, micro-batches or ranks:
advantages by group, the policy loss of the whole batch, a step. Its trajectories then go through the learner
on 1, 2 and 4 ranks, cut at random, the last cut by shifts: ranks rest after each micro-batch. Compared are
gradients, in float64 and before Adam, which would hide a wrong scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from asyncrl.observe.timeline import Timeline
from asyncrl.trainer import device_offload
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from tests.fakes.plain_loop import as_plain, plain_loop
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    Episode,
    Recorder,
    difference,
    final_gradients,
    make_learner,
    plain_model,
    random_cut,
    run_batch,
    save_tiny_model,
    tiny_config,
)

STEPS = 3
LR = 0.3
CUTS = 3
TOLERANCE = 1e-8
MEMBERS = 4
TEMPERATURE = 0.8
Gradients = dict[str, Tensor]
Recorded = tuple[Path, list[Gradients]]


def synchronous_loop(path: str) -> tuple[list[list[Episode]], list[Gradients]]:
    """Sample, train, repeat. Returns each step's trajectories and gradients."""
    loop = plain_loop()
    model = plain_model(path)
    batches = []
    gradients = []
    for step in range(STEPS):
        batch = Recorder(model, seed=step, temperature=TEMPERATURE).groups(4, MEMBERS, [step])
        episodes = [as_plain(turns) for _, turns in batch]
        rewards = [row.own.reward for row, _ in batch]
        weights = [
            a for g in range(0, len(batch), MEMBERS) for a in loop.advantages(rewards[g : g + MEMBERS])
        ]
        model.zero_grad()
        loop.policy_loss(model, episodes, weights, TEMPERATURE).backward()
        batches.append(batch)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    return batches, gradients


def replay(world: World, folder: Path) -> list[list[Gradients]]:
    """The learner on the recorded trajectories: gradients by step and cut. Runs on every rank."""
    path, batches = torch.load(folder.parent / "recorded.pt", weights_only=False)
    learner = make_learner(tiny_config(path, buffer={"max_staleness": 0}, trainer={"lr": LR}), world)
    learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=LR)
    found = []
    for batch in batches:
        cuts = [random_cut(batch, world.size, parts, seed=parts) for parts in range(1, CUTS + 1)]
        found.append([final_gradients(learner, cut) for cut in cuts[:-1]])
        with shifts(learner, folder) as rests:
            found[-1].append(final_gradients(learner, cuts[-1]))
            run_batch(learner, cuts[-1])
        assert rests.call_count == 2 * CUTS
    return found


@contextmanager
def shifts(learner: Learner, folder: Path) -> Iterator[mock.Mock]:
    """Engines get the devices after each micro-batch. Yields what counts how often."""
    timeline = Timeline(folder / f"{learner.world.rank}.jsonl")
    accumulate = learner.accumulate
    own = device_offload.DeviceOffload(learner, timeline, folder)
    rests = mock.Mock()

    def accumulate_and_rest(micro: list[Episode]) -> None:
        accumulate(micro)
        own.offload(rests)
        own.onload()

    with (
        mock.patch.object(device_offload, "SMALL_STORAGE", 0),
        mock.patch.object(learner, "accumulate", accumulate_and_rest),
    ):
        yield rests
    timeline.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("sync")
    path = save_tiny_model(folder / "model")
    batches, gradients = synchronous_loop(path)
    torch.save((path, batches), folder / "recorded.pt")
    return folder, gradients


def on_ranks(world: World, folder: Path) -> tuple[list[list[Gradients]], dict[str, Gradients]]:
    """What right learners find, and wrong ones. Runs on every rank."""
    return replay(world, folder), mutated(world, folder)


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest, recorded: Recorded, world: World) -> Any:
    """(ranks, gradients by step and cut, gradients of the mutants)."""
    ranks = request.param
    folder = recorded[0]
    return ranks, *(
        on_ranks(world, folder / "1") if ranks == 1 else run_ranks(ranks, on_ranks, folder / f"{ranks}")
    )


def test_gradients_are_those_of_the_synchronous_loop(recorded: Recorded, found: Any) -> None:
    _, gradients, _ = found
    for step in range(STEPS):
        for cut in range(CUTS):
            assert difference(gradients[step][cut], recorded[1][step]) < TOLERANCE, (step, cut)


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.25, -1.0, 1 + 1e-6])
def test_the_comparison_has_power(recorded: Recorded, factor: float) -> None:
    """A wrong scale, a division by the ranks or a wrong sign would be seen."""
    for wanted in recorded[1]:
        mutated = {name: gradient * factor for name, gradient in wanted.items()}
        assert difference(mutated, wanted) > TOLERANCE


def mutants(size: int) -> dict[str, float]:
    """What a wrong learner could take for the factor by which FSDP2 averages; on one rank 1 is right."""
    wrong = {"ranks forgotten": 1.0, "scale": 2.0 * size, "sign": -1.0 * size}
    return {name: factor for name, factor in wrong.items() if factor != size}


def mutated(world: World, folder: Path) -> dict[str, Gradients]:
    """The gradients of the first batch by learners with a wrong factor. Runs on every rank."""
    path, batches = torch.load(folder.parent / "recorded.pt", weights_only=False)
    learner = make_learner(tiny_config(path, buffer={"max_staleness": 0}), world)
    cut = random_cut(batches[0], world.size, 2, seed=0)
    found = {}
    for name, factor in mutants(world.size).items():
        learner.averaged_ranks = factor
        found[name] = final_gradients(learner, cut)
    return found


def test_a_mutated_learner_is_caught(recorded: Recorded, found: Any) -> None:
    """The comparison fails for each, and only by the factor that was mutated."""
    (ranks, _, wrong), wanted = found, recorded[1][0]
    assert wrong.keys() == mutants(ranks).keys()
    for name, factor in mutants(ranks).items():
        assert difference(wrong[name], wanted) > TOLERANCE, name
        mended = {key: gradient * (ranks / factor) for key, gradient in wrong[name].items()}
        assert difference(mended, wanted) < TOLERANCE, name
