"""What losses say of each token in view of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.batch_losses import highest_covariance, partition_gap, within_second_moment
from asyncrl.algorithms.credit import Trace
from tests.fakes.losses import trace

STALE = 99.0  # of a token that is not trainable: it must not be looked at


def flat(said: Sequence[np.ndarray]) -> list[float]:
    return np.concatenate(said).tolist()


# squared log-ratios, tau → which stay
@pytest.mark.parametrize(
    ("squares", "tau", "kept"),
    [
        ([0.0, 0.01, 0.04, 0.09, 0.16], 0.04, [1, 1, 1, 1, 0]),  # means 0, 0.005, 0.0167, 0.035, 0.06
        ([0.16, 0.0, 0.09, 0.04, 0.01], 0.04, [0, 1, 1, 1, 1]),
        ([0.0, 0.01, 0.04, 0.09, 0.16], 0.1, [1, 1, 1, 1, 1]),
        ([0.25, 0.25, 0.25], 0.25, [0, 0, 0]),  # the mean must be below
        ([0.25, 0.25, 0.25], 0.26, [1, 1, 1]),
        (
            [0.0, 0.25, 0.25],
            0.13,
            [1, 0, 0],
        ),  # one of the two could stay (0.125): equal ones share their fate
        ([0.04], 0.01, [0]),
    ],
)
def test_second_moment_by_hand(squares: list[float], tau: float, kept: list[int]) -> None:
    signs = [(-1) ** i for i in range(len(squares))]
    mu = [s * math.sqrt(x) for s, x in zip(signs, squares, strict=True)]
    traces = [trace([0.0] * len(mu), mu), trace([STALE], [0.0], trainable=[False])]
    assert flat(within_second_moment(traces, tau=tau)) == [*kept, 0]


# A, log prox, share → chosen; means 0 and -2: products (A·(log prox + 2))
@pytest.mark.parametrize(
    ("advantage", "prox", "share", "chosen"),
    [
        ([1, -1, 1, -1], [-1, -1, -3, -3], 0.25, [0, 0, 0, 0]),  # 1, -1, -1, 1: two equal, one allowed
        ([1, -1, 1, -1], [-1, -1, -3, -3], 0.5, [1, 0, 0, 1]),
        ([3, -1, -1, -1], [-0.5, -2.5, -2.5, -2.5], 0.01, [1, 0, 0, 0]),  # 4.5, 0.5 …: at least one
        ([1, 1, 1, 1], [-1, -2, -2, -3], 0.25, [0, 0, 0, 0]),  # all equal
        ([1], [-2], 0.9, [0]),
    ],
)
def test_covariance_by_hand(
    advantage: list[float], prox: list[float], share: float, chosen: list[int]
) -> None:
    traces = [
        trace(prox[:1], advantage=advantage[:1]),
        trace(
            [STALE, *prox[1:]],
            advantage=[STALE, *advantage[1:]],
            trainable=[False] + [True] * (len(prox) - 1),
        ),
    ]
    said = flat(highest_covariance(traces, share=share))
    assert said == [chosen[0], 0, *chosen[1:]]


def test_the_partition_is_estimated_by_group() -> None:
    """β = 0.5. Group a: −1 + 2 and 2 + 0, log Ẑ = 1.5; a stale token counts nothing, nor does an episode of
    them. Group b, alone: log Ẑ is its own gap, so that there is nothing to learn."""
    traces = [
        trace([-1.0, -2.0], reference=[-2.0, -2.0], group="a", reward=1.0),
        trace([-3.0, STALE], reference=[-1.0, 0.0], group="a", reward=0.0, trainable=[True, False]),
        trace([STALE], reference=[0.0], group="a", reward=1.0, trainable=[False]),
        trace([-1.0], reference=[-1.5], group="b", reward=3.0),
    ]
    said = partition_gap(traces, beta=0.5)
    assert [x.tolist() for x in said] == [[-0.5, -0.5], [1.5, 1.5], [-0.5], [-0.5]]


PREPARES: dict[str, Callable[[Sequence[Trace]], list[np.ndarray]]] = {
    "covariance": lambda traces: highest_covariance(traces, share=0.2),
    "second moment": lambda traces: within_second_moment(traces, tau=0.3),
    "partition": lambda traces: partition_gap(traces, beta=0.1),
}


@pytest.mark.parametrize("prepare", PREPARES.values(), ids=PREPARES)
@given(seed=st.integers(0, 10_000), episodes=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_no_order_of_the_batch_matters(
    prepare: Callable[[Sequence[Trace]], list[np.ndarray]], seed: int, episodes: int
) -> None:
    """Bit for bit: ranks hand in their episodes in any order."""
    rng = np.random.default_rng(seed)
    traces = []
    for i in range(episodes):
        size = int(rng.integers(0, 6))
        # Few distinct values: many ties.
        prox, mu, advantage, reference = (rng.integers(-4, 4, size=size) * 0.3 for _ in range(4))
        traces.append(
            trace(
                prox,
                mu,
                advantage,
                reference=reference,
                trainable=rng.random(size) < 0.8,
                group=f"g{i % 3}",
                reward=0.3 * i,
            )
        )
    order = rng.permutation(episodes)
    said = prepare(traces)
    shuffled = prepare([traces[i] for i in order])
    assert [x.shape for x in said] == [t.prox.shape for t in traces]
    assert all(np.array_equal(said[i], x) for i, x in zip(order, shuffled, strict=True))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.floats(0.01, 2))
@settings(max_examples=50)
def test_the_second_moment_of_what_stays_is_below_tau(ratios: list[float], tau: float) -> None:
    said = flat(within_second_moment([trace([0.0] * len(ratios), ratios)], tau=tau))
    kept = [x**2 for x, stays in zip(ratios, said, strict=True) if stays]
    gone = [x**2 for x, stays in zip(ratios, said, strict=True) if not stays]
    assert not kept or sum(kept) / len(kept) < tau
    if gone:
        assert not kept or max(kept) < min(gone)
        one_more = kept + [x for x in gone if x == min(gone)]
        assert sum(one_more) / len(one_more) >= tau * (1 - 1e-9)


def test_a_batch_without_a_fresh_token() -> None:
    traces = [trace([STALE], reference=[0.0], trainable=[False])]
    for prepare in PREPARES.values():
        assert len(prepare(traces)) == 1 and np.isfinite(prepare(traces)[0]).all()
        assert prepare([]) == []
