"""Differences of log-probs: of a few tokens and of most, with several adapters, and without a number."""

from __future__ import annotations

import math

import pytest

from asyncrl.weights.manifest import LogprobGaps, Probe

TEXTS = ((1, 2, 3, 4), (5, 6, 7, 8))


def test_one_token_that_differs_changes_the_mean_and_not_the_median() -> None:
    probe = Probe(TEXTS, ((-1.0, -1.0, -1.0), (-1.0, -1.0, -1.0)))
    gaps = probe.compare([(-1.5, -1.5, -1.5), (-1.5, -1.5, -7.0)])
    assert gaps == LogprobGaps(largest=6.0, mean=pytest.approx(8.5 / 6), median=0.5)


@pytest.mark.parametrize("wrong_adapter", [0, 1, 2])
def test_an_adapter_that_is_wrong_is_not_outvoted_by_the_others(wrong_adapter: int) -> None:
    probe = Probe(TEXTS, ((-1.0,) * 9, (-2.0,) * 9))
    logprobs = [list(text_logprobs) for text_logprobs in probe.logprobs]
    for text_logprobs in logprobs:
        for position in range(3 * wrong_adapter, 3 * wrong_adapter + 3):
            text_logprobs[position] -= 0.25
    assert probe.compare(logprobs) == LogprobGaps(largest=0.25, mean=pytest.approx(0.25 / 3), median=0.25)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_prob_that_is_not_finite_is_an_infinite_difference(value: float) -> None:
    probe = Probe(TEXTS, ((-1.0, -1.0, -1.0), (-1.0, -1.0, -1.0)))
    gaps = probe.compare([(-1.0, -1.0, -1.0), (-1.0, value, -1.0)])
    assert gaps == LogprobGaps(math.inf, math.inf, math.inf)
    with pytest.raises(ValueError, match="zip"):
        probe.compare([(-1.0, -1.0, -1.0)])
