"""A reward is a function of a finished episode, in verl's signature or typed, sync or async.

    compute_score(data_source, solution_str, ground_truth, extra_info, *, options…)
    reward(given: RewardInput, *, options…)

Both give a number, a dict with `score`, or a `RewardResult`. A class whose instances are called like one of
the two is a reward as well: its constructor takes the options, and refuses them with ConfigError.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.registry import Registry
from asyncrl.types import MAX_REWARD, EpisodeEnd, FailReason, Message, RewardResult, Sample
from asyncrl.values import encodable, finite

F = TypeVar("F", bound=Callable[..., Any])
READ = ("score", "turns", "components")
# of a result; characters
MOST_NOTES = 16
LONGEST_NOTE = 500


class RewardError(AsyncrlError):
    """A reward or a shaping raised, ran out of time, crashed its process or did not return a number; or tests
    could not judge, for another `reason`."""

    def __init__(self, message: str, reason: FailReason = FailReason.REWARD_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class RewardInput(msgspec.Struct, frozen=True):
    """A finished episode, as a reward of the whole trajectory sees it.

    `answer` is the last turn's text outside tool calls and reasoning, `messages` the whole conversation,
    prompt and tool replies included, `transcript` the same as the model read it: the decoded tokens.
    `result`: what an agent program returned, or the tools left (`result` of their objects), a JSON value.
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
"""`(data_source, solution_str, ground_truth, extra_info)` or `(given: RewardInput)`, and options by keyword.

`solution_str` is the text of the model's last turn; `ground_truth` and `extra_info` are the decoded values of
the data set, the latter with `num_turns`, `tool_calls`, `end`, `messages` (OpenAI's shape), `transcript` and,
where an agent program or a tool left one, `agent_result`.
Of a dict that is given back, `score`, `turns` (a number for each turn, beside the score, which falls on the
last) and `components` (named parts, by name) are read. Without `components` its other numbers are these;
texts go to transcripts. `{agent: number}`, alone or as `score`, is what each agent of the episode earns."""

rewards: Registry[RewardFunction] = Registry("reward")

Place = Literal["loop", "processes", "one_process"]


def runs(place: Place) -> Callable[[F], F]:
    """Decorator: where a reward runs.

    `loop`: in the worker's event loop, which it must not keep for more than a millisecond. `processes`: in a
    few child processes, which the deadline can kill; so do sync functions without this decorator.
    `one_process`: in a single one, for what is large, such as a model. Async functions run in the loop; one
    with the attribute `own_deadline = True` has deadlines of its own, for example when it first waits for a
    sandbox: it is cancelled only after 11 times `rollout.reward_timeout`; with `math.inf` it never is.
    """

    def mark(function: F) -> F:
        function.runs = place  # type: ignore[attr-defined]
        return function

    return mark


Compared = Callable[..., list[str] | None]


def needs_truth(*, numbers: bool = False, compared: Compared | None = None) -> Callable[[F], F]:
    """Decorator: a sample without a ground truth is refused before the start, and with `numbers` there is a
    warning about ground truths that are none. A class may have the attributes `needs_truth`, `numbers`.
    `compared(ground_truth, **options)`, of built-in rewards: the texts that are accepted, as the reward
    compares them, for a line before the start; none for a ground truth that no answer equals."""

    def mark(function: F) -> F:
        function.needs_truth = True  # type: ignore[attr-defined]
        function.numbers = numbers  # type: ignore[attr-defined]
        function.compared = compared  # type: ignore[attr-defined]
        return function

    return mark


# -- from what a function gives back to a RewardResult, and from several of these to one -------------------


async def evaluate(function: Callable[[RewardInput], Any], given: RewardInput) -> RewardResult:
    """Call a loaded function. Raises what it raises, and TypeError or ValueError for a result that is not
    made of finite numbers."""
    result = function(given)
    return as_result(await result if inspect.isawaitable(result) else result)


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
    """Read a number, a dict with `score`, or a RewardResult. TypeError or ValueError names what is wrong.

    Without `components` a dict is verl's: its other numbers (`acc`, …) are the components. What is neither
    goes to the notes, as text. A dict of other numbers, or such a dict as `score`, is what each agent of the
    episode earns for itself.
    """
    if isinstance(result, RewardResult):
        made = as_result({"score": result.score, "turns": result.turns, "components": result.components})
        return msgspec.structs.replace(
            made, notes=result.notes, agents=result.agents and _of_agents(result.agents)
        )
    if not isinstance(result, Mapping):
        return RewardResult(finite("the reward", result))
    if "score" not in result:
        found = ", ".join(map(str, result)) or "nothing"
        if not result or {"turns", "components"} & result.keys():
            raise ValueError(f"the reward is a dict without 'score'; it has {found}")
        try:
            return as_result({"score": result})
        except (TypeError, ValueError) as error:
            raise ValueError(f"the reward is a dict without 'score'; it has {found}, and {error}") from None
    if isinstance(result["score"], Mapping):
        alone = as_result({**result, "score": 0.0})
        return msgspec.structs.replace(alone, agents=_of_agents(result["score"]))
    others = {str(name): value for name, value in result.items() if name not in READ}
    numbers: dict[str, float] = {} if "components" in result else _numbers(others)
    turns = result.get("turns", ())
    components = result.get("components", numbers)
    if not isinstance(turns, Iterable) or isinstance(turns, str | Mapping):
        raise TypeError(f"'turns' of the reward is a {type(turns).__name__}; a list of numbers is expected")
    if not isinstance(components, Mapping):
        raise TypeError(f"'components' of the reward is a {type(components).__name__}; a dict is expected")
    parts = {
        str(name): finite(f"component {name!r} of the reward", value) for name, value in components.items()
    }
    by_turn = tuple(finite(f"the reward of turn {turn}", value) for turn, value in enumerate(turns))
    notes = {
        name: _text(value) for name, value in others.items() if name not in numbers and value is not None
    }
    return RewardResult(
        finite("the reward", result["score"]), by_turn, parts, notes=dict(islice(notes.items(), MOST_NOTES))
    )


def _of_agents(given: Mapping[str, Any]) -> dict[str, float]:
    if not given:
        raise ValueError("'score' of the reward is an empty dict; it needs a number for each agent")
    return {str(agent): finite(f"the reward of {agent!r}", value) for agent, value in given.items()}


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """Keep the values that can be averaged. verl's reward functions bring others as well: ids, nan."""
    found: dict[str, float] = {}
    for name, value in given.items():
        with suppress(TypeError, ValueError):
            if not isinstance(value, str | bytes) and abs(number := finite(name, value)) <= MAX_REWARD:
                found[name] = number
    return found


def _text(value: Any) -> str:
    return encodable((value if isinstance(value, str) else repr(value))[:LONGEST_NOTE])


def combine(parts: Sequence[tuple[str, float, RewardResult]]) -> RewardResult:
    """The weighted sum of (name, weight, result). Its components are the scores of the results, by name and
    unweighted, and their components and notes as `name/part`. Of a single result they keep their names.

    For example 0.5 · exact (score 1) + 1 · code (score 0.2, component tests = 5) is a score of 0.7 with the
    components exact = 1, code = 0.2 and code/tests = 5. What agents earn for themselves is summed for each;
    of such a result there is no score by name, but `name/agent`: what each earned, score included.

    ValueError when two give different numbers of turn rewards, or a sum is not finite.
    """
    if len(parts) == 1:
        components = parts[0][2].components
        notes = parts[0][2].notes
    else:
        components = {name: result.score for name, _, result in parts if not result.agents}
        notes = {}
        for name, _, result in parts:
            components |= {f"{name}/{part}": value for part, value in result.components.items()}
            components |= {f"{name}/{agent}": result.score + own for agent, own in result.agents.items()}
            notes |= {f"{name}/{part}": text for part, text in result.notes.items()}
    by_turn = [[weight * value for value in result.turns] for _, weight, result in parts if result.turns]
    if len({len(turns) for turns in by_turn}) > 1:
        raise ValueError("the rewards of `turns` are of different lengths")
    score = math.fsum(weight * result.score for _, weight, result in parts)
    shares: dict[str, float] = {}
    for _, weight, result in parts:
        shares |= {name: shares.get(name, 0.0) + weight * value for name, value in result.agents.items()}
    turns = tuple(finite("a sum of turns", math.fsum(column)) for column in zip(*by_turn, strict=True))
    total = finite("the sum of the rewards", score)
    return RewardResult(total, turns, components, notes=notes, agents=shares)
