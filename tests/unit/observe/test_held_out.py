"""The numbers of held-out episodes, compared with ones computed by hand and by enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from asyncrl.config import parse
from asyncrl.observe.held_out import (
    HeldOut,
    JudgedEpisode,
    answer_of,
    bootstrap_interval,
    numbers_per_sample,
    pass_at,
    sample_means,
    threshold_of,
)
from asyncrl.types import EpisodeResult


def judged(
    row: int, *scores: float | None, answers: Sequence[str] = (), source: str = "s"
) -> list[JudgedEpisode]:
    """The sampled episodes of a sample; None: one that failed."""
    return [
        JudgedEpisode(
            HeldOut(0, "sampled", row, draw),
            source,
            None if score is None else EpisodeResult(score),
            answer=answers[draw] if answers else "",
        )
        for draw, score in enumerate(scores)
    ]


@pytest.mark.parametrize("uid", ["val0/sampled/7", "val12/greedy/3", "val0/sampled/7/2"])
def test_a_uid_is_read_as_it_was_written(uid: str) -> None:
    assert HeldOut.from_uid(uid).uid == uid


@pytest.mark.parametrize(("count", "solved", "k"), [(5, 2, 2), (5, 0, 3), (4, 4, 1), (6, 5, 2), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_success(count: int, solved: int, k: int) -> None:
    choices = list(itertools.combinations(range(count), k))
    expected = sum(any(number < solved for number in chosen) for chosen in choices) / len(choices)
    assert pass_at(k, count, solved) == pytest.approx(expected, abs=1e-12)


def test_numbers_are_means_over_samples() -> None:
    episodes = judged(0, 1.0, 0.0, 0.0, 1.0, source="a") + judged(1, 0.0, 0.0, 1.0, 0.0, source="b")
    numbers = sample_means(numbers_per_sample(episodes, threshold=1.0))
    core = {name.removeprefix("val-core/all/sampled/"): numbers[name] for name in numbers if "/all/" in name}
    pass_at_2 = ((1 - 1 / 6) + (1 - 3 / 6)) / 2
    assert core == pytest.approx(
        {"success": 3 / 8, "mean@1": 3 / 8, "mean@4": 3 / 8, "pass@2": pass_at_2, "pass@4": 1.0}
    )
    assert numbers["val-core/a/sampled/mean@4"] == 0.5 and numbers["val-core/b/sampled/mean@4"] == 0.25


def test_the_majority_is_of_answers_and_the_earliest_wins_a_tie() -> None:
    episodes = [
        *judged(0, 0.0, 1.0, 1.0, answers="xyy"),
        *judged(1, 1.0, 0.0, 0.0, answers="xyy"),
        *judged(2, 1.0, 0.0, 0.0, answers="xyz"),
        *judged(3, 0.0, 0.0, 1.0, answers=["", "", "z"]),
    ]
    episodes += [*judged(4, 0.0, None, 0.0), *judged(5, 1.0, 1.0, 1.0, source="whose reward reports none")]
    numbers = numbers_per_sample(episodes, threshold=1.0)
    assert numbers["val-core/all/sampled/maj@3"] == {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}
    assert "val-core/whose reward reports none/sampled/maj@3" not in numbers


@pytest.mark.parametrize(
    ("components", "notes", "answer"),
    [
        ({"acc": 1.0, "pred": 12.0}, {}, "12.0"),
        ({"pred": 123456.75}, {}, "123456.75"),
        ({}, {"pred": "3/4"}, "3/4"),
        ({"format": 1.0}, {"math/why": "…", "math/pred": "7", "exact/pred": "so 7"}, "7"),
        ({"spread": 1.0}, {}, ""),
    ],
)
def test_the_answer_is_what_the_reward_reports(
    components: dict[str, float], notes: dict[str, str], answer: str
) -> None:
    assert answer_of(EpisodeResult(1.0, components=components), notes) == answer


def test_what_failed_is_no_success_and_has_the_lowest_score() -> None:
    numbers = sample_means(numbers_per_sample(judged(0, -2.0, None) + judged(1, 1.0, None), threshold=-5.0))
    assert numbers["val-core/all/sampled/mean@2"] == (-2 - 2 + 1 - 2) / 4
    assert numbers["val-core/all/sampled/success"] == 0.5


@pytest.mark.parametrize(
    ("rollout", "scores", "success"),
    [
        ({"reward": "none"}, (0.0, None), None),
        ({"reward": "none"}, (0.0, 1.0), 0.5),
        ({"reward": "none", "environment": "blackjack.py:Blackjack"}, (0.0, 0.0), 0.0),
        ({"reward": "exact_match"}, (0.0, 0.0), 0.0),
    ],
)
def test_without_a_reward_success_is_known_only_where_something_earned_one(
    rollout: dict[str, str], scores: tuple[float | None, ...], success: float | None
) -> None:
    config = parse({"name": "x", "model": {"path": "m"}, "data": {"train": "d"}, "rollout": rollout})
    episodes = judged(0, *scores)
    numbers = sample_means(numbers_per_sample(episodes, threshold_of(config, episodes)))
    assert numbers.get("val-core/all/sampled/success") == success


def test_the_interval_is_that_of_the_mean() -> None:
    """Of n normal values it is close to ±1.96·σ/√n, and the same each time."""
    draw = random.Random(0)
    values = [draw.gauss(0.3, 2.0) for _ in range(400)]
    mean = sum(values) / 400
    width = 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / 400) / 20
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    assert mean - low == pytest.approx(width, rel=0.15) and high - mean == pytest.approx(width, rel=0.15)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)
