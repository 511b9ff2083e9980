"""Rewards: functions with verl's signature, sync or async, named in the config."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.registry import Registry
from asyncrl.types import EpisodeEnd, Message, Sample, Verdict


class RewardInput(msgspec.Struct, frozen=True):
    """A finished episode, as a reward of the whole trajectory sees it.

    `answer` is the last turn's text outside tool calls and reasoning, `messages` the whole conversation,
    prompt and tool replies included, `transcript` the same as the model read it: the decoded tokens.
    `result`: what an agent program returned (a JSON value).
    """

    sample: Sample
    answer: str
    messages: tuple[Message, ...] = ()
    turns: int = 1
    tool_calls: int = 0
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    transcript: str = ""
    result: Any = None


RewardFunction = Callable[..., Any]
"""`(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}`, or a coroutine
of that. `solution_str` is the text of the model's last turn; `ground_truth` and `extra_info` are the
decoded values of the data set. It runs on the worker's event loop: slow code belongs in an async function.

Of a dict, `turns` (a number for each of `extra_info["num_turns"]` turns, beside the score, which falls on the
last) and `components` (named parts, by name) are read too; other keys are ignored."""

rewards: Registry[RewardFunction] = Registry("reward")

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load_reward(spec: str) -> RewardFunction:
    """By registered name, `module:function` or `file.py:function`. ConfigError if it cannot be called."""
    function = rewards.load(spec)
    if not callable(function):
        raise ConfigError(f"reward {spec!r} is no function; verl's signature is expected")
    try:
        inspect.signature(function).bind("source", "solution", "truth", {})
    except TypeError as error:
        raise ConfigError(
            f"reward {spec!r} does not take (data_source, solution_str, ground_truth, extra_info): {error}"
        ) from None
    return function


async def score(function: RewardFunction, sample: Sample, solution: str) -> Verdict:
    """What the function says of one answer. Raises what the function raises, and TypeError or ValueError for
    a result that is not made of finite numbers; the caller records it and sets the deadline."""
    result = function(
        data_source=sample.data_source,
        solution_str=solution,
        ground_truth=json.loads(sample.ground_truth),
        extra_info=json.loads(sample.extra_info),
    )
    if inspect.isawaitable(result):
        result = await result
    return _verdict(result) if isinstance(result, dict) else Verdict(_finite("the reward", result))


def _verdict(result: Mapping[str, Any]) -> Verdict:
    if "score" not in result:
        found = ", ".join(map(str, result)) or "nothing"
        raise ValueError(f"the reward is a dict without 'score'; it has {found}")
    turns, components = result.get("turns", ()), result.get("components", {})
    if not isinstance(turns, Iterable) or isinstance(turns, str | Mapping):
        raise TypeError(f"'turns' of the reward is a {type(turns).__name__}; a list of numbers is expected")
    if not isinstance(components, Mapping):
        raise TypeError(f"'components' of the reward is a {type(components).__name__}; a dict is expected")
    return Verdict(
        _finite("the reward", result["score"]),
        tuple(_finite(f"the reward of turn {turn}", value) for turn, value in enumerate(turns)),
        {
            str(name): _finite(f"component {name!r} of the reward", value)
            for name, value in components.items()
        },
    )


def _finite(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {value!r}, which is no number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, which is no finite number")
    return number


@rewards.register("final_number")
def final_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the last number in the answer equals the ground truth, else 0.0."""
    found = _NUMBER.findall(solution_str)
    expected = _NUMBER.fullmatch(str(ground_truth).strip())
    if not found or not expected:
        return 0.0
    return float(_value(found[-1]) == _value(expected[0]))


def _value(text: str) -> float:
    return float(text.replace(",", ""))
