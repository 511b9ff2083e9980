"""What an environment is: it speaks first, answers what the model says, and knows when it is over.

reset(sample) ──► Observation ──► model's turn ──► step(message) ──► Observation ──► … until `done`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from asyncrl.config import Options
from asyncrl.errors import ConfigError
from asyncrl.registry import Registry, bind
from asyncrl.types import Message, Observation, Sample


class Environment(Protocol):
    """The world of one episode; it is made anew for each, and always closed.

    `tools`: OpenAI schemas of calls that it answers itself, known after `reset`; a turn with one of them goes
    to `step` as a whole, as does every turn without any call. Other calls are run as tools, and `step` is not
    told of them. `replay` says what may be done after a crash: `reapply` (the recorded turns are stepped
    again, and must be answered alike) or `no` (the episode starts again).
    """

    @property
    def tools(self) -> Sequence[dict[str, Any]]: ...
    @property
    def replay(self) -> Literal["reapply", "no"]: ...

    async def reset(self, sample: Sample) -> Observation:
        """Begin. The messages follow the sample's prompt; there may be none."""

    async def step(self, message: Message) -> Observation:
        """Answer a turn of the model (role `assistant`, with its parsed tool calls)."""

    async def close(self) -> None:
        """The episode is over, however it ended."""


environments: Registry[Callable[..., Environment]] = Registry("environment")
"""Classes, or functions that make an environment. Keyword-only parameters are the options."""


def load_environment(
    plugin: str | dict[str, Options], where: str = "$.rollout.environment"
) -> Callable[[], Environment]:
    """What makes the environment of an episode. ConfigError that begins with `where`."""
    if isinstance(plugin, str):
        plugin = {plugin: {}}
    if len(plugin) != 1:
        raise ConfigError(f"{where}: one environment is expected, with its options; there are {len(plugin)}")
    ((spec, options),) = plugin.items()
    found = environments.load(spec, where)
    if not callable(found):
        raise ConfigError(f"{where}: {spec!r} makes no environment; name a class or a function")
    return bind(found, options, f"{where}.{spec}")
