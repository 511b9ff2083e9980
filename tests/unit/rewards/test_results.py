"""From what a function gives back to a Verdict, and from several to one."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rewards import RewardInput, combine, evaluate, in_loop
from asyncrl.rewards.base import as_result
from asyncrl.types import EpisodeEnd, Message, RewardResult, Sample, ToolCall

SAMPLE = Sample(
    0, "chain_math", (Message("user", "?"),), '"1234"', extra_info_json='{"hard": true, "end": "x"}'
)
GIVEN = RewardInput(
    SAMPLE,
    "text",
    (Message("user", "?"), Message("assistant", "text")),
    turns=2,
    tool_calls=1,
    end=EpisodeEnd.MAX_TURNS,
    transcript="<user>?<assistant>text",
)


def test_verls_arguments_and_what_the_episode_tells_of_itself() -> None:
    seen: list[dict[str, Any]] = []

    async def compute_score(**arguments: Any) -> dict[str, float]:
        seen.append(arguments)
        return {"score": 0.5, "bonus": 1.0}

    result = asyncio.run(evaluate(in_loop(compute_score).function, GIVEN))
    assert result == RewardResult(0.5, components={"bonus": 1.0})
    assert seen == [
        {
            "data_source": "chain_math",
            "solution_str": "text",
            "ground_truth": "1234",
            "extra_info": {
                "hard": True,
                "num_turns": 2,
                "tool_calls": 1,
                "end": "max_turns",
                "transcript": "<user>?<assistant>text",
                "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "text"}],
            },
        }
    ]


def test_messages_have_openais_shape() -> None:
    call = ToolCall("add", '{"a": 1}', "c1")
    assert Message("assistant", "", (call,), reasoning="hm").openai() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
        "reasoning_content": "hm",
    }
    reply = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    assert Message("tool", "2", tool_call_id="c1", name="add").openai() == reply


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (1, RewardResult(1.0)),
        (True, RewardResult(1.0)),
        ("0.5", RewardResult(0.5)),
        (RewardResult(0.5, (1.0,), {"a": 2.0}, shaping=9.0), RewardResult(0.5, (1.0,), {"a": 2.0})),
        (
            {"score": 1, "turns": [0, 0.5], "components": {"format": True, "right": 0.5}, "acc": True},
            RewardResult(1.0, (0.0, 0.5), {"format": 1.0, "right": 0.5}, notes={"acc": "True"}),
        ),
        (
            {"score": -1.0, "acc": np.bool_(False), "pred": "12", "steps": np.int64(3), "gone": None},
            RewardResult(-1.0, (), {"acc": 0.0, "steps": 3.0}, notes={"pred": "12"}),
        ),
        (
            {"score": 1, "acc": 1, "id": 10**9, "rate": math.nan, "seen": [1, "a"], "pred": "x" * 999},
            RewardResult(
                1.0,
                (),
                {"acc": 1.0},
                notes={"id": "1000000000", "rate": "nan", "seen": "[1, 'a']", "pred": "x" * 500},
            ),
        ),
        ({"score": 1, "pred": "\ud800"}, RewardResult(1.0, notes={"pred": "?"})),
        ({"white": 1, "black": -1}, RewardResult(0.0, agents={"white": 1.0, "black": -1.0})),
        (
            {"score": {"white": 1, "black": -1}, "acc": 1, "pred": "e4"},
            RewardResult(0.0, (), {"acc": 1.0}, notes={"pred": "e4"}, agents={"white": 1.0, "black": -1.0}),
        ),
    ],
)
def test_results(result: Any, verdict: RewardResult) -> None:
    assert as_result(result) == verdict


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (
            {"acc": 1, "pred": "a"},
            "without 'score'; it has acc, pred, and the reward of 'pred' is 'a', which is",
        ),
        ({"turns": [1.0], "acc": 2}, "without 'score'; it has turns, acc"),
        ({"score": {"x": math.inf}}, "the reward of 'x' is inf"),
        ({"score": {}}, "the reward's 'score' is an empty dict"),
        ({}, "it has nothing"),
        ({"score": 1, "turns": [0.0, float("nan")]}, "reward of turn 1 is nan"),
        ({"score": 1, "turns": [0.0, "much"]}, "reward of turn 1 is 'much', which is not a number"),
        ({"score": 1, "turns": 3}, "the reward's 'turns' is a int"),
        ({"score": 1, "components": {"format": float("inf")}}, "component 'format' of the reward is inf"),
        ({"score": 1, "components": [1]}, "the reward's 'components' is a list"),
        (RewardResult(float("nan")), "the reward is nan"),
        ("much", "the reward is 'much'"),
        (None, "the reward is None"),
        (float("-inf"), "not a finite number"),
        (10**400, "not a finite number"),
    ],
)
def test_a_bad_result_is_reported_by_its_part(result: Any, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        as_result(result)


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([("a", 1.0, RewardResult(0.5, (), {"x": 1.0}))], RewardResult(0.5, (), {"x": 1.0})),
        ([("a", 2.0, RewardResult(0.5, (1.0, 0.0)))], RewardResult(1.0, (2.0, 0.0))),
        (
            [
                ("right", 1.0, RewardResult(1.0, notes={"pred": "5"})),
                ("format", -0.5, RewardResult(0.5, (), {"tags": 1.0})),
            ],
            RewardResult(
                0.75, (), {"right": 1.0, "format": 0.5, "format/tags": 1.0}, notes={"right/pred": "5"}
            ),
        ),
        (
            [
                ("a", 1.0, RewardResult(0.0, (1.0, 2.0))),
                ("b", 0.5, RewardResult(0.0, (2.0, 4.0))),
                ("c", 1.0, RewardResult(0.0)),
            ],
            RewardResult(0.0, (2.0, 4.0), {"a": 0.0, "b": 0.0, "c": 0.0}),
        ),
        (  # a number is earned by each agent
            [
                ("won", 2.0, RewardResult(0.25, agents={"x": 1.0, "o": -1.0})),
                ("short", 0.5, RewardResult(1.0)),
            ],
            RewardResult(
                1.0,
                (),
                {"won/x": 1.25, "won/o": -0.75, "short": 1.0},
                agents={"x": 2.0, "o": -2.0},
            ),
        ),
        (
            [("a", 0.0, RewardResult(1.0)), ("b", 1.0, RewardResult(2.0))],
            RewardResult(2.0, (), {"a": 1.0, "b": 2.0}),
        ),
    ],
)
def test_a_weighted_sum(parts: list[tuple[str, float, RewardResult]], verdict: RewardResult) -> None:
    assert combine(parts) == verdict


KEYS = ["score", "turns", "components"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(KEYS), inner),
)


@settings(max_examples=50, deadline=None)
@given(JSON | st.fixed_dictionaries({"score": JSON}, optional={"turns": JSON, "components": JSON}))
def test_a_result_is_finite_whatever_the_function_gave(result: Any) -> None:
    try:
        verdict = as_result(result)
    except (TypeError, ValueError):
        return
    numbers = [verdict.score, *verdict.turns, *verdict.components.values()]
    assert all(isinstance(number, float) and math.isfinite(number) for number in numbers)


def test_sums_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        combine([("a", 1.0, RewardResult(0.0, (1.0,))), ("b", 1.0, RewardResult(0.0, (1.0, 2.0)))])
    with pytest.raises(ValueError, match="not a finite number"):
        combine([("a", 1e308, RewardResult(1e308))])
