"""log prox: what stands in for the policy at the start of the batch, and when it is exactly that."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.recipe import Recipe, compose
from asyncrl.config import parse
from asyncrl.trainer.batch import MicroBatch, collate
from asyncrl.trainer.objective import proximal

MU, DRIFT = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64), 0.3


def recipe(**algorithm: object) -> Recipe:
    base = {"name": "t", "model": {"path": "m"}, "data": {"train": "x"}}
    return compose(parse({**base, "algorithm": {"loss": "ppo", "epochs": 4, **algorithm}}))


def micro(lag: list[int]) -> MicroBatch:
    nothing = collate([], torch.float64)
    return dataclasses.replace(nothing, mu=MU, lag=torch.tensor(lag), prox=None)


def policy(lag: list[int], progress: float) -> Tensor:
    """log pi of a policy whose log-probs move by DRIFT per version, `progress` of one beyond prox."""
    return MU + DRIFT * (torch.tensor(lag) + progress)


@pytest.mark.parametrize("lag", [[0, 0, 0], [1, 2, 8]])
@pytest.mark.parametrize("progress", [0.0, 0.25, 0.75])
def test_loglinear_is_exact_where_log_probs_move_evenly(lag: list[int], progress: float) -> None:
    """And with data of the current version whatever they do: prox is mu then."""
    found = proximal(micro(lag), policy(lag, progress), recipe(prox="loglinear"), progress)
    assert torch.allclose(found, policy(lag, 0.0), atol=1e-12)


def test_loglinear_is_off_where_they_do_not() -> None:
    lag, progress = [1, 1, 1], 0.5
    jumped = MU + DRIFT  # all of the way inside the batch, none before it
    found = proximal(micro(lag), jumped, recipe(prox="loglinear"), progress)
    assert torch.allclose(found - MU, torch.full_like(MU, DRIFT * 2 / 3))  # the true one is mu


def test_loglinear_with_current_data_is_mu() -> None:
    erratic = MU + torch.tensor([0.5, -0.7, 0.1])
    assert torch.equal(proximal(micro([0, 0, 0]), erratic, recipe(prox="loglinear"), 0.25), MU)


def test_before_the_first_step_all_of_them_are_pi() -> None:
    pi = policy([2, 2, 2], 0.0)
    assert torch.equal(proximal(micro([2, 2, 2]), pi, recipe(prox="loglinear"), 0.0), pi)
    one_step = recipe(loss="reinforce", epochs=1)
    assert one_step.prox == "current" and torch.equal(proximal(micro([2, 2, 2]), pi, one_step, 0.0), pi)


def test_what_was_recomputed_is_taken_as_it_is() -> None:
    recomputed = dataclasses.replace(micro([3, 3, 3]), prox=MU - 1)
    assert torch.equal(proximal(recomputed, policy([3, 3, 3], 0.5), recipe(), 0.5), MU - 1)
