"""math-verify in a reward process, where it is meant to run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardInput, load_rewards
from asyncrl.rewards.process import RewardPool
from asyncrl.types import RewardResult, Sample

pytestmark = pytest.mark.slow

TABLE: list[tuple[str, Any, float]] = [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"so \boxed{1/2}", r"\frac{1}{2}", 1.0),
    (r"so \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
    ("the answer is 1/2", r"\frac{1}{2}", 1.0),
    (r"\boxed{5}", 5, 1.0),
    (r"\boxed{3} and 4", "4", 0.0),
    (r"first \boxed{1}, then \boxed{2}", "2", 1.0),
    (r"first \boxed{1}, then \boxed{2}", "1", 0.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{(1, 2)}", "(1,2)", 1.0),
    (r"\boxed{(2, 1)}", "(1,2)", 0.0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
    (r"\boxed{1{,}234}", "1,234", 1.0),
    (r"\boxed{B}", "B", 1.0),
    (r"\boxed{B}", "C", 0.0),
    (r"\boxed{2", "2", 0.0),
    ("no idea", "5", 0.0),
    ("", "5", 0.0),
]


def results(pairs: list[tuple[str, Any]], **options: Any) -> list[RewardResult]:
    (reward,) = load_rewards({"math": options})
    assert reward.location == "processes"

    async def main() -> list[RewardResult]:
        pool = RewardPool(reward.source, size=1)
        try:
            episodes = [
                RewardInput(Sample(0, "math", (), json.dumps(truth)), answer) for answer, truth in pairs
            ]
            return [await pool.call(episode, 60.0) for episode in episodes]
        finally:
            await pool.close()

    return asyncio.run(main())


def scores(pairs: list[tuple[str, Any]], **options: Any) -> list[float]:
    return [result.score for result in results(pairs, **options)]


def test_answers() -> None:
    outcomes = results([(answer, truth) for answer, truth, _ in TABLE])
    assert [(a, t, outcome.score) for (a, t, _), outcome in zip(TABLE, outcomes, strict=True)] == TABLE
    assert [outcome.notes.get("pred") for outcome in outcomes[:4]] == [
        "1/2"
    ] * 4  # one vote, however it is written
    assert outcomes[-1].notes == {}


def test_only_boxed_ones_and_a_comparison_without_end() -> None:
    pairs: list[tuple[str, Any]] = [("it is 2", "2"), (r"\boxed{2}", "2"), (r"\boxed{9^{9^{9^{9}}}}", "2")]
    assert scores(pairs, boxed=True, seconds=1) == [0.0, 1.0, 0.0]


def test_a_ground_truth_that_says_nothing() -> None:
    with pytest.raises(Exception, match="the ground truth '' cannot be parsed"):
        scores([(r"\boxed{2}", "")])


def test_options_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"math.seconds"):
        load_rewards({"math": {"seconds": 0}})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[math\]'"):
        load_rewards("math")
