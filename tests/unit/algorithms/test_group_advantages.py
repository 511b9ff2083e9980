from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import AdvantageInput, advantages
from asyncrl.errors import ConfigError
from asyncrl.types import EpisodeResult

NONE = np.zeros(0)
NAMES = ["dr_grpo", "grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "gdpo"]
PARTS = st.lists(
    st.tuples(st.floats(-10, 10), st.floats(-10, 10), st.integers(1, 50)), min_size=2, max_size=12
)


def group(
    rewards: Sequence[float], tokens: Sequence[int] = (), **parts: Sequence[float]
) -> list[EpisodeResult]:
    """Their reward as the only component unless others are given."""
    parts = parts or {"all": rewards}
    tokens = tokens or [1] * len(rewards)
    return [
        EpisodeResult(float(reward), tokens[i], components={name: part[i] for name, part in parts.items()})
        for i, reward in enumerate(rewards)
    ]


def of(name: str, own: EpisodeResult, siblings: Sequence[EpisodeResult], **options: object) -> float:
    place = next((at for at, sibling in enumerate(siblings) if sibling is own), -1)
    issued = len(siblings) + (place < 0)
    given = AdvantageInput(own, siblings, NONE, NONE, issued, place)
    value = advantages.get(name).bound(options, "$").of(given)
    assert isinstance(value, float)
    return value


# rewards 1, 0, 0, 1, 1: mean 0.6, sum of squared deviations 1.2, ddof-1 std √0.3; Σ tokens 10, Σ T·R 5
FIVE = group([1, 0, 0, 1, 1], tokens=[1, 2, 3, 1, 3])
# 0.2, 1, 0.7: Σ (R − 19/30)² = 0.18778 + 0.13444 + 0.00444 = 0.98/3, ddof-1 std √(0.49/3)
THREE = group([0.2, 1.0, 0.7])
# each component: mean 1/3 or 2/3, ddof-1 std 1/√3, so ±2/√3 for the odd one and ∓1/√3 for the others
PARTED = group([0, 0, 0], right=[1, 0, 0], brief=[0, 1, 1])


@pytest.mark.parametrize(
    ("name", "options", "siblings", "wanted"),
    [
        ("dr_grpo", {}, FIVE, [0.4, -0.6, -0.6, 0.4, 0.4]),
        ("grpo", {}, FIVE, [x / (math.sqrt(0.3) + 1e-6) for x in (0.4, -0.6, -0.6, 0.4, 0.4)]),
        ("rloo", {}, FIVE, [0.5, -0.75, -0.75, 0.5, 0.5]),  # a 1 leaves 0, 0, 1, 1; a 0 leaves 1, 0, 1, 1
        ("reinforce_pp_baseline", {}, FIVE, [0.4, -0.6, -0.6, 0.4, 0.4]),
        ("opo", {}, FIVE, [0.5, -0.5, -0.5, 0.5, 0.5]),
        ("opo", {}, group([1, 0], tokens=[1, 3]), [0.75, -0.25]),
        ("gpg", {}, FIVE, [0.4, -0.6, -0.6, 0.4, 0.4]),
        ("gpg", {"f_norm": 0.5}, FIVE, [0.8, -1.2, -1.2, 0.8, 0.8]),
        ("pass_at_k", {}, THREE, [0, 0.3, 0]),
        ("pass_at_k", {"divide_by_std": True}, THREE, [0, 0.3 / (math.sqrt(0.49 / 3) + 1e-6), 0]),
        ("pass_at_k", {}, FIVE, [0, 0, 0, 0, 0]),  # ties
        ("gdpo", {}, PARTED, [0, 0, 0]),
        ("gdpo", {"weights": "right:2, brief:-0.5"}, PARTED, [5 / 3**0.5, -2.5 / 3**0.5, -2.5 / 3**0.5]),
        ("gdpo", {"weights": "brief:3"}, PARTED, [-6 / 3**0.5, 3 / 3**0.5, 3 / 3**0.5]),
    ],
)
def test_by_hand(
    name: str, options: dict[str, object], siblings: list[EpisodeResult], wanted: list[float]
) -> None:
    computed_advantages = [of(name, own, siblings, **options) for own in siblings]
    # gdpo's numbers are written without its 1e-6
    assert computed_advantages == pytest.approx(wanted, rel=1e-5 if name == "gdpo" else 1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_singleton_gets_zero_not_its_reward(name: str) -> None:
    one = group([7.0])
    assert of(name, one[0], one) == 0.0
    assert of(name, one[0], []) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_get_exactly_zero(name: str) -> None:
    """Exactly: whether an advantage is 0 is counted."""
    for reward in (0.1, 1 / 3, 1e8, -7.7):
        same = group([reward] * 7, tokens=[1, 2, 3, 4, 5, 6, 7])
        assert [of(name, own, same) for own in same] == [0.0] * 7


def reference(name: str, i: int, rewards: list[float], tokens: list[int]) -> float:
    """Once more, by the book."""
    others = rewards[:i] + rewards[i + 1 :]
    if name in ("grpo", "gdpo"):
        return (rewards[i] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
    if name == "rloo":
        return rewards[i] - statistics.fmean(others)
    if name == "opo_loo":
        without = tokens[:i] + tokens[i + 1 :]
        return rewards[i] - sum(t * r for t, r in zip(without, others, strict=True)) / sum(without)
    if name == "opo":
        return rewards[i] - sum(t * r for t, r in zip(tokens, rewards, strict=True)) / sum(tokens)
    if name == "pass_at_k":
        second, best = sorted(rewards)[-2:]
        return best - second if rewards[i] == best else 0.0
    return rewards[i] - statistics.fmean(rewards)


@settings(max_examples=40, deadline=None)
@given(PARTS, st.sampled_from(NAMES))
def test_against_a_plain_reference(parts: list[tuple[float, float, int]], name: str) -> None:
    rewards = [reward for reward, _, _ in parts]
    tokens = [count for _, _, count in parts]
    siblings = group(rewards, tokens)
    for i, own in enumerate(siblings):
        # a std of rounding errors alone is nobody's definition
        close = {"rel": 1e-9, "abs": 1e-9} if statistics.stdev(rewards) > 1e-3 else {"rel": 1e-6, "abs": 1e-6}
        assert of(name, own, siblings) == pytest.approx(reference(name, i, rewards, tokens), **close)


@settings(max_examples=40, deadline=None)
@given(PARTS, st.sampled_from(NAMES), st.integers(-8, 8), st.randoms(use_true_random=False))
def test_neither_order_nor_a_common_shift_matters(
    parts: list[tuple[float, float, int]], name: str, shift: int, random: object
) -> None:
    """Rewards on a grid of 1/64: shifting them is exact."""
    one, two = ([round(part[k] * 64) / 64 for part in parts] for k in (0, 1))
    tokens = [part[2] for part in parts]
    before = group(one, tokens, a=one, b=two)
    moved = group([r + shift for r in one], tokens, a=[r + shift for r in one], b=[r - shift for r in two])
    shuffled = list(moved)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for own, other in zip(before, moved, strict=True):
        assert of(name, other, shuffled) == pytest.approx(of(name, own, before), rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(PARTS, st.sampled_from(["dr_grpo", "grpo", "rloo", "gpg", "gdpo"]))
def test_advantages_of_a_whole_group_sum_to_zero(parts: list[tuple[float, float, int]], name: str) -> None:
    siblings = group([reward for reward, _, _ in parts])
    assert sum(of(name, own, siblings) for own in siblings) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("own", "siblings", "wanted"), [(1.0, [0.0, 0.0, 1.0], 2 / 3), (1.0, [0.25], 0.75), (0.0, [1, 1], -1)]
)
def test_a_late_member_is_compared_with_all_that_landed(
    own: float, siblings: list[float], wanted: float
) -> None:
    """Not inside the baseline: the plain mean, without n/(n − 1)."""
    late = EpisodeResult(own)
    assert of("rloo", late, group(siblings)) == pytest.approx(wanted)


def test_dr_grpo_counts_the_members_that_were_issued() -> None:
    """Of 8, 3 have landed: those in time and those late get 7/8 of the difference from the others."""
    own = EpisodeResult(1.0)
    siblings = group([1.0, 0.0, 0.5])
    late = AdvantageInput(own, siblings, NONE, NONE, issued=8)
    in_time = AdvantageInput(siblings[0], siblings, NONE, NONE, issued=8, position=0)
    assert advantages.get("dr_grpo").of(late) == pytest.approx(7 / 8 * 0.5)
    assert advantages.get("dr_grpo").of(in_time) == pytest.approx(7 / 8 * 0.75)


def test_components_that_are_not_reported_are_named() -> None:
    none = [EpisodeResult(1.0), EpisodeResult(0.0)]
    with pytest.raises(
        ConfigError, match=r"components \(any\), but an episode has none; the reward function"
    ):
        of("gdpo", none[0], none)
    with pytest.raises(
        ConfigError, match="needs the reward components brief, tone, but an episode has brief, right"
    ):
        of("gdpo", PARTED[0], PARTED, weights="brief:1,tone:1")
    torn = [*PARTED, EpisodeResult(0.0, components={"right": 1.0})]
    with pytest.raises(
        ConfigError, match="needs the reward components brief, right, but an episode has right"
    ):
        of("gdpo", PARTED[0], torn)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpg", {"f_norm": 0}),
        ("gdpo", {"weights": "right=2"}),
        ("gdpo", {"weights": "a:1,"}),
        ("rloo", {"a": 1}),
    ],
)
def test_options_are_checked_before_anything_starts(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.advantage[.:]"):
        advantages.get(name).bound(options, "algorithm.advantage")


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean dr_grpo"):
        advantages.get("dr_gpro")


def test_what_each_declares() -> None:
    """Name → batch scale, and what must be there."""
    found = {}
    for name in advantages:
        a = advantages.get(name)
        needs = [n for n in ("siblings", "critic", "greedy", "whole_group") if getattr(a, n)]
        found[name] = (a.scale, *needs)
    assert found == {
        "constant": ("none",),
        "dr_grpo": ("none", "siblings"),
        "gae": ("whiten", "critic"),
        "gdpo": ("whiten", "siblings"),
        "gpg": ("nonzero", "siblings"),
        "grpo": ("none", "siblings"),
        "grpo_turn": ("none", "siblings"),
        "opo": ("none", "siblings"),
        "opo_loo": ("none", "siblings"),
        "optimal_token_baseline": ("none", "siblings", "whole_group"),
        "pass_at_k": ("none", "siblings"),
        "reinforce_pp": ("whiten",),
        "reinforce_pp_baseline": ("whiten", "siblings"),
        "remax": ("none", "greedy"),
        "rloo": ("none", "siblings"),
    }
