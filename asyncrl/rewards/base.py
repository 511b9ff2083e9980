"""Defines rewards: functions of a finished episode, in verl's or TRL's signature or typed, sync or async.

    compute_score(data_source, solution_str, ground_truth, extra_info, *, options…)
    reward(completions, environments, **kwargs)
    reward(given: RewardInput, *, options…)

TRL's returns a list of one number; the others give a number, a dict with `score`, or a `RewardResult`. A
class whose instances can be called in one of these ways is a reward as well: the constructor takes the
options, and refuses bad options with ConfigError.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.registry import Registry
from asyncrl.types import MAX_REWARD, EpisodeEnd, FailReason, Message, RewardResult, Sample
from asyncrl.values import encodable, finite_number

F = TypeVar("F", bound=Callable[..., Any])
RESULT_KEYS = ("score", "turns", "components")  # keys of a result that are read; others are verl's extras
MAX_NOTES = 16  # notes that are kept of one result
MAX_NOTE_CHARACTERS = 500


class RewardError(AsyncrlError):
    """Raised if a reward or a shaping raised an error, ran out of time, crashed its process or did not return
    a number; or, with another `reason`, if tests could not judge the episode."""

    def __init__(self, message: str, reason: FailReason = FailReason.REWARD_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class RewardInput(msgspec.Struct, frozen=True):
    """A finished episode, as input for a reward of the whole trajectory.

    `answer` is the text of the last turn without tool calls and reasoning. `messages` is the whole
    conversation, including the prompt and tool replies, and `transcript` the same conversation as decoded
    tokens. `result`: the return value of an agent program, or the `result` of the tools' objects, as a JSON
    value. `image_token`: what the transcript has in the place of each image; empty if the model reads text
    only.
    """

    sample: Sample
    answer: str
    messages: tuple[Message, ...] = ()
    turns: int = 1
    tool_calls: int = 0
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    transcript: str = ""
    result: Any = None
    image_token: str = ""


RewardFunction = Callable[..., Any]
"""`(data_source, solution_str, ground_truth, extra_info)` or `(given: RewardInput)`, with options by keyword;
or TRL's `(completions, environments, **kwargs)`, see `trl_arguments`.

`solution_str` is the text of the model's last turn; `ground_truth` and `extra_info` are the decoded values of
the data set, the latter with `num_turns`, `tool_calls`, `end`, `messages` (OpenAI's shape), `transcript` and,
if an agent program or a tool returned a result, `agent_result`.

A returned dict may contain `score`, `turns` (a number for each turn, in addition to the score, which counts
for the last turn) and `components` (parts by name). Without `components`, the other numbers in the dict are
the components; strings go to the transcripts. `{agent: number}`, alone or as `score`, is the reward of each
agent in the episode."""

rewards: Registry[RewardFunction] = Registry("reward")

RewardLocation = Literal["loop", "processes", "one_process"]


def runs(location: RewardLocation) -> Callable[[F], F]:
    """Decorate a reward with the location where it runs.

    `loop`: in the event loop of the worker, which a reward must not block for more than a millisecond.
    `processes`: in a few child processes, which the deadline can kill; the default for sync functions.
    `one_process`: in a single process, for large objects such as a model. Async functions run in the loop. An
    async function with the attribute `own_deadline = True` sets its own deadlines, for example if it first
    waits for a sandbox: the call is cancelled only after 11 times `rollout.reward_timeout`, or never with
    `math.inf`.
    """

    def mark(function: F) -> F:
        function.runs = location  # type: ignore[attr-defined]
        return function

    return mark


AcceptedTexts = Callable[..., list[str] | None]


def needs_truth(*, numbers: bool = False, compared: AcceptedTexts | None = None) -> Callable[[F], F]:
    """Decorate a reward that needs a ground truth: samples without a ground truth are refused before the
    start. `numbers`: warn of ground truths that are no numbers. A class may set the attributes `needs_truth`
    and `numbers`. `compared(ground_truth, **options)`, for built-in rewards: the accepted texts in the form
    that the reward compares, for a line before the start; empty for a ground truth that no answer equals."""

    def mark(function: F) -> F:
        function.needs_truth = True  # type: ignore[attr-defined]
        function.numbers = numbers  # type: ignore[attr-defined]
        function.compared = compared  # type: ignore[attr-defined]
        return function

    return mark


# -- from a function's return value to a RewardResult, and from several results to one ---------------------


async def evaluate(function: Callable[[RewardInput], Any], episode: RewardInput) -> RewardResult:
    """Call a loaded function. Raises the function's own exceptions, and TypeError or ValueError for a result
    that is not made of finite numbers."""
    result = function(episode)
    return as_result(await result if inspect.isawaitable(result) else result)


def verl_arguments(episode: RewardInput) -> dict[str, Any]:
    """Return the arguments of verl's signature, see RewardFunction. Facts of the episode replace keys of the
    same name in the data set's extra_info."""
    episode_facts = {
        "num_turns": episode.turns,
        "tool_calls": episode.tool_calls,
        "end": str(episode.end),
        "transcript": episode.transcript,
        "messages": [message.openai() for message in episode.messages],
    }
    if episode.result is not None:
        episode_facts["agent_result"] = episode.result

    return {
        "data_source": episode.sample.data_source,
        "solution_str": episode.answer,
        "ground_truth": episode.sample.ground_truth,
        "extra_info": {**episode.sample.extra_info, **episode_facts},
    }


def trl_arguments(episode: RewardInput) -> dict[str, Any]:
    """Return the arguments of TRL's signature, a batch of this episode: each is a list of one. `environments`
    holds an object with the entries of the result as attributes; without attributes if the tools or the agent
    left no dict."""
    sample = episode.sample
    prompt_length = len(sample.prompt)
    if episode.messages[:prompt_length] != sample.prompt:  # an agent wrote a prompt of its own
        roles = [message.role for message in episode.messages]
        prompt_length = roles.index("assistant") if "assistant" in roles else len(roles)

    messages = [message.openai() for message in episode.messages]
    columns = {**sample.columns, "prompts": messages[:prompt_length]}
    columns["completions"] = messages[prompt_length:]
    result_entries = episode.result if isinstance(episode.result, Mapping) else {}
    columns["environments"] = SimpleNamespace(**result_entries)

    return {name: [value] for name, value in columns.items()}


def score_of_batch(scores: Any) -> float:
    """Return the only score of a batch of one episode; 0 for None, which TRL leaves out of its sum. TypeError
    for any other result."""
    is_list = isinstance(scores, Iterable) and not isinstance(scores, str | Mapping)
    episode_scores = list(scores) if is_list else []
    if len(episode_scores) != 1:
        raise TypeError(f"the reward is {scores!r:.100}; expected a list with one number")
    return 0.0 if episode_scores[0] is None else finite_number("the reward", episode_scores[0])


def as_result(result: Any) -> RewardResult:
    """Read a number, a dict with `score`, or a RewardResult. TypeError or ValueError names the fault.

    Without `components` a dict is verl's: other numbers (`acc`, …) are the components, and other values go
    to the notes, as text. A dict of numbers without `score`, or a dict as `score`, gives the number that each
    agent of the episode earns.
    """
    if isinstance(result, RewardResult):
        checked_result = as_result(
            {"score": result.score, "turns": result.turns, "components": result.components}
        )
        return msgspec.structs.replace(
            checked_result, notes=result.notes, agents=result.agents and _agent_scores(result.agents)
        )

    if not isinstance(result, Mapping):
        return RewardResult(finite_number("the reward", result))

    if "score" not in result:
        present_keys = ", ".join(map(str, result)) or "nothing"
        if not result or {"turns", "components"} & result.keys():
            raise ValueError(f"the reward is a dict without 'score'; it has {present_keys}")

        try:
            return as_result({"score": result})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the reward is a dict without 'score'; it has {present_keys}, and {error}"
            ) from None

    if isinstance(result["score"], Mapping):
        without_agents = as_result({**result, "score": 0.0})
        return msgspec.structs.replace(without_agents, agents=_agent_scores(result["score"]))

    # Without `components`, numbers that can be averaged are components: verl's reward functions also return
    # ids and nan.
    other_values = {str(name): value for name, value in result.items() if name not in RESULT_KEYS}
    numbers: dict[str, float] = {}
    for name, value in other_values.items() if "components" not in result else ():
        with suppress(TypeError, ValueError):
            if not isinstance(value, str | bytes) and abs(number := finite_number(name, value)) <= MAX_REWARD:
                numbers[name] = number

    turns = result.get("turns", ())
    components = result.get("components", numbers)
    if not isinstance(turns, Iterable) or isinstance(turns, str | Mapping):
        raise TypeError(f"the reward's 'turns' is a {type(turns).__name__}; expected a list of numbers")
    if not isinstance(components, Mapping):
        raise TypeError(f"the reward's 'components' is a {type(components).__name__}; expected a dict")

    finite_components = {
        str(name): finite_number(f"component {name!r} of the reward", value)
        for name, value in components.items()
    }
    turn_rewards = tuple(
        finite_number(f"the reward of turn {turn}", value) for turn, value in enumerate(turns)
    )

    note_values = {
        name: value if isinstance(value, str) else repr(value)
        for name, value in other_values.items()
        if name not in numbers and value is not None
    }
    notes = {
        name: encodable(text[:MAX_NOTE_CHARACTERS]) for name, text in islice(note_values.items(), MAX_NOTES)
    }

    return RewardResult(
        finite_number("the reward", result["score"]), turn_rewards, finite_components, notes=notes
    )


def _agent_scores(scores: Mapping[str, Any]) -> dict[str, float]:
    if not scores:
        raise ValueError("the reward's 'score' is an empty dict; expected a number for each agent")
    return {str(agent): finite_number(f"the reward of {agent!r}", value) for agent, value in scores.items()}


def combine(parts: Sequence[tuple[str, float, RewardResult]]) -> RewardResult:
    """Return the weighted sum of (name, weight, result). The sum's components are the unweighted scores by
    name, and each result's components and notes as `name/part`; a single result keeps the plain names.

    For example 0.5 · exact (score 1) + 1 · code (score 0.2, component tests = 5) is a score of 0.7 with the
    components exact = 1, code = 0.2 and code/tests = 5. Scores of agents are summed agent by agent; a result
    with scores of agents has no component `name`, but `name/agent`: the agent's score plus the result's.

    ValueError if two results have different numbers of turn rewards, or a sum is not finite.
    """
    if len(parts) == 1:
        components = parts[0][2].components
        notes = parts[0][2].notes
    else:
        components = {name: result.score for name, _, result in parts if not result.agents}
        notes = {}

        for name, _, result in parts:
            components |= {f"{name}/{part}": value for part, value in result.components.items()}
            components |= {
                f"{name}/{agent}": result.score + agent_score for agent, agent_score in result.agents.items()
            }
            notes |= {f"{name}/{part}": text for part, text in result.notes.items()}

    turn_rewards = [[weight * value for value in result.turns] for _, weight, result in parts if result.turns]
    if len({len(turns) for turns in turn_rewards}) > 1:
        raise ValueError("the rewards returned `turns` of different lengths")

    score = math.fsum(weight * result.score for _, weight, result in parts)
    agent_scores: dict[str, float] = {}

    for _, weight, result in parts:
        agent_scores |= {
            name: agent_scores.get(name, 0.0) + weight * value for name, value in result.agents.items()
        }

    turns = tuple(
        finite_number("a sum of turn rewards", math.fsum(column))
        for column in zip(*turn_rewards, strict=True)
    )
    total = finite_number("the sum of the rewards", score)
    return RewardResult(total, turns, components, notes=notes, agents=agent_scores)
