"""A reward is a function of a finished episode, in verl's signature or typed, sync or async.

    compute_score(data_source, solution_str, ground_truth, extra_info, *, options…)
    reward(given: RewardInput, *, options…)

Both give a number, a dict with `score`, or a `RewardResult`. A class whose instances are called like one of
the two is a reward as well: its constructor takes the options, and refuses them with ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.registry import Registry
from asyncrl.types import EpisodeEnd, Message, Sample

F = TypeVar("F", bound=Callable[..., Any])


class RewardError(AsyncrlError):
    """A reward or a shaping raised, ran out of time, crashed its process or did not return a number."""


class RewardInput(msgspec.Struct, frozen=True):
    """A finished episode, as a reward of the whole trajectory sees it.

    `answer` is the last turn's text outside tool calls and reasoning, `messages` the whole conversation,
    prompt and tool replies included, `transcript` the same as the model read it: the decoded tokens.
    `result`: what an agent program returned, a JSON value.
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
where an agent program led the episode, `agent_result`.
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
    sandbox: it is cancelled only after 11 times `rollout.reward_timeout`.
    """

    def mark(function: F) -> F:
        function.runs = place  # type: ignore[attr-defined]
        return function

    return mark


def needs_truth(*, numbers: bool = False) -> Callable[[F], F]:
    """Decorator: a sample without a ground truth is refused before the start, and with `numbers` there is a
    warning about ground truths that are none. A class may have the attributes `needs_truth`, `numbers`."""

    def mark(function: F) -> F:
        function.needs_truth, function.numbers = True, numbers  # type: ignore[attr-defined]
        return function

    return mark
