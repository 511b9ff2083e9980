"""log prox: what stands in for the policy at the start of the batch; and the loss of a micro-batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.diagnostics import metrics_of, report_tokens
from asyncrl.algorithms.recipe import Recipe, compose
from asyncrl.config import RunConfig, parse
from asyncrl.trainer.batch import MicroBatch, collate
from asyncrl.trainer.objective import MicroBatchLoss, evaluate, loss_input, proximal_of
from asyncrl.trainer.scores import Scores

MU = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
DRIFT = 0.3


def configured(**sections: dict[str, Any]) -> RunConfig:
    return parse({"name": "t", "model": {"path": "m"}, "data": {"train": "x"}, **sections})


def recipe(**algorithm: object) -> Recipe:
    return compose(configured(algorithm={"loss": "ppo", "epochs": 4, **algorithm}))


def micro(lag: list[int]) -> MicroBatch:
    nothing = collate([], torch.float64)
    return dataclasses.replace(nothing, rollout_logprobs=MU, lag=torch.tensor(lag), proximal_logprobs=None)


def policy(lag: list[int], progress: float) -> Tensor:
    """log pi of a policy whose log-probs move by DRIFT per version, `progress` of one beyond prox."""
    return MU + DRIFT * (torch.tensor(lag) + progress)


@pytest.mark.parametrize("lag", [[0, 0, 0], [1, 2, 8]])
@pytest.mark.parametrize("progress", [0.0, 0.25, 0.75])
def test_loglinear_is_exact_where_log_probs_move_evenly(lag: list[int], progress: float) -> None:
    """And with data of the current version whatever they do: prox is mu then."""
    proximal_logprobs = proximal_of(micro(lag), policy(lag, progress), recipe(prox="loglinear"), progress)
    assert torch.allclose(proximal_logprobs, policy(lag, 0.0), atol=1e-12)


def test_loglinear_is_off_where_they_do_not() -> None:
    lag = [1, 1, 1]
    progress = 0.5
    jumped = MU + DRIFT  # all of the way inside the batch, none before it
    proximal_logprobs = proximal_of(micro(lag), jumped, recipe(prox="loglinear"), progress)
    assert torch.allclose(proximal_logprobs - MU, torch.full_like(MU, DRIFT * 2 / 3))  # the true one is mu


def test_loglinear_with_current_data_is_mu() -> None:
    erratic = MU + torch.tensor([0.5, -0.7, 0.1])
    assert torch.equal(proximal_of(micro([0, 0, 0]), erratic, recipe(prox="loglinear"), 0.25), MU)


def test_before_the_first_step_all_of_them_are_pi() -> None:
    pi = policy([2, 2, 2], 0.0)
    assert torch.equal(proximal_of(micro([2, 2, 2]), pi, recipe(prox="loglinear"), 0.0), pi)
    one_step = recipe(loss="reinforce", epochs=1)
    assert one_step.prox == "current" and torch.equal(proximal_of(micro([2, 2, 2]), pi, one_step, 0.0), pi)


def test_what_was_recomputed_is_taken_as_it_is() -> None:
    recomputed = dataclasses.replace(micro([3, 3, 3]), proximal_logprobs=MU - 1)
    assert torch.equal(proximal_of(recomputed, policy([3, 3, 3], 0.5), recipe(), 0.5), MU - 1)


# -- losses of single tokens, each an episode of its own ---------------------------------------------------

RATIO = [1.0, 3.0, 0.3, 1.5, 0.6]  # pi/mu
ADVANTAGE = [1.0, 1.0, -1.0, -1.0, 1.0]


def evaluated(
    *,
    prox: list[float] | None = None,
    reference: Tensor | None = None,
    progress: float = 0.0,
    divergence: Tensor | None = None,
    **sections: dict[str, Any],
) -> tuple[MicroBatchLoss, list[float]]:
    """Of tokens with pi/mu of RATIO and k2 = 1/2 to the reference, and the gradient by log pi. `prox`:
    prox/mu, where it was recomputed."""
    config = configured(**sections)
    n = len(RATIO)
    mu = torch.full((n,), -2.0, dtype=torch.float64)
    at = torch.arange(n)
    yes = torch.ones(n, dtype=torch.bool)
    micro = dataclasses.replace(
        collate([], torch.float64),
        episode=at,
        **dict.fromkeys(("within_staleness", "is_exact", "is_counted"), yes),
        **dict.fromkeys(("turn", "lag"), 0 * at),
        rollout_logprobs=mu,
        weight=torch.ones_like(mu),
        advantage=torch.tensor(ADVANTAGE, dtype=torch.float64),
        proximal_logprobs=None if prox is None else mu + torch.tensor(prox, dtype=torch.float64).log(),
        reference=mu + torch.tensor(RATIO, dtype=torch.float64).log() - 1 if reference is None else reference,
    )
    logp = (mu + torch.tensor(RATIO, dtype=torch.float64).log()).requires_grad_()
    scores = Scores(logp, torch.zeros_like(mu), divergence=divergence)
    loss = evaluate(micro, scores, None, config, compose(config), 1.0, progress)
    return loss, torch.autograd.grad(loss.loss_sum, logp, retain_graph=True)[0].tolist()


def test_a_loss_sees_which_turn_wrote_a_token_and_how_old_its_version_is() -> None:
    each = torch.ones(3, dtype=torch.bool)
    turns = {"turn": torch.tensor([0, 1, 1]), "episode": torch.zeros(3, dtype=torch.long)}
    batch = dataclasses.replace(micro([0, 2, 1]), within_staleness=each, advantage=torch.ones(3), **turns)
    given = loss_input(batch, Scores(MU, 0 * MU), recipe(loss="reinforce", epochs=1), 0.0)
    assert given.lag.tolist() == [0, 2, 1] and given.turn.tolist() == [0, 1, 1]


SYNC = {"max_staleness": 0}
EPOCHS = {"loss": "ppo", "epochs": 2}
CAPPED = [1.0, 2.0, 0.3, 1.5, 0.6]  # min(rho, 2)
KL = [
    ("loss", {}, {}, [1.0, 3.0, 0.0, 1.5, 0.6]),  # the correction's weight: the band, then the caps 5 and 2
    ("loss", {"loss": "cispo_scalerl"}, {}, CAPPED),
    ("loss", {"correction": {}}, SYNC, CAPPED),  # without a weight a truncated rho: tokens still come from mu
    ("loss", {"correction": {"mask": {}}}, SYNC, [1.0, 2.0, 0.0, 1.5, 0.6]),
    ("loss_unweighted", {}, {}, [1.0, 1.0, 0.0, 1.0, 1.0]),
    ("loss_unweighted", {"correction": {}}, SYNC, [1.0] * 5),
    ("loss_unweighted", {"loss": "cispo_scalerl"}, {}, [1.0] * 5),
]


@pytest.mark.parametrize(("where", "algorithm", "buffer", "weights"), KL)
def test_what_a_kl_in_the_loss_is_weighed_with(
    where: str, algorithm: dict[str, Any], buffer: dict[str, Any], weights: list[float]
) -> None:
    """In the value, and in the gradient beside that of the policy loss."""
    parts = {"algorithm": algorithm, "buffer": buffer}
    losses, gradient = evaluated(**parts, kl={"where": where})
    plain = evaluated(**parts)[1]
    total, _ = losses.loss_terms["actor/kl_loss"]
    assert total.item() == pytest.approx(sum(weights) / 2, rel=1e-12)
    assert [a - b for a, b in zip(gradient, plain, strict=True)] == pytest.approx(weights, rel=1e-9)


@pytest.mark.parametrize("where", ["loss", "loss_unweighted"])
def test_a_divergence_needs_no_weight_of_the_sampled_token(where: str) -> None:
    """But masks of episodes hold, and a token with a bad number takes no part."""
    kl = {"where": where, "estimator": "js"}
    for correction, weights in (
        ({"mask": {}, "truncate": {}}, [1.0, 1, 1, 1]),
        ({"veto": {"least": 0.4}, "truncate": {}}, [1.0, 1, 0, 1]),
    ):
        divergence = torch.tensor([1.0, 2, 4, 8, math.nan], dtype=torch.float64, requires_grad=True)
        losses, _ = evaluated(kl=kl, algorithm={"correction": correction}, divergence=divergence)
        total, _ = losses.loss_terms["actor/kl_loss"]
        assert total.item() == sum(w * d for w, d in zip(weights, [1, 2, 4, 8], strict=True))
        (slope,) = torch.autograd.grad(losses.loss_sum, divergence)
        assert slope.tolist() == [*weights, 0.0]


def test_wrong_answers_are_dropped_by_how_far_the_current_policy_left_them() -> None:
    """log mu − log pi is 1.2 for the third token, negative for the fourth; prox is the other way round."""
    algorithm = {**EPOCHS, "correction": {"negative": {"delta": 0.5}, "ratio": {}}}
    losses, _ = evaluated(prox=[1.0, 1.0, 1.0, 0.3, 1.0], algorithm=algorithm)
    assert losses.token_state.correction.masked.tolist() == [False, False, True, False, False]


def test_a_clip_around_mu() -> None:
    """verl's bypass mode: max(−uA, −A·clip(u)) with u = pi/mu and no weight; one optimizer step will do. The
    gradient by log pi is −uA where it is not clipped."""
    algorithm = {"loss": {"ppo": {"clip_high": 0.28}}, "prox": "mu"}
    losses, gradient = evaluated(algorithm=algorithm)
    assert losses.loss_sum.item() == pytest.approx(-1.0 - 1.28 + 0.8 + 1.5 - 0.6, rel=1e-12)
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, 1.5, -0.6], rel=1e-12)
    assert not compose(configured(algorithm=algorithm)).barrier


def test_around_mu_masks_and_reports_are_of_the_current_policy() -> None:
    algorithm = {**EPOCHS, "prox": "mu", "correction": {"mask": {}}}
    losses, gradient = evaluated(algorithm=algorithm, progress=0.5)
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, 1.5, -0.6], rel=1e-12)  # 0.3 would be clipped as well
    metrics = metrics_of(report_tokens(losses.token_state).sums)
    drift = sum(map(math.log, RATIO)) / len(RATIO)
    assert metrics["rollout_corr/kl"] == metrics["actor/ppo_kl"] == pytest.approx(-drift, rel=1e-12)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.2
    assert metrics["rollout_corr/logprob_diff_tokens"] == 0  # the policy moved since they were scored


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("source", ["prox", "reference"])
def test_a_token_with_a_bad_number_takes_no_part(source: str, bad: float) -> None:
    """Whichever model it is of: its gradient is 0, and those of other tokens are finite."""
    algorithm = {**EPOCHS, "correction": {"ratio": {"level": "sequence"}, "veto": {}}}
    prox = [1.0] * 5
    reference = torch.full((5,), -2.0, dtype=torch.float64)
    if source == "prox":
        prox[1] = math.exp(bad)
    else:
        reference[1] = bad
    losses, gradient = evaluated(prox=prox, reference=reference, algorithm=algorithm, kl={"where": "loss"})
    assert gradient[1] == 0 and all(map(math.isfinite, gradient)) and all(gradient[2:])
    assert losses.token_state.trainable.tolist() == [True, False, True, True, True]
    assert all(map(math.isfinite, metrics_of(report_tokens(losses.token_state).sums).values()))
