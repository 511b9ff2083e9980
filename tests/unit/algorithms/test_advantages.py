from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import GroupRewards, advantages
from asyncrl.errors import ConfigError

rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)


def of(name: str, reward: float, siblings: tuple[float, ...], self_inside: bool = True) -> float:
    return advantages.get(name)(GroupRewards(reward, siblings, self_inside))


# rewards 1, 0, 0, 1, 1: mean 0.6, sum of squared deviations 1.2, ddof-1 std sqrt(0.3)
GROUP = (1.0, 0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "reward", "wanted"),
    [
        ("dr_grpo", 1.0, 0.4),
        ("dr_grpo", 0.0, -0.6),
        ("grpo", 1.0, 0.4 / (math.sqrt(0.3) + 1e-6)),
        ("grpo", 0.0, -0.6 / (math.sqrt(0.3) + 1e-6)),
        ("rloo", 1.0, 0.5),  # the others: 0, 0, 1, 1
        ("rloo", 0.0, -0.75),  # the others: 1, 0, 1, 1
    ],
)
def test_by_hand(name: str, reward: float, wanted: float) -> None:
    assert of(name, reward, GROUP) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_a_singleton_gets_zero_not_its_reward(name: str) -> None:
    assert of(name, 7.0, (7.0,)) == 0.0
    assert of(name, 7.0, (), self_inside=False) == 0.0


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_equal_rewards_get_zero(name: str) -> None:
    assert of(name, 0.1, (0.1,) * 7) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_a_late_member_is_compared_with_the_siblings_that_landed(name: str) -> None:
    """Not inside the baseline: the plain mean, without n/(n-1)."""
    assert of(name, 1.0, (0.0, 0.0, 1.0), self_inside=False) == pytest.approx(2 / 3)
    assert of(name, 1.0, (0.25,), self_inside=False) == 0.75


@given(rewards)
def test_rloo_is_leave_one_out(group: list[float]) -> None:
    for i, reward in enumerate(group):
        others = group[:i] + group[i + 1 :]
        assert of("rloo", reward, tuple(group)) == pytest.approx(
            reward - sum(others) / len(others), rel=1e-9, abs=1e-9
        )


@given(rewards, st.sampled_from(["dr_grpo", "grpo", "rloo"]))
def test_advantages_of_a_whole_group_sum_to_zero(group: list[float], name: str) -> None:
    assert sum(of(name, reward, tuple(group)) for reward in group) == pytest.approx(0.0, abs=1e-6)


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean dr_grpo"):
        advantages.get("dr_gpro")
