from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.aggregation import aggregations
from asyncrl.errors import ProtocolError

groups = st.lists(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=4))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def streamed(rule: str, batch: list[list[list[float]]]) -> float:
    """Σ w·l / D, episode by episode, as the trainer does."""
    total = denominator = 0.0
    for group in batch:
        for episode in group:
            share = aggregations.get(rule)(len(episode), sum(map(len, group)))
            total += share.weight * sum(episode)
            denominator += share.denominator
    return total / denominator


@given(groups.filter(bool))
def test_shares_add_up_to_the_means_they_are_named_after(batch: list[list[list[float]]]) -> None:
    episodes = [episode for group in batch for episode in group]
    tokens = [loss for episode in episodes for loss in episode]
    wanted = {
        "token_mean": mean(tokens),
        "seq_mean_token_mean": mean([mean(episode) for episode in episodes]),
        "prompt_mean": mean([mean([loss for episode in group for loss in episode]) for group in batch]),
    }
    for rule, value in wanted.items():
        assert streamed(rule, batch) == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_an_episode_without_model_tokens_weighs_nothing() -> None:
    assert aggregations.get("token_mean")(0, 0).denominator == 0
    assert aggregations.get("prompt_mean")(0, 0).denominator == 0
    assert aggregations.get("seq_mean_token_mean")(0, 0).denominator == 1  # it is still one episode


def test_a_group_smaller_than_its_member_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot hold"):
        aggregations.get("prompt_mean")(5, 4)
