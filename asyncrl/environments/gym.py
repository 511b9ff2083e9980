"""Gymnasium's text environments: a turn is an action, what is shown is text.

prompt ──reset(seed)──► text ──turn: "... left"──► action 0 ──env.step──► text, reward, done
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from asyncrl.environments.base import Environment, environments, extra_info, text_observation
from asyncrl.errors import ConfigError, one_line
from asyncrl.isolation.calls import OwnThread
from asyncrl.registry import load_object
from asyncrl.types import Message, Observation, Sample

_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)  # where the agent is: it becomes brackets
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


@environments.register("gymnasium")
class Gymnasium(Environment):
    """An environment whose actions are discrete, or text; every step's reward falls on its turn.

    `id`: as `gymnasium.make` knows it (`module:Name-v0` imports the module first). `arguments`: its further
    arguments, a JSON object; the sample's `extra_info.gymnasium` adds to it. `actions`: names of the actions
    in order, separated by commas; the last action name or number in a turn is the one taken. `show`: what the
    model sees, the rendered text or the observation (`auto`: the text, where there is one). `describe`:
    `module:function` or `file.py:function`, (observation, env) -> text, in its place. A turn without an
    action is answered with a hint and earns `unreadable`. The seed is `extra_info.seed`, else the sample's
    index: the episodes of a group begin in the same state. `thread`: the environment gets a thread for
    itself, so that a slow one holds up no other episode; off, it runs in the worker's event loop, for
    environments that must all share one thread.
    """

    def __init__(
        self,
        *,
        id: str,
        arguments: str = "{}",
        actions: str = "",
        show: Literal["auto", "text", "observation"] = "auto",
        describe: str = "",
        unreadable: float = 0.0,
        thread: bool = True,
    ) -> None:
        self._id = id
        self._arguments = _object(arguments)
        self._unreadable = unreadable
        modes = _modes(id)
        self._mode = "ansi" if "ansi" in modes and show != "observation" else None
        if show == "text" and self._mode is None:
            raise ConfigError(f"{id} renders no text (modes: {', '.join(modes) or 'none'}); set show=auto")
        self._describe = load_object(describe, "description") if describe else None
        self._names = tuple(name.strip() for name in actions.split(",") if actions)
        self._thread = OwnThread("gymnasium") if thread else None
        self._env: Any = None

    async def reset(self, sample: Sample) -> Observation:
        return await self._called(lambda: self._begin(sample))

    async def step(self, message: Message) -> Observation:
        return await self._called(lambda: self._move(message.content))

    async def close(self) -> None:
        if self._thread:
            await self._thread.end(self._end)
        else:
            self._end()

    async def _called(self, function: Callable[[], Observation]) -> Observation:
        return await self._thread.run(function) if self._thread else function()

    def _begin(self, sample: Sample) -> Observation:
        import gymnasium

        extra = extra_info(sample)
        mode: dict[str, Any] = {"render_mode": self._mode} if self._mode else {}  # not all know the parameter
        self._env = gymnasium.make(self._id, **mode, **self._arguments | extra.get("gymnasium", {}))
        self._read = _reader(self._env.action_space, self._names)
        seen, _ = self._env.reset(seed=int(extra.get("seed", sample.row)))
        return text_observation(self._text(seen))

    def _move(self, text: str) -> Observation:
        try:
            action = self._read(text)
        except ValueError as error:
            return text_observation(str(error), self._unreadable)
        seen, reward, terminated, truncated, _ = self._env.step(action)
        return text_observation(self._text(seen), float(reward), bool(terminated or truncated))

    def _end(self) -> None:
        if self._env is not None:
            self._env.close()

    def _text(self, seen: Any) -> str:
        if self._describe is not None:
            return self._describe(seen, self._env.unwrapped)
        if self._mode is None:
            return str(seen)
        return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", self._env.render())).strip("\n")


def _reader(space: Any, names: Sequence[str]) -> Callable[[str], Any]:
    """A function that reads an action from a turn; its ValueError says what the model should write."""
    import gymnasium.spaces as spaces

    if isinstance(space, spaces.Text):
        return lambda text: text
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(f"actions of type {type(space).__name__} cannot be read from text")
    first = int(space.start)
    count = int(space.n)
    if names and len(names) != count:
        raise ConfigError(f"there are {count} actions, and {len(names)} names ({', '.join(names)}) for them")
    words = {str(first + number): first + number for number in range(count)}
    words |= {name.lower(): first + number for number, name in enumerate(names)}
    pattern = re.compile(
        r"(?<![\w.-])(" + "|".join(map(re.escape, words)) + r")(?![\w-]|\.\d)", re.IGNORECASE
    )
    hint = f"No action found. Answer with one of: {', '.join(names or words)}."

    def read(text: str) -> int:
        if not (found := pattern.findall(text)):
            raise ValueError(hint)
        return words[found[-1].lower()]

    return read


def _modes(id: str) -> list[str]:
    """The render modes of an environment. ConfigError: unknown id, or Gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("Gymnasium is not installed; pip install 'asyncrl[gymnasium]'") from None
    module, _, name = id.rpartition(":")
    try:
        if module:  # `make` imports it as well, `spec` does not
            importlib.import_module(module)
        creator: Any = gymnasium.spec(name).entry_point
        if isinstance(creator, str):
            creator = gymnasium.envs.registration.load_env_creator(creator)
    except (gymnasium.error.Error, ImportError, AttributeError) as error:
        raise ConfigError(f"no environment {id!r} ({one_line(error)})") from None
    return list(getattr(creator, "metadata", {}).get("render_modes", ()))


def _object(text: str) -> dict[str, Any]:
    with ConfigError.instead_of(ValueError, text=f"arguments {text!r} are no JSON"):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise ConfigError(f"arguments {text!r} are no JSON object")
    return found
