from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.aggregation import Aggregation, Share, aggregations
from asyncrl.errors import ConfigError

LENGTH = 8
episode_losses = st.lists(st.floats(-5, 5), min_size=1, max_size=6)
batches = st.lists(st.lists(episode_losses, min_size=1, max_size=4), min_size=1, max_size=4)

# name → (weight, denominator) of an episode of 3 tokens in a group of 12
SHARES = {
    "token_mean": (1.0, 3.0),
    "token_sum": (1.0, 3.0),
    "seq_mean_token_mean": (1 / 3, 1.0),
    "seq_mean_token_sum": (1.0, 1.0),
    "seq_mean_token_sum_norm": (1 / LENGTH, 1.0),
    "prompt_mean": (1 / 12, 0.25),
}


def rule(name: str) -> Aggregation:
    return aggregations.get(name).bound({"length": LENGTH, "other": 1}, "algorithm.aggregation")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def streamed(name: str, batch: list[list[list[float]]], seed: int = 0) -> float:
    """Σ w·l / D, episode by episode in any order, as the trainer does."""
    share = rule(name)
    total = 0.0
    denominators = 0.0
    episodes = [(episode, sum(map(len, group))) for group in batch for episode in group]
    random.Random(seed).shuffle(episodes)
    for episode, group_tokens in episodes:
        weight, denominator = share(len(episode), group_tokens)
        total += weight * sum(episode)
        denominators += denominator
    return total / share.divisor(denominators)


@pytest.mark.parametrize("name", aggregations.names())
def test_shares_by_hand(name: str) -> None:
    assert rule(name)(3, 12) == pytest.approx(SHARES[name])


@settings(max_examples=30, deadline=None)
@given(batches, st.integers(0, 3))
def test_shares_add_up_to_what_they_are_named_after(batch: list[list[list[float]]], seed: int) -> None:
    episodes = [episode for group in batch for episode in group]
    tokens = [loss for episode in episodes for loss in episode]
    wanted = {
        "token_mean": mean(tokens),
        "token_sum": sum(tokens),
        "seq_mean_token_mean": mean([mean(episode) for episode in episodes]),
        "seq_mean_token_sum": mean([sum(episode) for episode in episodes]),
        "seq_mean_token_sum_norm": mean([sum(episode) / LENGTH for episode in episodes]),
        "prompt_mean": mean([mean([loss for episode in group for loss in episode]) for group in batch]),
    }
    assert set(wanted) == set(aggregations.names())
    for name, value in wanted.items():
        assert streamed(name, batch, seed) == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_only_the_sum_is_divided_by_one() -> None:
    assert {name for name in aggregations if rule(name).divisor(7.0) == 1.0} == {"token_sum"}
    assert all(rule(name).divisor(0.0) == 0.0 for name in aggregations)  # nothing came


def test_an_episode_without_model_tokens_weighs_nothing() -> None:
    for name in ("token_mean", "token_sum", "prompt_mean"):
        assert rule(name)(0, 0).denominator == 0
    for name in ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"):
        assert rule(name)(0, 0).denominator == 1  # it is still one episode


@pytest.mark.parametrize("length", [0, None])
def test_the_norm_needs_a_length(length: int | None) -> None:
    facts = {} if length is None else {"length": length}
    with pytest.raises(ConfigError, match=r"x.*length"):
        aggregations.get("seq_mean_token_sum_norm").bound(facts, "x")


def test_a_rule_of_ones_own_is_given_what_it_names() -> None:
    def half(tokens: int, group_tokens: int, *, length: int) -> Share:
        return Share(length / 2, 1.0)

    assert Aggregation(half).bound({"length": 6, "unknown": 1}, "x")(1, 1) == (3.0, 1.0)
