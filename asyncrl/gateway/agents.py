"""Loads agents: functions of the user, or programs (programs.py), that lead episodes through an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from asyncrl.config import Plugin
from asyncrl.conversation.requests import AgentRequest, IsUntrained
from asyncrl.errors import AsyncrlError, describe, users_code
from asyncrl.gateway import harnesses
from asyncrl.gateway.programs import COMMAND, Command, Harness
from asyncrl.registry import (
    Call,
    Registry,
    bind_options,
    load_object,
    make_by_factory,
    make_plugin,
    name_and_options,
)

Agent = Callable[..., Any]
"""A function or coroutine function `(sample: Sample, endpoint: Endpoint) -> None | number | dict`. Reward
functions see the returned value as `result`. Keyword-only parameters are options. A class whose instances
take these arguments is also an agent: the constructor takes the options, and raises ConfigError for invalid
options; all episodes of a worker share one instance."""

UNTRAINED_SIGNATURE = Call("def untrained(request: AgentRequest) -> bool", ("request",))
AGENT_SIGNATURE = Call("async def agent(sample, endpoint, *, options)", ("sample", "endpoint"))


class AgentError(AsyncrlError):
    """An agent program failed, or a user's function that classifies the agent's requests raised an error."""


agents: Registry[Agent | Harness] = Registry("agent")
agents.register("command")(COMMAND)
for harness in harnesses.HARNESSES:
    agents.register(harness.name)(harness)


def load_agent(plugin: Plugin, where: str = "rollout.agent") -> Agent:
    """Make the agent of a registered name, `module:function` or `file.py:function`, with options. A
    ConfigError begins with `where`."""
    agent = agents.load(plugin, where)
    name, options = name_and_options(plugin, where)
    if not isinstance(agent, Harness):
        return make_plugin(agent, options, f"{where}.{name}", AGENT_SIGNATURE)
    program: Agent = make_by_factory(
        bind_options(partial(Command, agent), options, f"{where}.{name}"), f"{where}.{name}"
    )
    return program


def load_untrained(names: Sequence[str], where: str = "rollout.untrained_agents") -> IsUntrained:
    """Return a function that recognises side requests: by the names of agents, which may be globs, and by
    functions of the user (`module:function`, `file.py:function`) of a request. A ConfigError begins with
    `where`, as does the AgentError when a function raises."""
    functions = {
        name: make_plugin(load_object(name, where), {}, f"{where} {name!r}", UNTRAINED_SIGNATURE)
        for name in names
        if ":" in name
    }

    globs = [name for name in names if ":" not in name]

    def untrained(request: AgentRequest) -> bool:
        if any(fnmatchcase(request.agent, glob) for glob in globs):
            return True

        for name, function in functions.items():
            try:
                with users_code():
                    if function(request):
                        return True
            except Exception as error:
                raise AgentError(f"{where} {name!r}: {describe(error)}") from error

        return False

    return untrained
