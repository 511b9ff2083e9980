"""The test of samples by their surprisal: honest samplers pass, and others are named after a few probes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.algorithms.surprisal import SCALE, SurprisalTest

CONTEXTS = 64
VOCABULARY = 50
PROBE_TOKENS = 1024
SPREADS = [0.3, 1.5, 3.0, 8.0]  # of the logits: from nearly flat to peaked


def distributions(spread: float, rng: np.random.Generator) -> np.ndarray:
    """Log-probs [CONTEXTS, VOCABULARY] of random logits."""
    logits = spread * rng.standard_normal((CONTEXTS, VOCABULARY))
    return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def at_temperature(logprobs: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp(logprobs / temperature)
    return np.asarray(weights / weights.sum(1, keepdims=True))


def nucleus(logprobs: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-logprobs, axis=1)
    sorted_probabilities = np.take_along_axis(np.exp(logprobs), order, 1)
    sorted_probabilities[sorted_probabilities.cumsum(1) - sorted_probabilities >= top_p] = 0
    probabilities = np.zeros_like(logprobs)
    np.put_along_axis(probabilities, order, sorted_probabilities, 1)
    return np.asarray(probabilities / probabilities.sum(1, keepdims=True))


def add_probe(
    test: SurprisalTest, logprobs: np.ndarray, sampled: np.ndarray, tokens: int, rng: np.random.Generator
) -> None:
    """Draw tokens from `sampled` [CONTEXTS, VOCABULARY], and score them with `logprobs`."""
    contexts = rng.integers(CONTEXTS, size=tokens)
    ids = (sampled.cumsum(1)[contexts] < rng.random(tokens)[:, None]).sum(1).clip(max=VOCABULARY - 1)
    entropy = -(np.exp(logprobs) * logprobs).sum(1)[contexts]
    second_moment = (np.exp(logprobs) * logprobs**2).sum(1)[contexts]
    deviations = -logprobs[contexts, ids] - entropy
    test.add(
        tokens=tokens,
        deviation=float(deviations.sum()),
        squares=float((deviations**2).sum()),
        variance=float((second_moment - entropy**2).sum()),
    )


def first_alarm(logprobs: np.ndarray, sampled: np.ndarray, rng: np.random.Generator, probes: int) -> float:
    """The number of the first probe after which the test has failed; inf if there is none."""
    test = SurprisalTest(alarm_rate=1e-5)
    for probe in range(1, probes + 1):
        add_probe(test, logprobs, sampled, PROBE_TOKENS, rng)
        if test.has_failed(rounding=0.0):
            return probe
    return math.inf


def test_the_inequality_behind_the_bound() -> None:
    x = np.linspace(-40, 40, 400_001)
    assert (np.exp(x - x**2 / 6) <= 1 + x + x**2 / 3 + 1e-12).all()


@pytest.mark.parametrize("spread", SPREADS)
def test_honest_samplers_fail_as_rarely_as_promised(spread: float) -> None:
    """200 runs of 20 looks at an alarm rate of 5%: 10 alarms are expected at most; 27 or more have a chance
    below 1e-5 (binomial)."""
    rng = np.random.default_rng(int(10 * spread))
    alarms = 0
    for _ in range(200):
        logprobs = distributions(spread, rng)
        test = SurprisalTest(alarm_rate=0.05)
        failures = 0
        for _ in range(20):
            add_probe(test, logprobs, np.exp(logprobs), 64, rng)
            failures += test.has_failed(rounding=0.0)
        alarms += failures > 0
    assert alarms < 27
    assert math.isfinite(test.z)


@pytest.mark.parametrize(
    ("spread", "probes_needed"),
    [
        (0.3, {"top_p": 5, "temperature": 30}),  # nearly flat: the surprisal hardly varies
        (1.5, {"top_p": 5, "temperature": 5}),
        (3.0, {"top_p": 5, "temperature": 5}),
        (8.0, {"top_p": 5, "temperature": 8}),
    ],
)
def test_other_samplers_are_named(spread: float, probes_needed: dict[str, int]) -> None:
    rng = np.random.default_rng(int(10 * spread))
    logprobs = distributions(spread, rng)
    assert first_alarm(logprobs, np.exp(logprobs), rng, probes=50) == math.inf  # chance below 1e-5

    for top_p in (0.8, 0.9, 0.95):
        assert first_alarm(logprobs, nucleus(logprobs, top_p), rng, probes_needed["top_p"]) < math.inf
    for temperature in (0.7, 0.8, 0.9, 1.2):
        sampled = at_temperature(logprobs, temperature)
        assert first_alarm(logprobs, sampled, rng, probes_needed["temperature"]) < math.inf


def test_rounding_does_not_name_an_engine() -> None:
    """An engine's logits are off by 0.05 nats in every context, in the worst way: towards likely tokens."""
    rng = np.random.default_rng(0)
    logprobs = distributions(1.5, rng)
    entropy = -(np.exp(logprobs) * logprobs).sum(1, keepdims=True)
    deviation = logprobs + entropy
    error = 0.05 * deviation / np.sqrt((np.exp(logprobs) * deviation**2).sum(1, keepdims=True))
    sampled = np.exp(logprobs + error) / np.exp(logprobs + error).sum(1, keepdims=True)

    test = SurprisalTest(alarm_rate=1e-5)
    for _ in range(200):
        add_probe(test, logprobs, sampled, PROBE_TOKENS, rng)
        assert not test.has_failed(rounding=0.06)
    assert test.has_failed(rounding=0.0) and test.z < -10


def test_the_limit_by_hand() -> None:
    test = SurprisalTest(alarm_rate=1e-5)
    assert (test.z, test.limit) == (0.0, pytest.approx(math.sqrt(SCALE * 2 * math.log(1e5))))
    test.add(tokens=1024, deviation=-192.0, squares=1024.0, variance=1024.0)
    assert test.limit == pytest.approx(191.8, abs=0.05) and test.z == pytest.approx(-192.0 / 32)
    assert test.has_failed(rounding=0.0) and not test.has_failed(rounding=0.001)
    assert test.rounding_allowance(0.1) == pytest.approx(102.4)
    test.add(tokens=1, deviation=math.nan, squares=1.0, variance=1.0)
    assert test.has_failed(rounding=1.0)
