from __future__ import annotations

from collections import Counter
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.credit import Scale
from asyncrl.algorithms.normalise import AdvantageSums, Whitening, end_factor

BATCH = st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=8)


def arrays(batch: list[list[float]]) -> list[np.ndarray]:
    return [np.array(episode, dtype=np.float64) for episode in batch]


def sums(*episodes: list[float]) -> AdvantageSums:
    return AdvantageSums.of(arrays(list(episodes)))


def test_sums_by_hand() -> None:
    """An episode without model tokens does not count; one whose tokens add up to 0 is not zero."""
    found = sums([1, 1, 4], [-2], [0, 0], [], [3, -3])
    assert found == AdvantageSums(
        tokens=8, token_sum=4, token_squares=40, episodes=4, episode_sum=0, episode_squares=8, nonzero=3
    )
    assert AdvantageSums.of([]) == AdvantageSums.from_totals({}) == AdvantageSums()


@settings(max_examples=40, deadline=None)
@given(BATCH, st.data())
def test_any_cut_of_a_batch_gives_the_same(batch: list[list[float]], data: st.DataObject) -> None:
    """Micro-batches and ranks tally their parts; what is divided by is that of the whole."""
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    totals: Counter[str] = Counter({"other": 1.0})
    for part in range(4):
        mine = [episode for episode, where in zip(batch, part_of, strict=True) if where == part]
        for name, value in sums(*mine).totals().items():
            totals[name] += value
    added, whole = AdvantageSums.from_totals(totals), sums(*batch)
    assert added.totals() == pytest.approx(whole.totals(), rel=1e-12, abs=1e-12)
    assert all(name.startswith("_") for name in whole.totals())  # no metric


@settings(max_examples=40, deadline=None)
@given(BATCH)
def test_deviations_have_one_degree_of_freedom_less(batch: list[list[float]]) -> None:
    filled = [episode for episode in batch if episode]
    for found, values in (
        (sums(*batch).token_std, [value for episode in filled for value in episode]),
        (sums(*batch).episode_std, [np.mean(episode) for episode in filled]),
    ):
        wanted = np.std(values, ddof=1) if len(values) > 1 else 0.0
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-5)


# tokens 1, 1, −2, 0; episodes 1, −2, 0: mean −1/3, squares 16/9 + 25/9 + 1/9 = 42/9, /2
MIXED = sums([1, 1], [-2], [0])


@pytest.mark.parametrize(
    ("scale", "given", "wanted"),
    [
        ("none", MIXED, 1),
        ("whiten", MIXED, 1),
        ("whiten_running", MIXED, 1),
        ("batch_std", MIXED, 1 / (sqrt(7 / 3) + 1e-6)),
        ("nonzero", MIXED, 3 / 2),
        ("batch_std", sums([0], [0]), 1),  # nothing differs: not 1e6
        ("batch_std", sums([0.1], [0.1], [0.1]), 1),
        ("batch_std", sums(*[[12345.678]] * 7), 1),  # the sums alone would say a std of 2e-4
        ("batch_std", sums([5.0]), 1),
        ("nonzero", sums([0], [0]), 1),
        ("nonzero", AdvantageSums(), 1),
        ("batch_std", AdvantageSums(), 1),
    ],
)
def test_end_factors_by_hand(scale: Scale, given: AdvantageSums, wanted: float) -> None:
    assert end_factor(scale, given) == pytest.approx(wanted, rel=1e-12)


def test_whitening_by_hand() -> None:
    """1, 1, −2, 0: mean 0, squares 6, /3."""
    found = Whitening.of(MIXED).apply(np.array([1.0, 1.0, -2.0, 0.0]))
    assert found.tolist() == pytest.approx([x / (sqrt(2) + 1e-6) for x in (1, 1, -2, 0)], rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(BATCH)
def test_whitened_tokens_have_mean_zero_and_deviation_one(batch: list[list[float]]) -> None:
    values = np.concatenate(arrays(batch))
    whitened = Whitening.of(sums(*batch)).apply(values)
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    if spread > 0.01:
        assert whitened.mean() == pytest.approx(0, abs=1e-9)
        assert np.std(whitened, ddof=1) == pytest.approx(1, rel=1e-3)
    elif spread == 0:
        assert whitened.tolist() == pytest.approx([0] * len(values), abs=1e-7)


def test_running_statistics_are_those_of_a_mixture() -> None:
    """0.9·(0, 1) and 0.1·(2, 3²): mean 0.2, variance 0.9·(1 + 0.04) + 0.1·(9 + 3.24) = 2.16."""
    batch = sums([2 + 3 / sqrt(2), 2 - 3 / sqrt(2)])
    assert Whitening.updated(None, batch) == Whitening.of(batch)
    found = Whitening.updated(Whitening(0.0, 1.0), batch)
    assert (found.mean, found.std) == pytest.approx((0.2, sqrt(2.16)), rel=1e-9)


@pytest.mark.parametrize("batch", [AdvantageSums(), sums([0, 0], [0]), sums([0.3], [0.3]), sums([7])])
def test_a_batch_without_spread_changes_nothing(batch: AdvantageSums) -> None:
    """Or the next batch would be divided by 1e-6. Statistics that are not known are no state."""
    known = Whitening(0.25, 2.0)
    assert Whitening.updated(known, batch) == known
    unknown = Whitening.updated(None, batch)
    assert unknown.state() == {} and Whitening.from_state({"kl_coef": 1.0} | unknown.state()) is None


def test_statistics_come_back_from_a_checkpoint() -> None:
    known = Whitening(0.25, 2.0)
    assert Whitening.from_state({"kl_coef": 1.0} | known.state()) == known
