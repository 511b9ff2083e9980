from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rewards import final_number, load_reward, score
from asyncrl.types import Message, Sample, Verdict

SAMPLE = Sample(0, "chain_math", (Message("user", "?"),), '"1234"', extra_info='{"hard": true}')


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("The answer is 1234.", "1234", 1.0),
        ("12 is wrong, it is 1,234.00", "1234", 1.0),
        ("1234 is near 1235", "1234", 0.0),
        ("It is -5", "-5", 1.0),
        ("It is -5", "5", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        ("5", "five", 0.0),
        ("It is 5", 5, 1.0),
    ],
)
def test_final_number(answer: str, truth: Any, reward: float) -> None:
    assert final_number("any", answer, truth) == reward


def test_score_decodes_the_sample_and_accepts_every_shape() -> None:
    seen: list[dict[str, Any]] = []

    async def compute_score(**arguments: Any) -> dict[str, float]:
        seen.append(arguments)
        return {"score": 0.5, "bonus": 1.0}

    assert asyncio.run(score(compute_score, SAMPLE, "text")) == Verdict(0.5)
    assert seen == [
        {
            "data_source": "chain_math",
            "solution_str": "text",
            "ground_truth": "1234",
            "extra_info": {"hard": True},
        }
    ]
    assert asyncio.run(score(final_number, SAMPLE, "it is 1234")) == Verdict(1.0)


def test_turns_and_components_are_read() -> None:
    found = {"score": 1, "turns": [0, 0.5], "components": {"format": True, "correct": 0.5}, "acc": "ignored"}
    verdict = asyncio.run(score(lambda **_: found, SAMPLE, "text"))
    assert verdict == Verdict(1.0, (0.0, 0.5), {"format": 1.0, "correct": 0.5})


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ({"points": 1, "x": 2}, "without 'score'; it has points, x"),
        ({"score": 1, "turns": [0.0, float("nan")]}, "reward of turn 1 is nan"),
        ({"score": 1, "turns": [0.0, "much"]}, "reward of turn 1 is 'much', which is no number"),
        ({"score": 1, "turns": 3}, "'turns' of the reward is a int"),
        ({"score": 1, "components": {"format": float("inf")}}, "component 'format' of the reward is inf"),
        ({"score": 1, "components": [1]}, "'components' of the reward is a list"),
        ("much", "the reward is 'much'"),
    ],
)
def test_a_bad_result_is_told_by_its_part(result: Any, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        asyncio.run(score(lambda **_: result, SAMPLE, "text"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "much", {"points": 1}])
def test_score_raises_on_what_is_no_number(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        asyncio.run(score(lambda **_: bad, SAMPLE, "text"))


def test_load_reward(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
        "def short(answer): return 1.0\n"
        "number = 3\n"
    )
    assert load_reward("final_number") is final_number
    assert load_reward("asyncrl.rewards.base:final_number") is final_number
    assert asyncio.run(score(load_reward(f"{file}:compute_score"), SAMPLE, "")) == Verdict(1.0)
    for name, complaint in (("short", "does not take"), ("number", "no function"), ("x", "has no 'x'")):
        with pytest.raises(ConfigError, match=complaint):
            load_reward(f"{file}:{name}")
    with pytest.raises(ConfigError, match="did you mean final_number"):
        load_reward("final_numbr")
