"""How ground truths look to the rewards, before the start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.launch.truths import EXAMINED_SAMPLES, describe_truths
from asyncrl.rewards.loading import load_rewards
from asyncrl.types import Message, Sample

OPTIONS: dict[str, dict[str, str]] = {"regex": {"pattern": "is (.*)"}}


def samples(*truths: Any) -> list[Sample]:
    return [Sample(0, "d", (Message("user", "?"),), json.dumps(truth)) for truth in truths]


@pytest.mark.parametrize(
    ("reward", "truth", "as_compared"),
    [
        ("final_number", "1,024", "'1024'"),
        ("gsm8k", "$72.", "'72'"),
        ("exact", "  New  York ", "'new york'"),
        ("exact", 128.0, "'128.0'"),
        ("exact", True, "'true'"),
        ("exact", {"target": ["A", None]}, "'a'"),
        ("f1", "The end.", "'end'"),
        ("regex", "A  b", "'A b'"),
        ("math", "1/2", "'1/2'"),
    ],
)
def test_a_line_shows_the_first_ground_truth_as_the_reward_compares_it(
    reward: str, truth: Any, as_compared: str
) -> None:
    (line,), warnings = describe_truths(load_rewards({reward: OPTIONS.get(reward, {})}), samples(truth))
    assert line.startswith(f"rollout.reward {reward}: ground truths contain ")
    assert line.endswith(f", such as {json.dumps(truth)}, compared as {as_compared}") and not warnings


@pytest.mark.parametrize(
    ("reward", "truth"),
    [
        *(("final_number", truth) for truth in ("rain", "12 apples", "", "b'128'", [1, 2], True, "1e5")),
        *(("gsm8k", truth) for truth in ("rain", "12 apples", "b'128'", {"target": "1"})),
        *(("exact", truth) for truth in ("b'128'", 'b"x"', [], {"answer": "1"}, [["a"]], {"target": [None]})),
        *(("f1", truth) for truth in ("b'128'", [], {"answer": "1"})),
        *(("math", truth) for truth in ("b'128'", "", ["1"], {"target": "1"})),
        ("regex", "b'128'"),
    ],
)
def test_a_ground_truth_that_no_text_of_a_model_would_equal_is_a_warning(reward: str, truth: Any) -> None:
    known = samples(*("12",) * EXAMINED_SAMPLES, "rain")[:-2]
    rewards = load_rewards({reward: OPTIONS.get(reward, {})})
    assert not describe_truths(rewards, known)[1]
    _, (warning,) = describe_truths(rewards, [*known, *samples(truth, "b'beyond'")])
    assert "1 of the first 64 ground truths" in warning and f"such as {json.dumps(truth)}" in warning
    assert "answers to these samples score nothing; " in warning


def test_each_reward_and_type_has_a_line(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    mine = f"{tmp_path}/mine.py:score"
    mixed = samples("a", 1, "b", 2.5, ["c"], {"target": "d"}, None, "b'x'")
    lines, warnings = describe_truths(load_rewards({"exact": {}, mine: {}, "format": {}}), mixed)
    assert [line.split("ground truths contain ")[1].split(" ")[0] for line in lines] == [
        *("text", "numbers", "lists", "objects"),
        *("text", "numbers", "lists", "objects"),
    ]
    assert lines[4] == 'rollout.reward score: ground truths contain text (3 of the first 8), such as "a"'
    assert ["exact" in warnings[0], "score" in warnings[1]] == [True, True]
    assert not describe_truths(load_rewards({"regex": {"pattern": "x"}}), samples("b'x'"))[1]
