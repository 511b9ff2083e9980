"""What holds for every policy loss: options, masks and extremes. Their numbers: test_losses_by_hand.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.algorithms.losses import LossInput
from asyncrl.algorithms.recipe import losses
from asyncrl.errors import ConfigError
from tests.fakes.losses import evaluate, loss_input, random_input, trace

EVERY = pytest.mark.parametrize("name", losses.names())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"clip": 0.2}, "unknown option 'clip'; options: clip_low, clip_high, dual_clip"),
        ("ppo", {"clip_low": 1.0}, "< 1"),
        ("ppo", {"dual_clip": -1}, ">= 0"),
        ("gspo", {"clip_high": 0}, "> 0"),
        ("m2po", {"tau": "much"}, "tau"),
        ("reinforce", {"clip_low": 0.2}, "unknown option 'clip_low'; options: none"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.loss[.:].*" + message):
        losses.get(name).bound(options, "algorithm.loss")


def test_prepare_takes_the_options_that_it_names() -> None:
    mu = [0.1, 0.5]
    for options, kept in [({}, [1, 0]), ({"tau": 0.5}, [1, 1])]:
        prepare = losses.get("m2po").bound(options, "$").prepare
        assert prepare is not None
        assert prepare([trace([0.0, 0.0], mu)])[0].tolist() == kept


# -- properties of all -----------------------------------------------------------------------------


def example(name: str, seed: int) -> LossInput:
    prepared = {"clip_cov": [0.0, 1.0], "kl_cov": [0.0, 1.0], "m2po": [0.0, 1.0], "tba": [-2.0, 3.0]}
    return random_input(seed, behaviour=losses.get(name).ratio == "prox", prepared=prepared.get(name))


@EVERY
def test_what_a_stale_token_says_changes_nothing(name: str) -> None:
    """Its log-probs move together, as the contract has it; those of trainable tokens stay."""
    given = example(name, 5)
    stale = ~given.trainable
    assert stale.any()
    moved = {
        key: torch.where(stale, -7.0, getattr(given, key).detach())
        for key in ("logp", "prox", "mu", "advantage")
    }
    other = replace(given, **(moved | {"logp": moved["logp"].requires_grad_()}))
    (first, slope), (second, changed) = evaluate(name, given), evaluate(name, other)
    assert torch.equal(first.value, second.value) and torch.equal(slope, changed)


@EVERY
def test_a_fully_masked_batch_is_zero(name: str) -> None:
    given = example(name, 7)
    weight = torch.zeros_like(given.correction.weight)
    masked = replace(given, correction=replace(given.correction, weight=weight))
    stale = replace(given, trainable=torch.zeros_like(given.trainable))
    for nothing in (masked, stale):
        token, slope = evaluate(name, nothing)
        assert not token.value.any() and not slope.any()


GAPS = [0.0, 1e-3, 20.0, 100.0, 1e4]


@EVERY
@pytest.mark.parametrize("together", [False, True], ids=["alone", "one episode"])
def test_extreme_log_ratios_stay_finite(name: str, together: bool) -> None:
    """pi, prox and mu down to e^-10000 in all combinations, either sign of A."""
    logp, prox, mu, advantage = zip(
        *itertools.product(*[[-x for x in GAPS]] * 3, [-3.0, 0.0, 2.0]), strict=True
    )
    count = len(logp)
    given = loss_input(
        logp,
        dtype=torch.float32,
        prox=prox,
        mu=mu,
        reference=mu,
        advantage=advantage,
        row=[0] * count if together else range(count),
        prepared=[1.0] * count,
    )
    token, slope = evaluate(name, given)
    assert torch.isfinite(token.value).all() and torch.isfinite(slope).all()


def test_sums_over_long_episodes_do_not_drift_in_float32() -> None:
    """topr's ratio of 60,000 tokens: log(pi/mu) is −10 at the first and 1e-5 at each other, −9.4 together.
    Added one by one in float32 each would count 5% too little."""
    n = 60_000
    logs = [-10.0] + [1e-5] * n
    given = loss_input(
        [0.0] * (n + 1), mu=[-x for x in logs], advantage=[-1.0] * (n + 1), dtype=torch.float32
    )
    loss, _ = evaluate("topr", given)
    assert loss.ratio is not None
    assert loss.ratio[0].item() == pytest.approx(math.exp(-10 + n * 1e-5), rel=1e-4)
