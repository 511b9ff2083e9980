"""The interface of environments: an environment may write first, answers each turn of the model, and ends the
episode.

reset(sample) ──► Observation ──► model's turn ──► step(message) ──► Observation ──► … until `done`
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from asyncrl.config import Options
from asyncrl.errors import ConfigError
from asyncrl.registry import Call, Registry, check_call, make_by_factory, name_and_options
from asyncrl.types import Message, Observation, Sample


class Environment(Protocol):
    """Serve one episode; each episode has a new environment, which is always closed.

    Derive from this class, or implement the same members. The constructor should only check the options: open
    files and connections in `reset`. An error or a timeout of `reset` or `step` fails the episode, which is
    then tried again. Answer mistakes of the *model* with an observation, and possibly a reward.
    """

    tools: Sequence[dict[str, Any]] = ()
    """OpenAI schemas of the tools that the environment answers itself, available after `reset`. A turn that
    calls any of these tools is passed to `step` in full, like every turn without calls. All other calls run
    as tools and do not reach `step`."""

    replay: Literal["reapply", "no"] = "reapply"
    """How the episode continues after a crash. `reapply`: a new environment receives the recorded turns
    through `step` and must give the same answers. `no`: the episode starts again from scratch."""

    timeout: float | None = None
    """Time limit for each answer from the environment, in seconds; None means `rollout.tool_timeout`."""

    needs_images: bool = False
    """Whether the episodes make no sense without images: a run whose model reads text only is then refused.
    Otherwise such a model reads `[image]` in the place of an image."""

    @abstractmethod
    async def reset(self, sample: Sample) -> Observation:
        """Begin an episode. The returned messages, which may be empty, follow the sample's prompt. The
        content of a message may be a PIL.Image, or a list of texts and images."""

    @abstractmethod
    async def step(self, message: Message) -> Observation:
        """Answer a turn of the model (role `assistant`, with its parsed tool calls)."""

    async def cut_short(self, unanswered: Message | None) -> float:
        """Return the reward of the last turn after a limit ended the episode early. `unanswered`: the last
        turn, if `step` was not called with it. A `step` that was still running has been cancelled."""
        return 0.0

    async def close(self) -> None:
        """Close the environment at the end of the episode, however the episode ended."""


environments: Registry[Callable[..., Environment]] = Registry("environment")
"""Environment classes, or functions that return an environment. Keyword-only parameters are the options."""


ENVIRONMENT_CALL = Call("a class, or a function that returns an environment", makes=True)
_REQUIRED_MEMBERS = ("reset", "step", "cut_short", "close", "tools", "replay", "timeout")


def load_environment(
    plugin: str | dict[str, Options], key_path: str = "rollout.environment"
) -> Callable[[], Environment]:
    """Return the factory of the episodes' environments. The factory is called once here, so that wrong
    options raise at once: ConfigError that begins with `key_path`."""
    make_environment = environments.make(plugin, key_path, ENVIRONMENT_CALL)
    key_path = f"{key_path}.{name_and_options(plugin)[0]}"
    environment = make_by_factory(make_environment, key_path)

    if missing_members := [name for name in _REQUIRED_MEMBERS if not hasattr(environment, name)]:
        raise ConfigError(
            f"{key_path}: {type(environment).__name__} is not an environment, because it lacks "
            f"{', '.join(missing_members)}; derive it from asyncrl.environments.Environment"
        )

    _check_environment(environment, key_path)
    return make_environment


def _check_environment(environment: Environment, key_path: str) -> None:
    methods = {"reset": ["sample"], "step": ["message"], "cut_short": ["unanswered"], "close": []}
    for name, parameter_names in methods.items():
        usage = f"async def {name}({', '.join(['self', *parameter_names])})"
        check_call(getattr(environment, name), key_path, Call(usage, parameter_names, awaited=True))

    timeout = environment.timeout
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ConfigError(f"{key_path}: timeout must be a number of seconds greater than 0, not {timeout!r}")
    if environment.replay not in ("reapply", "no"):
        raise ConfigError(f"{key_path}: replay must be 'reapply' or 'no', not {environment.replay!r}")


def text_observation(text: str, reward: float = 0.0, done: bool = False) -> Observation:
    return Observation((Message("user", text),), reward, done)


def image_observation(*content: Any, reward: float = 0.0, done: bool = False) -> Observation:
    """Return an observation with a message of texts and images (PIL.Image or ImageFile), in this order."""
    message_content: Any = list(content)
    return Observation((Message("user", message_content),), reward, done)
