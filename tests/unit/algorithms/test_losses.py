"""What holds for every policy loss: declarations, options, weights, masks and extremes."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.library import losses
from asyncrl.algorithms.losses import Loss, LossInput, TokenLoss, loss
from asyncrl.errors import ConfigError
from tests.fakes.losses import evaluate, loss_input, random_input, trace

PREPARED = {"clip_cov": 0.0, "kl_cov": 0.0, "m2po": 1.0, "tba": 0.0}  # nothing chosen, all kept
NAMES = losses.names()
EVERY = pytest.mark.parametrize("name", NAMES)

# ratio, clips, anchored, reference, prepare
DECLARED = {
    "aipo": ("mu", False, False, False, False),
    "cispo": ("prox", True, False, False, False),
    "cispo_scalerl": ("mu", False, False, False, False),
    "clip_cov": ("prox", False, True, False, True),
    "decoupled_ppo": ("prox", True, False, False, False),
    "dppo_kl": ("mu", False, False, False, False),
    "dppo_tv": ("mu", False, False, False, False),
    "dro": ("mu", False, False, False, False),
    "gmpo": ("prox", True, False, False, False),
    "gpg": ("prox", False, False, False, False),
    "gspo": ("prox", True, False, False, False),
    "kl_cov": ("prox", True, False, False, True),
    "m2po": ("mu", False, False, False, True),
    "ppo": ("prox", True, False, False, False),
    "reinforce": ("prox", False, False, False, False),
    "sapo": ("prox", True, False, False, False),
    "tba": ("mu", False, False, True, True),
    "topr": ("mu", False, False, False, False),
}


def test_what_each_loss_declares() -> None:
    found = {
        name: (e.ratio, e.clips, e.anchored, e.reference, e.prepare is not None)
        for name, e in ((name, losses.get(name)) for name in NAMES)
    }
    assert found == DECLARED


@EVERY
def test_each_says_its_formula_and_when_to_use_it(name: str) -> None:
    text = inspect.getdoc(losses.get(name).of) or ""
    assert text.startswith("L = ") and "\nUse: " in text and "arXiv" in text and "staleness" in text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"clip": 0.2}, "unknown option 'clip'; options: clip_low, clip_high, dual_clip"),
        ("ppo", {"clip_low": 1.0}, "< 1"),
        ("ppo", {"dual_clip": 0.5}, ">= 1"),
        ("gspo", {"clip_high": 0}, "> 0"),
        ("m2po", {"tau": "much"}, "tau"),
        ("reinforce", {"clip_low": 0.2}, "unknown option 'clip_low'; options: none"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^\$\.algorithm\.loss_args[.:].*" + message):
        losses.get(name).bound(options, "$.algorithm.loss_args")


def test_prepare_takes_the_options_that_it_names() -> None:
    mu = [0.1, 0.5]
    for options, kept in [({}, [1, 0]), ({"tau": 0.5}, [1, 1])]:
        prepare = losses.get("m2po").bound(options, "$").prepare
        assert prepare is not None
        assert prepare([trace([0.0, 0.0], mu)])[0].tolist() == kept


def test_a_loss_of_ones_own() -> None:
    def square(given: LossInput, *, factor: float = 2.0) -> TokenLoss:
        return TokenLoss(given.weighed(factor * given.logp**2), torch.zeros_like(given.fresh))

    entry = loss("square_of_a_test", ratio="mu")(square)
    try:
        assert entry == Loss(square, "mu") and not entry.trusts
        assert evaluate("square_of_a_test", loss_input([-3.0]))[0].value.item() == 18.0
    finally:
        losses._entries.pop("square_of_a_test")


# -- properties of all -----------------------------------------------------------------------------


def example(name: str, seed: int) -> LossInput:
    prepared = {"clip_cov": [0.0, 1.0], "kl_cov": [0.0, 1.0], "m2po": [0.0, 1.0], "tba": [-2.0, 3.0]}
    return random_input(seed, behaviour=losses.get(name).ratio == "prox", prepared=prepared.get(name))


def reordered(given: LossInput, order: Tensor, names: Tensor) -> LossInput:
    """Its tokens in another order, its episodes by other numbers."""
    tensors = {f.name: getattr(given, f.name) for f in fields(given)}
    moved = {name: x[order] for name, x in tensors.items() if isinstance(x, Tensor)}
    moved |= {"logp": given.logp.detach()[order].requires_grad_(), "row": names[given.row][order]}
    c = given.correction
    return replace(given, **moved, correction=replace(c, weight=c.weight[order]))


@EVERY
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_order_of_tokens_and_episodes_does_not_matter(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = example(name, seed)
    order = torch.from_numpy(rng.permutation(len(one.logp)))
    two = reordered(one, order, torch.from_numpy(rng.permutation(int(one.row.max()) + 3)))
    (first, slope), (second, other) = evaluate(name, one), evaluate(name, two)
    assert torch.allclose(first.value[order], second.value, rtol=1e-12, atol=1e-14)
    assert torch.allclose(slope[order], other, rtol=1e-12, atol=1e-14)
    assert torch.equal(first.clipped[order], second.clipped)


@EVERY
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_no_weight_or_not_fresh_is_no_loss_and_no_gradient(name: str, seed: int) -> None:
    given = example(name, seed)
    token, slope = evaluate(name, given)
    out = (given.correction.weight == 0) | ~given.fresh
    assert out.any() and not token.value[out].any() and not slope[out].any()


@EVERY
def test_what_a_stale_token_says_changes_nothing(name: str) -> None:
    """Its log-probs move together, as the contract has it; those of fresh tokens stay."""
    given = example(name, 5)
    stale = ~given.fresh
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
    stale = replace(given, fresh=torch.zeros_like(given.fresh))
    for nothing in (masked, stale):
        token, slope = evaluate(name, nothing)
        assert not token.value.any() and not slope.any()


GAPS = [0.0, 1e-3, 20.0, 100.0, 1e4]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "one episode"])
def test_extreme_log_ratios_stay_finite(name: str, dtype: torch.dtype, together: bool) -> None:
    """pi, prox and mu down to e^-10000 in all combinations, either sign of A."""
    logp, prox, mu, advantage = zip(
        *itertools.product(*[[-x for x in GAPS]] * 3, [-3.0, 0.0, 2.0]), strict=True
    )
    count = len(logp)
    given = loss_input(
        logp,
        dtype=dtype,
        prox=prox,
        mu=mu,
        reference=mu,
        advantage=advantage,
        row=[0] * count if together else range(count),
        prepared=[1.0] * count,
    )
    token, slope = evaluate(name, given)
    assert torch.isfinite(token.value).all() and torch.isfinite(slope).all()


@EVERY
@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-3, 3)), min_size=1, max_size=8))
@settings(max_examples=10, deadline=None)
def test_on_policy_every_ratio_is_one(name: str, tokens: list[tuple[float, float]]) -> None:
    """pi = prox = mu = reference, weight 1, nothing chosen: the plain policy gradient −A."""
    logp, advantage = zip(*tokens, strict=True)
    prepared = [PREPARED.get(name, 0.0)] * len(logp)
    given = loss_input(logp, reference=logp, advantage=advantage, prepared=prepared)
    _, slope = evaluate(name, given)
    expected = [0.0] * len(logp) if name == "tba" else [-a for a in advantage]
    assert slope.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
