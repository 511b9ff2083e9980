"""Rewards that compare texts, by table."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardInput, evaluate, load_rewards
from asyncrl.rewards.answers import f1, final_number, gsm8k, regex
from asyncrl.types import EpisodeEnd, Message, RewardResult, Sample


def result(name: str, answer: str, truth: Any, **options: Any) -> RewardResult:
    sample = Sample(0, "any", (), json.dumps(truth))
    (reward,) = load_rewards({name: options})
    return asyncio.run(evaluate(reward.function, RewardInput(sample, answer)))


def score(name: str, answer: str, truth: Any, **options: Any) -> float:
    return result(name, answer, truth, **options).score


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
    assert final_number("any", answer, truth)["score"] == reward


@pytest.mark.parametrize(
    ("answer", "truth", "options", "reward"),
    [
        ("2 + 3 = 5\n#### 5", "5", {}, 1.0),
        ("#### 4 no\n#### 1,234", "1234", {}, 1.0),
        ("#### 1234.", "1,234", {}, 1.0),
        ("#### -3", "-3", {}, 1.0),
        ("#### -3", "3", {}, 0.0),
        ("the answer is 5", "5", {}, 0.0),
        ("#### five", "5", {}, 0.0),
        ("#### ,.", "5", {}, 0.0),
        ("#### 6", "5", {"format_score": 0.1}, 0.1),
        ("no number", "5", {"format_score": 0.1}, 0.0),
        ("#### 5 or so", "5", {}, 1.0),
        ("#### 5" + " " * 300, "5", {}, 0.0),
        ("the answer is 5.", "5", {"method": "flexible"}, 1.0),
        ("5 apples, or 6", "5", {"method": "flexible"}, 0.0),
        ("$1,234.50 it is ...", "1234.50", {"method": "flexible"}, 1.0),
        ("nothing", "5", {"method": "flexible"}, 0.0),
        ("#### 18", 18, {}, 1.0),
    ],
)
def test_gsm8k(answer: str, truth: Any, options: dict[str, Any], reward: float) -> None:
    assert gsm8k("gsm8k", answer, truth, **options)["score"] == reward


@pytest.mark.parametrize(
    ("answer", "truth", "options", "reward"),
    [
        ("Paris", "paris", {}, 1.0),
        ("  new\n York ", "New York", {}, 1.0),
        ("paris", "Paris", {"case": True}, 0.0),
        ("It is Paris", "Paris", {}, 0.0),
        ("42", 42, {}, 1.0),
        ("b", ["a", "B"], {}, 1.0),
        ("b", {"target": ["a", "b"]}, {}, 1.0),
        ("so <answer>no</answer> <answer> Paris</answer>.", "Paris", {"tag": "answer"}, 1.0),
        ("Paris", "Paris", {"tag": "answer"}, 0.0),
        ("</answer>Paris", "Paris", {"tag": "answer"}, 0.0),
    ],
)
def test_exact(answer: str, truth: Any, options: dict[str, Any], reward: float) -> None:
    assert score("exact", answer, truth, **options) == reward


@pytest.mark.parametrize(
    ("answer", "truth", "options", "reward"),
    [
        ("the Eiffel Tower!", "Eiffel tower", {}, 1.0),
        ("in the Eiffel Tower", "eiffel tower", {}, 0.8),  # precision 2/3, recall 1
        ("Rome", "Paris", {}, 0.0),
        ("a a b b", "b b b", {}, pytest.approx(0.8)),  # articles do not count: 2 of 2, 2 of 3
        ("", "Paris", {}, 0.0),
        ("the", "a", {}, 1.0),
        ("Obama", ["Barack Obama", "Barack Hussein Obama"], {}, pytest.approx(2 / 3)),
        ("x", [], {}, 0.0),
        ("I say <answer>Paris</answer>", "Paris", {"tag": "answer"}, 1.0),
        ("I say Paris", "Paris", {"tag": "answer"}, 0.0),
    ],
)
def test_f1(answer: str, truth: Any, options: dict[str, Any], reward: float) -> None:
    assert score("f1", answer, truth, **options) == reward


@examples(st.text(), st.text())
def test_f1_is_a_share_and_symmetric(left: str, right: str) -> None:
    forward_score = f1("s", left, right)
    back = f1("s", right, left)
    assert forward_score == back and 0.0 <= forward_score <= 1.0
    assert f1("s", left, left) == 1.0


@pytest.mark.parametrize(
    ("pattern", "of", "truth", "reward"),
    [
        (r"^Answer: \w$", "answer", "irrelevant", 0.0),
        (r"Answer:", "answer", "irrelevant", 1.0),
        (r"Answer: (\w)", "answer", "B", 1.0),
        (r"Answer: (\w)", "answer", "A", 0.0),
        (r"Answer: (\w)", "answer", ["A", "B"], 1.0),
        (r"<think>.*</think>", "answer", "", 0.0),
        (r"<think>.*</think>", "transcript", "", 1.0),
        (r"(never)?Answer", "answer", "", 1.0),
    ],
)
def test_regex(pattern: str, of: Any, truth: Any, reward: float) -> None:
    episode = RewardInput(
        Sample(0, "s", (), json.dumps(truth)), "Answer: A, no.\nAnswer: B", transcript="<think>\n</think>"
    )
    assert regex(episode, pattern=pattern, of=of)["score"] == reward


@pytest.mark.parametrize(
    ("name", "options", "answer", "pred"),
    [
        ("final_number", {}, "so 1,234.00", "1234"),
        ("final_number", {}, "so 0.1", "0.1"),
        ("final_number", {}, "no idea", None),
        ("gsm8k", {}, "#### 1,234.", "1234"),
        ("gsm8k", {}, "1234", None),
        ("exact", {}, " New\nYork", "new york"),
        ("exact", {"tag": "answer"}, "New York", None),
        ("regex", {"pattern": r"Answer: (\w)"}, "Answer: A, no.\nAnswer: B", "B"),
        ("regex", {"pattern": r"Answer:"}, "Answer: B", None),
    ],
)
def test_an_answer_that_is_found_is_reported_for_the_majority(
    name: str, options: dict[str, Any], answer: str, pred: str | None
) -> None:
    """As text: a number would be a component, of which means are shown."""
    reported = result(name, answer, "7", **options)
    assert (reported.components, reported.notes) == ({}, {"pred": pred} if pred else {})


@pytest.mark.parametrize(
    ("answer", "end", "tool", "reward"),
    [
        ("done", EpisodeEnd.ANSWERED, "look", 1.0),
        ("done", EpisodeEnd.DONE, "look", 1.0),
        ("done", EpisodeEnd.LENGTH, "look", 0.0),
        ("done", EpisodeEnd.BAD_CALLS, "look", 0.0),
        ("done", EpisodeEnd.ANSWERED, "malformed_call", 0.0),
        (" ", EpisodeEnd.ANSWERED, "look", 0.0),
    ],
)
def test_format(answer: str, end: EpisodeEnd, tool: str, reward: float) -> None:
    (loaded,) = load_rewards("format")
    messages = (Message("tool", "x", name=tool),)
    assert loaded.function(RewardInput(Sample(0, "s", (), '""'), answer, messages, end=end)) == reward


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (0.5, RewardResult(0.5)),
        (0, RewardResult(0.0)),
        ({"score": 0.25, "components": {"tests": 3}}, RewardResult(0.25, (), {"tests": 3.0})),
        (None, "the agent returned no score"),
        ("done", "the reward is 'done', which is not a number"),
    ],
)
def test_agent(result: Any, verdict: RewardResult | str) -> None:
    (reward,) = load_rewards("agent")
    episode = RewardInput(Sample(0, "s", (), '""'), "", result=result)
    if isinstance(verdict, RewardResult):
        assert asyncio.run(evaluate(reward.function, episode)) == verdict
    else:
        with pytest.raises((TypeError, ValueError), match=verdict):
            asyncio.run(evaluate(reward.function, episode))


def test_none() -> None:
    assert score("none", "anything", "5") == 0.0


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"gsm8k.method.*choose from strict, flexible"):
        load_rewards({"gsm8k": {"method": "loose"}})
    with pytest.raises(ConfigError, match="'pattern' is missing"):
        load_rewards("regex")
