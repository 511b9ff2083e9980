from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.credit import Scale
from asyncrl.algorithms.normalise import Moments, Whitening, end_factor

NUMBERS = st.lists(st.floats(-5, 5), max_size=20)


def moments(*values: float) -> Moments:
    return Moments.of(np.array(values, dtype=np.float64))


def test_moments_by_hand() -> None:
    assert moments(1, 1, 4) == Moments(3, 2, 6)
    assert moments() == moments() + moments() == Moments()
    assert moments(1, 3) + moments(5, 7) == moments(1, 3, 5, 7) == Moments(4, 4, 20)


@settings(max_examples=40, deadline=None)
@given(NUMBERS, st.lists(st.integers(0, 20), max_size=3), st.sampled_from([0.0, 1e5]))
def test_any_cut_of_a_batch_gives_the_same(values: list[float], cuts: list[int], offset: float) -> None:
    """Micro-batches and ranks tell of their parts; what is divided by is that of the whole. A mean of 1e5
    costs nothing: sums of squares would be off by 1e-5."""
    shifted = np.array(values, dtype=np.float64) + offset
    parts = np.split(shifted, sorted(cuts))
    added = sum((Moments.of(part) for part in parts), Moments())
    assert added.count == len(values)
    if values:
        assert added.mean == pytest.approx(shifted.mean(), rel=1e-12, abs=1e-12)
        assert added.spread == pytest.approx(((shifted - shifted.mean()) ** 2).sum(), rel=1e-6, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(NUMBERS)
def test_deviations_have_one_degree_of_freedom_less(values: list[float]) -> None:
    wanted = np.std(values, ddof=1) if len(values) > 1 else 0.0
    assert moments(*values).std == pytest.approx(wanted, rel=1e-9, abs=1e-5)


EPISODES = moments(1, -2, 0)  # mean −1/3, squares 16/9 + 25/9 + 1/9 = 42/9, /2


@pytest.mark.parametrize(
    ("scale", "episodes", "varied", "wanted"),
    [
        ("none", EPISODES, 2, 1),
        ("whiten", EPISODES, 2, 1),
        ("whiten_running", EPISODES, 2, 1),
        ("batch_std", EPISODES, 2, 1 / (sqrt(7 / 3) + 1e-6)),
        ("nonzero", EPISODES, 2, 3 / 2),
        ("nonzero", EPISODES, 3, 1),  # one of them is 0, yet its group taught something
        ("batch_std", moments(0, 0), 0, 1),  # nothing differs: not 1e6
        ("batch_std", moments(0.1, 0.1, 0.1), 0, 1),
        ("batch_std", moments(*[12345.678] * 7), 0, 1),  # sums of squares would say a std of 2e-4
        ("batch_std", moments(5.0), 0, 1),
        ("nonzero", moments(0, 0), 0, 1),
        ("nonzero", Moments(), 0, 1),
        ("batch_std", Moments(), 0, 1),
    ],
)
def test_end_factors_by_hand(scale: Scale, episodes: Moments, varied: float, wanted: float) -> None:
    assert end_factor(scale, episodes, varied) == pytest.approx(wanted, rel=1e-12)


def test_whitening_by_hand() -> None:
    """1, 1, −2, 0: mean 0, squares 6, /3."""
    whitening = Whitening.of(moments(1, 1, -2, 0)).apply(np.array([1.0, 1.0, -2.0, 0.0]))
    assert whitening.tolist() == pytest.approx([x / (sqrt(2) + 1e-6) for x in (1, 1, -2, 0)], rel=1e-12)


@pytest.mark.parametrize(
    ("noise", "wanted"),
    [(5e-5, 0.0), (5e-4, 1.0)],  # of 100: a share of 5e-7 is rounding of rewards, 5e-6 is not
)
def test_nearly_equal_advantages_do_not_explode(noise: float, wanted: float) -> None:
    """Not (A − mean)/1e-6, where the spread is within rounding."""
    values = 100 + noise * np.random.default_rng(0).standard_normal(1000)
    whitened = Whitening.of(Moments.of(values)).apply(values)
    assert np.std(whitened, ddof=1) == pytest.approx(wanted, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_whitened_tokens_have_mean_zero_and_deviation_one(values: list[float]) -> None:
    whitened = Whitening.of(moments(*values)).apply(np.array(values))
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    if spread > 0.01:
        assert whitened.mean() == pytest.approx(0, abs=1e-9)
        assert np.std(whitened, ddof=1) == pytest.approx(1, rel=1e-3)
    elif spread == 0:
        assert whitened.tolist() == [0] * len(values)


def test_running_statistics_are_those_of_a_mixture() -> None:
    """0.9·(0, 1) and 0.1·(2, 3²): mean 0.2, variance 0.9·(1 + 0.04) + 0.1·(9 + 3.24) = 2.16."""
    batch = moments(2 + 3 / sqrt(2), 2 - 3 / sqrt(2))
    assert Whitening.updated(None, batch) == Whitening.of(batch)
    whitening = Whitening.updated(Whitening(0.0, 1.0), batch)
    assert (whitening.mean, whitening.std) == pytest.approx((0.2, sqrt(2.16)), rel=1e-9)


@pytest.mark.parametrize("batch", [moments(), moments(0, 0, 0), moments(0.3, 0.3), moments(7)])
def test_a_batch_without_spread_changes_nothing(batch: Moments) -> None:
    """Or the next batch would be divided by 1e-6. Statistics that are not known are no state."""
    known = Whitening(0.25, 2.0)
    assert Whitening.updated(known, batch) == known
    unknown = Whitening.updated(None, batch)
    assert unknown.state() == {} and Whitening.from_state({"kl_coef": 1.0} | unknown.state()) is None


def test_statistics_come_back_from_a_checkpoint() -> None:
    known = Whitening(0.25, 2.0)
    assert Whitening.from_state({"kl_coef": 1.0} | known.state()) == known
