"""Agents: functions of the user, or programs, that lead an episode through the endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import msgspec

from asyncrl.config import Plugin
from asyncrl.registry import Call, Registry
from asyncrl.values import finite

MAX_RESULT = 1 << 20  # bytes of a result, as JSON

Agent = Callable[..., Any]
"""`(sample: Sample, endpoint: Endpoint) -> None | number | dict`, or a coroutine of that. What it returns is
the `result` that reward functions see. Keyword-only parameters are its options. A class whose instances are
called like this is an agent as well: its constructor takes the options, and refuses them with ConfigError;
all episodes of a worker share one instance."""

CALL = Call("async def agent(sample, endpoint, *, options)", ("sample", "endpoint"))

agents: Registry[Agent] = Registry("agent")


def load_agent(plugin: Plugin, where: str = "rollout.agent") -> Agent:
    """By registered name, `module:function` or `file.py:function`, with its options. ConfigError that begins
    with `where`."""
    return agents.make(plugin, where, CALL)


def result_of(value: Any) -> Any:
    """What an agent returned, as a JSON value. TypeError or ValueError where it is none, or no result."""
    if isinstance(value, Real):
        value = finite("the agent's result", value)
    elif value is not None and not isinstance(value, Mapping):
        raise TypeError(f"the agent returned a {type(value).__name__}; None, a number or a dict is expected")
    encoded = msgspec.json.encode(value)
    if len(encoded) > MAX_RESULT:
        raise ValueError(f"the agent returned {len(encoded)} bytes, {MAX_RESULT} are allowed")
    return msgspec.json.decode(encoded)
