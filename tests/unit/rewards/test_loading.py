"""Which functions are rewards, how options and weights reach them, and where they run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardInput, RewardSource, evaluate, in_loop, load_rewards
from asyncrl.rewards.base import trl_arguments
from asyncrl.types import Message, RewardResult, Sample

QUESTION = Message("user", "?")
GIVEN = RewardInput(
    Sample(0, "s", (QUESTION,), '"5"', extra_info_json='{"hard": true, "scale": 7}'),
    "it is 5",
    (QUESTION, Message("assistant", "it is 5")),
    turns=3,
)

FILE = """
from __future__ import annotations
import asyncio
import functools
from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardInput, runs

def verl(data_source, solution_str, ground_truth, extra_info=None, *, scale: float = 1.0):
    return scale * (ground_truth in solution_str)

def checked(data_source, solution_str, ground_truth: Nowhere, extra_info=None):
    return 1.0

async def verl_async(data_source, solution_str, ground_truth, extra_info):
    return 1.0

async def verls_options(data_source, solution_str, ground_truth, extra_info=None, scale=1.0, name: str = "x"):
    return scale * len(name)

def untyped(given, *, scale=1.0, **others):
    return scale

def typed(given):
    return given.turns

@runs("loop")
def annotated(episode: RewardInput, *, plus: int):
    return episode.turns + plus

class Judge:
    def __init__(self, *, strict: bool = False):
        if strict:
            raise ConfigError("strict is not built")
        self.calls = 0

    async def __call__(self, given: RewardInput):
        self.calls += 1
        return self.calls

@runs("one_process")
class Model:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 0.25

def trl(completions, hard, **kwargs):
    return [float(len(completions[0][0]["content"]) * hard[0] + len(kwargs["prompts"]))]

async def trl_async(environments, *, scale: float = 1.0):
    return [environments[0].reward * scale]

def trl_unset(environments): return [environment.reward or 0.5 for environment in environments]
def trl_bare(environments): return [len(vars(environments[0]))]
def trl_none(prompts, completions): return [None]
def trl_two(completions): return [1.0, 0.0]
def trl_number(completions): return 1.0
def trl_column(completions, answer): return [1.0]

def trl_options(completions, *, hard: object = None, scale: object = None, **kwargs):
    return [float(hard == [True]) + 2 * (scale == [7]) + 4 * ("data_source" in kwargs)]

def trl_required(completions, *, hard, scale=1.0, **kwargs): return [float(hard == [True]) + scale]
def trl_missing(completions, *, answer): return [1.0]

trl_partial = functools.partial(trl_options, scale="own")

class TrlKeywords:
    keywords = ("hard",)

    def __call__(self, completions, hard):
        return [float(hard[0])]

class Dumb:
    pass

def short(answer): return 1.0
def twice(a, b): return 1.0
def vague(given, *, option: Nowhere = 1): return 1.0
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("name", "options", "location", "score"),
    [
        ("verl", {}, "processes", 1.0),
        ("verl", {"scale": "2.5"}, "processes", 2.5),
        ("checked", {}, "processes", 1.0),  # its annotation is there for type checkers
        ("verl_async", {}, "loop", 1.0),
        ("verls_options", {}, "loop", 1.0),
        ("verls_options", {"scale": 0.5, "name": "four"}, "loop", 2.0),
        ("untyped", {"scale": 4}, "processes", 4.0),
        ("typed", {}, "processes", 3.0),
        ("annotated", {"plus": 4}, "loop", 7.0),
        ("Judge", {}, "loop", 1.0),
        ("Model", {}, "one_process", 0.25),
        ("trl", {}, "processes", 8.0),
        ("trl_async", {"scale": 2}, "loop", 1.0),
        ("trl_none", {}, "processes", 0.0),
        ("trl_options", {}, "processes", 7.0),
        ("trl_options", {"scale": 3}, "processes", 5.0),
        ("trl_partial", {}, "processes", 5.0),
        ("trl_required", {"scale": 2}, "processes", 3.0),
        ("trl_required", {"hard": True, "scale": 2}, "processes", 2.0),
        ("TrlKeywords", {}, "processes", 1.0),
    ],
)
def test_what_is_a_reward(
    file: Path, name: str, options: dict[str, Any], location: str, score: float
) -> None:
    (reward,) = load_rewards({f"{file}:{name}": options})
    assert (reward.name, reward.location, reward.source) == (
        name,
        location,
        RewardSource(f"{file}:{name}", options),
    )
    episode = msgspec.structs.replace(GIVEN, result={"reward": 0.5})
    assert asyncio.run(evaluate(reward.function, episode)) == RewardResult(score)


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("trl", {}, ("hard",)),
        ("trl_none", {}, ()),
        ("trl_options", {}, ()),
        ("trl_required", {}, ("hard",)),
        ("trl_required", {"hard": True}, ()),
        ("TrlKeywords", {}, ("hard",)),
        ("verl", {}, ()),
        ("typed", {}, ()),
    ],
)
def test_columns_that_a_reward_needs(
    file: Path, name: str, options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    (reward,) = load_rewards({f"{file}:{name}": options})
    assert reward.needed_columns == columns


@pytest.mark.parametrize(
    ("name", "result", "score"),
    [("trl_unset", {"reward": None}, 0.5), ("trl_bare", None, 0.0), ("trl_bare", 7, 0.0)],
)
def test_a_reward_of_trl_always_gets_environments(file: Path, name: str, result: Any, score: float) -> None:
    (reward,) = load_rewards(f"{file}:{name}")
    episode = msgspec.structs.replace(GIVEN, result=result)
    assert asyncio.run(evaluate(reward.function, episode)) == RewardResult(score)


SYSTEM = Message("system", "Be brief.")
ANSWER = Message("assistant", "it is 5")


@pytest.mark.parametrize(
    ("messages", "prompt_length"),
    [
        ((QUESTION, ANSWER), 1),
        ((QUESTION, SYSTEM, ANSWER), 1),  # an environment's message follows the prompt
        ((SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER), 2),
        ((SYSTEM, QUESTION), 2),
    ],
)
def test_the_completions_of_trl_begin_after_the_prompt(
    messages: tuple[Message, ...], prompt_length: int
) -> None:
    columns = trl_arguments(msgspec.structs.replace(GIVEN, messages=messages))
    messages_json = [message.openai() for message in messages]
    assert columns["prompts"] == [messages_json[:prompt_length]]
    assert columns["completions"] == [messages_json[prompt_length:]]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("trl_two", r"the reward is \[1.0, 0.0\]; expected a list with one number"),
        ("trl_number", "the reward is 1.0; expected a list with one number"),
        (
            "trl_column",
            r"trl_column \(mine.py:\d+\) needs 'answer'; the columns are hard, .*, environments; put answer",
        ),
        ("trl_missing", r"trl_missing \(mine.py:\d+\) needs 'answer'; the columns are hard, "),
    ],
)
def test_a_reward_of_trl_that_fails_says_why(file: Path, name: str, complaint: str) -> None:
    (reward,) = load_rewards(f"{file}:{name}")
    with pytest.raises(TypeError, match=complaint):
        asyncio.run(evaluate(reward.function, GIVEN))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        (
            "short",
            {},
            r"short \(mine.py:\d+\) cannot be called .*write a function with .*\(given: RewardInput\)",
        ),
        ("twice", {}, "cannot be called with the expected arguments"),
        ("number", {}, "is not a function"),
        ("Dumb", {}, "cannot be called"),
        ("vague", {}, "no usable signature .*Nowhere"),
        ("Judge", {"strict": True}, r"mine.py:Judge: strict is not built"),
        ("Judge", {"strength": 1}, "unknown option 'strength'; options: strict"),
        ("annotated", {}, "option 'plus' is missing"),
        ("trl_required", {"size": 1}, "unknown option 'size'; options: hard, scale"),
        ("verl", {"scale": "much"}, r"\.scale: Expected `float`"),
        ("verl", {"weight": "much"}, "weight must be a finite number, not 'much'"),
        ("verl", {"weight": float("nan")}, "weight must be a finite number, not nan"),
        ("verls_options", {"size": 1}, "unknown option 'size'; options: scale, name"),
        ("gone", {}, "has no 'gone'"),
    ],
)
def test_what_is_none_is_reported(file: Path, name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_rewards({f"{file}:{name}": options})
    assert str(caught.value).startswith("rollout.reward")


def test_names_and_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def f(given): return 1.0\n")
    two = load_rewards({"final_number": {}, "asyncrl.rewards:final_number": {"weight": 0.5}})
    assert [(reward.name, reward.weight) for reward in two] == [
        ("final_number", 1.0),
        ("asyncrl.rewards:final_number", 0.5),
    ]
    files = load_rewards({"gsm8k": {}, f"{tmp_path}/a.py:f": {"weight": 2}})
    assert [reward.name for reward in files] == ["gsm8k", "f"]
    assert files[1].source.options == {}
    with pytest.raises(ConfigError, match="did you mean final_number"):
        load_rewards("final_numbr")
    with pytest.raises(ConfigError, match="does not name a reward"):
        load_rewards({})


def test_a_function_at_hand() -> None:
    assert asyncio.run(evaluate(in_loop(lambda given: given.turns).function, GIVEN)) == RewardResult(3.0)
    assert asyncio.run(evaluate(in_loop(lambda **_: 2).function, GIVEN)) == RewardResult(2.0)
