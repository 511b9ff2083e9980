"""What every estimator of the gradient is in expectation: exact sums over a three-letter policy, no sampling.

Rows say what theory promises: exact up to a factor, or biased by design and then by how much at most. A new
name needs a row here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import advantages
from asyncrl.algorithms.correction import corrections
from asyncrl.algorithms.normalise import Moments, Whitening, end_factor
from asyncrl.algorithms.recipe import losses
from tests.fakes.enumeration import (
    ENDED,
    FIXED,
    PARTS,
    PI,
    REFERENCE,
    Experiment,
    Language,
    angle,
    error,
    gradient,
    token_logp,
    true_gradient,
)

EXACT = 1e-12
FAR = 1.0  # a behaviour policy whose log-probs differ by 0.66 per token on average; 0.33 <= rho <= 9.6
DEFAULT: dict[str, Any] = {"mask": {}, "truncate": {}}
Rules = Mapping[str, Mapping[str, Any]]


# What learns from rewards of sampled episodes: nothing here is about demonstrations.
REWARDED = [name for name in advantages if name != "constant"]
SAMPLED = [name for name in losses if not losses.get(name).demonstrations]


@dataclass(frozen=True)
class Off:
    """Biased by design: the angle to the truth is at most this, and not 0."""

    most: float


# advantage, options, and the expected gradient with pi = mu, as a factor of the true one, or biased: for
# groups of two of equal lengths, for groups of three of different lengths
ADVANTAGES: list[tuple[str, tuple[tuple[str, Any], ...], float | Off, float | Off]] = [
    ("rloo", (), 1, 1),
    ("dr_grpo", (), 1 / 2, 2 / 3),  # (n-1)/n: the own reward is in the baseline
    ("reinforce_pp_baseline", (), 1 / 2, 2 / 3),
    ("gpg", (), 1 / 2, 2 / 3),
    ("gpg", (("f_norm", 2.0),), 1 / 4, 1 / 3),
    ("opo", (), 1 / 2, Off(0.002)),  # a baseline weighed by lengths depends on the own one
    ("opo_loo", (), 1, 1),
    ("grpo", (), Off(0.004), Off(0.005)),  # the std depends on the own reward
    ("gdpo", (), Off(0.04), Off(0.06)),
    ("pass_at_k", (), 1 / 2, 1 / 3),  # 1/n of the gradient of the best of n
    ("pass_at_k", (("divide_by_std", True),), Off(0.022), Off(0.008)),
    ("grpo_turn", (), 1 / 2, Off(0.0002)),  # who has a second turn decides its factor
    ("grpo_turn", (("std", True),), Off(0.022), Off(0.007)),
    ("reinforce_pp", (), 1, 1),
    ("reinforce_pp", (("turn_gamma", 0.5),), Off(0.2), Off(0.2)),
    ("remax", (), 1, 1),
    ("gae", (), 1, 1),  # lam 1: a baseline, whatever V says
    ("gae", (("lam", 0.5),), Off(0.21), Off(0.23)),  # V is arbitrary here
    ("optimal_token_baseline", (), Off(0.001), Off(0.004)),
]
ROWS = [pytest.param(*row, id="-".join(map(str, [row[0], *dict(row[1]).items()]))) for row in ADVANTAGES]
# Those whose siblings enter by a baseline only: the policy that sampled the siblings does not matter.
BASELINES = [row[:2] for row in ADVANTAGES if isinstance(row[2], float | int) and row[0] != "pass_at_k"]

# rules, share of the uncorrected angle that may be left far off-policy (over all advantages)
CORRECTIONS: list[tuple[Rules, float]] = [
    ({"ratio": {"level": "sequence"}}, 0.05),
    ({"ratio": {"level": "turn"}}, 0.2),
    ({"ratio": {"level": "token"}}, 0.5),
    ({"ratio": {"level": "geometric"}}, 0.62),
    ({"truncate": {"level": "sequence"}}, 0.2),
    ({"truncate": {"level": "turn"}}, 0.25),
    ({"truncate": {"level": "token"}}, 0.4),
    ({"truncate": {"level": "geometric"}}, 0.62),
    (DEFAULT, 0.4),
    ({"mask": {}, "ratio": {}}, 0.5),  # IcePop
    ({"reject_sequence": {"low": 0.7, "high": 1.4}, "truncate": {}}, 0.4),
    ({"reject": {"limit": 0.6}, "truncate": {}}, 0.4),
    ({"veto": {"least": 0.35}, "truncate": {}}, 0.5),
    ({"negative": {}, "truncate": {}}, 0.5),
    ({"truncate": {}, "batch_mean": {}}, 0.7),
]
MASKS: list[Rules] = [
    {"mask": {}},
    {"reject_sequence": {"low": 0.7, "high": 1.4}},
    {"reject": {"limit": 0.6}},
    {"veto": {"least": 0.35}},
    {"negative": {}},
]
ALL_RULES = [*(rules for rules, _ in CORRECTIONS), *MASKS]


def name_of(rules: Rules) -> str:
    return "+".join("-".join([name, *map(str, options.values())]) for name, options in rules.items())


@pytest.mark.parametrize(
    ("kind", "known", "rows"),
    [
        ("advantage", set(REWARDED), {row[0] for row in ADVANTAGES}),
        ("correction", set(corrections), {name for rules in ALL_RULES for name in rules}),
    ],
)
def test_every_name_has_a_row(kind: str, known: set[str], rows: set[str]) -> None:
    assert rows == known, f"{kind}s without a row: {known - rows}; rows of none: {rows - known}"


@pytest.mark.parametrize(("name", "options", "two", "three"), ROWS)
def test_on_policy(name: str, options: Any, two: float | Off, three: float | Off) -> None:
    for language, n, wanted in ((FIXED, 2, two), (ENDED, 3, three)):
        truth = true_gradient(language, best_of=n if name == "pass_at_k" else 1)
        computed_gradient = gradient(Experiment(name, options=options, language=language, n=n))
        if isinstance(wanted, Off):
            assert EXACT < angle(computed_gradient, truth) <= wanted.most
        else:
            assert error(computed_gradient, wanted * truth) < EXACT


def test_groups_of_three_of_all_sequences() -> None:
    """19,683 ordered groups."""
    assert error(gradient(Experiment("rloo", n=3)), true_gradient()) < EXACT
    assert error(gradient(Experiment("dr_grpo", n=3)), 2 / 3 * true_gradient()) < EXACT


@pytest.mark.parametrize("name", [name for name in advantages if advantages.get(name).late])
@pytest.mark.parametrize("n", [2, 3])
def test_late_members_are_unbiased(name: str, n: int) -> None:
    """Landed after the deadline of their group: compared with siblings that do not include them."""
    computed_gradient = gradient(Experiment(name, n=n, language=ENDED, late=True))
    factor = (n - 1) / n if name == "dr_grpo" else 1
    assert error(computed_gradient, factor * true_gradient(ENDED)) < EXACT


# -- scaling by the batch ----------------------------------------------------------------------------


def scaled_by(scale: Any) -> Any:
    """Of one group: all of its episodes count as taught, or none."""

    def scaled(batch: list[np.ndarray]) -> list[np.ndarray]:
        means = Moments.of(np.array([a.mean() for a in batch]))
        varied = len(batch) * any(a.any() for a in batch)
        return [end_factor(scale, means, varied) * a for a in batch]

    return scaled


@pytest.mark.parametrize(
    ("name", "normalise", "wanted"),
    [
        # statistics of earlier batches are constants: nothing but a factor
        ("reinforce_pp", lambda batch: [Whitening(0.4, 2.0).apply(a) for a in batch], 1 / (2 + 1e-6)),
        ("dr_grpo", lambda batch: [Whitening(0.4, 2.0).apply(a) for a in batch], (2 / 3) / (2 + 1e-6)),
        # the batch's own are not: here a batch is as small as can be
        (
            "reinforce_pp",
            lambda batch: [Whitening.of(Moments.of(np.concatenate(batch))).apply(a) for a in batch],
            Off(0.02),
        ),
        ("dr_grpo", scaled_by("batch_std"), Off(0.02)),
        ("gpg", scaled_by("nonzero"), 2 / 3),  # of one group: all or nothing
    ],
    ids=["running", "running-baseline", "whiten", "batch_std", "nonzero"],
)
def test_scaling_by_the_batch(name: str, normalise: Any, wanted: float | Off) -> None:
    computed_gradient = gradient(Experiment(name, n=3, language=ENDED, normalise=normalise))
    truth = true_gradient(ENDED)
    if isinstance(wanted, Off):
        assert EXACT < angle(computed_gradient, truth) <= wanted.most
    else:
        assert error(computed_gradient, wanted * truth) < EXACT


# -- corrections ---------------------------------------------------------------------------------------


@functools.cache
def uncorrected(name: str, mu: float = 0.0) -> torch.Tensor:
    return gradient(Experiment(name, mu=mu))


@pytest.mark.parametrize("name", REWARDED)
def test_corrections_do_nothing_on_policy(name: str) -> None:
    for rules in ALL_RULES:
        assert error(gradient(Experiment(name, rules)), uncorrected(name)) < EXACT, name_of(rules)


@pytest.mark.parametrize("name", REWARDED)
def test_bias_vanishes_with_the_lag(name: str) -> None:
    """In proportion to the distance of mu from pi."""
    for rules in ({}, *ALL_RULES):
        near, nearer = (
            error(gradient(Experiment(name, rules, mu=lag)), uncorrected(name)) for lag in (0.01, 0.001)
        )
        assert near < 0.02 and nearer <= 0.12 * near + EXACT, name_of(rules)


@pytest.mark.parametrize(("name", "options"), BASELINES)
def test_the_ratio_of_whole_episodes_is_unbiased(name: str, options: Any) -> None:
    """At any lag, while it is not truncated."""
    truth = gradient(Experiment(name, options=options))
    high = {"level": "sequence", "positive": 1e9, "negative": 1e9}
    for rules in ({"ratio": {"level": "sequence"}}, {"truncate": high}):
        assert error(gradient(Experiment(name, rules, options=options, mu=FAR)), truth) < EXACT


@pytest.mark.parametrize(("rules", "share"), CORRECTIONS, ids=[name_of(rules) for rules, _ in CORRECTIONS])
def test_weights_reduce_the_bias_far_off_policy(rules: Rules, share: float) -> None:
    for name in REWARDED:
        without = angle(uncorrected(name, FAR), uncorrected(name))
        left = angle(gradient(Experiment(name, rules, mu=FAR)), uncorrected(name))
        assert left <= share * without, name


@pytest.mark.parametrize("weight", ["ratio", "truncate"])
def test_the_more_of_the_context_a_ratio_covers_the_less_bias(weight: str) -> None:
    by_level = [
        angle(gradient(Experiment(rules={weight: {"level": level}}, mu=FAR)), true_gradient())
        for level in ("sequence", "turn", "token")
    ]
    assert by_level == sorted(by_level) and by_level[1] > 0.03


@pytest.mark.parametrize("rules", MASKS, ids=name_of)
def test_a_mask_alone_is_no_correction(rules: Rules) -> None:
    """It acts, and more than half of the bias stays: `compose` wants a weight for stale data."""
    without = gradient(Experiment(mu=FAR))
    computed_gradient = gradient(Experiment(rules=rules, mu=FAR))
    assert error(computed_gradient, without) > 0.01
    assert angle(computed_gradient, true_gradient()) > 0.5 * angle(without, true_gradient())


def documented() -> list[tuple[Rules, float, float]]:
    """The table of docs/background/formulas.md: rules, angle near pi and far from it."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "background" / "formulas.md").read_text()
    rows = []
    for cells in re.findall(r"^\| ([^|]+) \| (\d\.\d{3}) \| (\d\.\d{3}) \|$", text, re.MULTILINE):
        level = dict(re.findall(r"(level)=(\w+)", cells[0]))
        rows.append((dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), level), *map(float, cells[1:])))
    return rows


def test_the_documented_bias() -> None:
    assert len(documented()) == 10
    for rules, near, far in documented():
        for lag, wanted in ((0.3, near), (FAR, far)):
            degrees = angle(gradient(Experiment(rules=rules, mu=lag)), true_gradient())
            assert degrees == pytest.approx(wanted, abs=5.1e-4), (name_of(rules), lag)


# -- losses --------------------------------------------------------------------------------------------

# Losses that contain pi/mu: the share of the uncorrected angle that may be left with pi far from mu; None:
# not meant to be unbiased there. In a vocabulary of three, bounds on changes of probability cut most tokens.
MU_LOSSES: dict[str, float | None] = {
    "cispo_scalerl": 0.4,
    "dppo_tv": None,
    "dppo_kl": None,
    "dro": None,
    "m2po": None,
    "topr": None,
    "tba": None,
}
BIASED_ON_POLICY = {"clip_cov": 0.05}  # drops at least one token of a batch, here of six


def of_kind(ratio: str) -> list[str]:
    return [name for name in SAMPLED if losses.get(name).ratio == ratio]


@pytest.mark.parametrize("name", [name for name in SAMPLED if name != "tba"])
def test_losses_on_policy(name: str) -> None:
    """With pi = prox = mu every loss ascends the true gradient."""
    for language, n in ((FIXED, 2), (ENDED, 3)):
        computed_gradient = gradient(Experiment(loss=name, language=language, n=n))
        truth = true_gradient(language)
        if name in BIASED_ON_POLICY:
            assert EXACT < angle(computed_gradient, truth) <= BIASED_ON_POLICY[name]
        else:
            assert error(computed_gradient, truth) < EXACT


@pytest.mark.parametrize("name", [name for name in losses if losses.get(name).clips])
def test_what_clips_is_reinforce_while_pi_is_prox(name: str) -> None:
    for rules in (DEFAULT, {"truncate": {"level": "geometric"}}):
        wanted = gradient(Experiment(rules=rules, mu=FAR))
        assert error(gradient(Experiment(loss=name, rules=rules, mu=FAR)), wanted) < EXACT


def test_every_loss_that_contains_the_ratio_has_a_row() -> None:
    assert MU_LOSSES.keys() == set(of_kind("mu")), "a loss without a row, or a row without a loss"


@pytest.mark.parametrize("name", [name for name, share in MU_LOSSES.items() if share is not None])
def test_losses_with_their_own_ratio_off_policy(name: str) -> None:
    truth = true_gradient()
    cap = 3.0
    computed_gradient = gradient(Experiment(loss=name, loss_options={"cap": cap}, mu=FAR))
    wanted = gradient(Experiment(rules={"truncate": {"positive": cap, "negative": cap}}, mu=FAR))
    assert error(computed_gradient, wanted) < EXACT, "the same as truncation on reinforce"
    without = angle(gradient(Experiment(mu=FAR)), truth)
    assert angle(computed_gradient, truth) < (MU_LOSSES[name] or 0) * without


@pytest.mark.parametrize(
    ("name", "options"),
    [("m2po", {"tau": 1e9}), ("dppo_tv", {"delta_low": 0.999, "delta_high": 0.999, "cap": 1e9})],
)
def test_bounds_that_never_act_leave_the_plain_ratio(name: str, options: dict[str, float]) -> None:
    wanted = gradient(Experiment(rules={"ratio": {}}, mu=FAR))
    assert error(gradient(Experiment(loss=name, loss_options=options, mu=FAR)), wanted) < EXACT


@pytest.mark.parametrize("n", [2, 3])
def test_trajectory_balance_is_the_gradient_of_the_regularised_objective(n: int) -> None:
    """2/β · ∇(E[R] − β·KL(pi, ref)) on-policy, less the own share in log Z: (n-1)/n of it."""
    beta = 0.8
    computed_gradient = gradient(Experiment(loss="tba", loss_options={"beta": beta}, n=n, language=ENDED))
    wanted = true_gradient(ENDED, beta=beta) * 2 / beta * (n - 1) / n
    assert error(computed_gradient, wanted) < EXACT


# -- the enumeration itself ------------------------------------------------------------------------------


@pytest.mark.parametrize(("language", "sequences"), [(FIXED, 27), (ENDED, 15)])
def test_it_covers_everything_once(language: Language, sequences: int) -> None:
    chance = token_logp(language, REFERENCE).sum(1).exp()
    assert len(language) == sequences and float(chance.sum()) == pytest.approx(1, rel=1e-12)


def test_the_true_gradient_is_that_of_finite_differences() -> None:
    """By a plain recursion over prefixes instead of a sum over sequences."""

    def value(logits: np.ndarray, prefix: int = 0, depth: int = 0, last: int = 0) -> float:
        if depth == 3:
            return 0.0
        p = np.exp(logits[prefix]) / np.exp(logits[prefix]).sum()
        reward = sum(part[prefix].numpy() for part in PARTS.values())
        following = [1 + a if depth == 0 else 4 + 3 * last + a for a in range(3)]
        return float(sum(p[a] * (reward[a] + value(logits, following[a], depth + 1, a)) for a in range(3)))

    base = PI.numpy().copy()
    step = 1e-5
    numeric = np.zeros(base.shape)
    for place in np.ndindex(*base.shape):
        for sign in (1, -1):
            moved = base.copy()
            moved[place] += sign * step
            numeric[place] += sign * value(moved) / (2 * step)
    assert error(torch.from_numpy(numeric).flatten(), true_gradient()) < 1e-8
