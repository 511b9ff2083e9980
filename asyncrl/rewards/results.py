"""From what a reward function gives back to a RewardResult, and from several of these to one."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncrl.rewards.base import RewardFunction, RewardInput
from asyncrl.types import RewardResult
from asyncrl.values import finite


async def evaluate(function: Callable[[RewardInput], Any], given: RewardInput) -> RewardResult:
    """Call a loaded function. Raises what it raises, and TypeError or ValueError for a result that is not
    made of finite numbers."""
    result = function(given)
    return as_result(await result if inspect.isawaitable(result) else result)


def from_verl(function: RewardFunction) -> Callable[[RewardInput], Any]:
    """A function with verl's signature as one of the whole episode."""

    def call(given: RewardInput) -> Any:
        return function(**verl_arguments(given))

    return call


def verl_arguments(given: RewardInput) -> dict[str, Any]:
    """See RewardFunction. Facts of the episode replace keys of the same name in the data set's extra_info."""
    extra = {
        "num_turns": given.turns,
        "tool_calls": given.tool_calls,
        "end": str(given.end),
        "transcript": given.transcript,
        "messages": [message.openai() for message in given.messages],
    }
    if given.result is not None:
        extra["agent_result"] = given.result
    return {
        "data_source": given.sample.data_source,
        "solution_str": given.answer,
        "ground_truth": json.loads(given.sample.ground_truth),
        "extra_info": {**json.loads(given.sample.extra_info), **extra},
    }


def as_result(result: Any) -> RewardResult:
    """Of a number, a dict with `score`, or a RewardResult. TypeError or ValueError names what is wrong."""
    if isinstance(result, RewardResult):
        result = {"score": result.score, "turns": result.turns, "components": result.components}
    if not isinstance(result, Mapping):
        return RewardResult(finite("the reward", result))
    if "score" not in result:
        found = ", ".join(map(str, result)) or "nothing"
        raise ValueError(f"the reward is a dict without 'score'; it has {found}")
    turns, components = result.get("turns", ()), result.get("components", {})
    if not isinstance(turns, Iterable) or isinstance(turns, str | Mapping):
        raise TypeError(f"'turns' of the reward is a {type(turns).__name__}; a list of numbers is expected")
    if not isinstance(components, Mapping):
        raise TypeError(f"'components' of the reward is a {type(components).__name__}; a dict is expected")
    parts = {
        str(name): finite(f"component {name!r} of the reward", value) for name, value in components.items()
    }
    by_turn = tuple(finite(f"the reward of turn {turn}", value) for turn, value in enumerate(turns))
    return RewardResult(finite("the reward", result["score"]), by_turn, parts)


def combine(parts: Sequence[tuple[str, float, RewardResult]]) -> RewardResult:
    """The weighted sum of (name, weight, result). Its components are the scores of the results, by name and
    unweighted, and their components as `name/part`. Of a single result the components keep their names.

    For example 0.5 · exact (score 1) + 1 · code (score 0.2, component tests = 5) is a score of 0.7 with the
    components exact = 1, code = 0.2 and code/tests = 5.

    ValueError when two give different numbers of turn rewards, or a sum is not finite.
    """
    if len(parts) == 1:
        components = parts[0][2].components
    else:
        components = {name: result.score for name, _, result in parts}
        for name, _, result in parts:
            components |= {f"{name}/{part}": value for part, value in result.components.items()}
    by_turn = [[weight * value for value in result.turns] for _, weight, result in parts if result.turns]
    if len({len(turns) for turns in by_turn}) > 1:
        raise ValueError("the rewards of `turns` are of different lengths")
    score = math.fsum(weight * result.score for _, weight, result in parts)
    turns = tuple(finite("a sum of turns", math.fsum(column)) for column in zip(*by_turn, strict=True))
    return RewardResult(finite("the sum of the rewards", score), turns, components)
