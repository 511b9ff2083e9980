"""Gymnasium's environments: a turn is an action, an observation is text or the rendered image.

prompt ──reset(seed)──► text ──turn: "... left"──► action 0 ──env.step──► text, reward, done
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from asyncrl.environments.base import Environment, environments, image_observation, text_observation
from asyncrl.errors import ConfigError, one_line
from asyncrl.isolation.calls import OwnThread
from asyncrl.registry import load_object
from asyncrl.types import Message, Observation, Sample

# Coloured text marks the agent's position, and is shown in brackets.
_COLOURED_TEXT = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


@environments.register("gymnasium")
class Gymnasium(Environment):
    """Play an environment whose actions are discrete, or text; every step's reward falls on the step's turn.

    `id`: the environment's name for `gymnasium.make` (`module:Name-v0` imports the module first).
    `arguments`: further arguments, a JSON object; the sample's `extra_info.gymnasium` adds to them.
    `actions`: names of the actions in order, separated by commas; the last action name or number in a turn
    is the action taken. `show`: the rendered text, the observation or the rendered image for the model
    (`auto`: the text if the environment renders text). `describe`: `module:function` or `file.py:function`,
    (observation, env) -> text, replaces text and observation, and comes before an image. A turn without an
    action is answered with a hint and earns `unreadable`. The seed is `extra_info.seed`, or else the sample's
    index: the episodes of a group begin in the same state. `thread`: run each environment in a separate
    thread, so that slow environments delay no other episode; off: run in the worker's event loop, for
    environments that must all share one thread."""

    def __init__(
        self,
        *,
        id: str,
        arguments: str = "{}",
        actions: str = "",
        show: Literal["auto", "text", "observation", "image"] = "auto",
        describe: str = "",
        unreadable: float = 0.0,
        thread: bool = True,
    ) -> None:
        self._id = id
        self._arguments = _read_json_object(arguments)
        self._unreadable = unreadable

        render_modes = _find_render_modes(id)
        self._render_mode: str | None = None
        if show == "image":
            self._render_mode = "rgb_array"
        elif show == "text" or (show == "auto" and "ansi" in render_modes):
            self._render_mode = "ansi"

        if self._render_mode is not None and self._render_mode not in render_modes:
            raise ConfigError(
                f"{id} cannot render {'an image' if show == 'image' else 'text'} (render modes: "
                f"{', '.join(render_modes) or 'none'}); set show=auto"
            )

        self.needs_images = show == "image" and not describe
        self._describe = load_object(describe, "description") if describe else None
        self._action_names = tuple(name.strip() for name in actions.split(",") if actions)
        self._thread = OwnThread("gymnasium") if thread else None
        self._environment: Any = None

    async def reset(self, sample: Sample) -> Observation:
        return await self._call_environment(lambda: self._begin_episode(sample))

    async def step(self, message: Message) -> Observation:
        return await self._call_environment(lambda: self._take_action(message.content))

    async def close(self) -> None:
        if self._thread:
            await self._thread.end_thread(self._close_environment)
        else:
            self._close_environment()

    async def _call_environment(self, function: Callable[[], Observation]) -> Observation:
        return await self._thread.run(function) if self._thread else function()

    def _begin_episode(self, sample: Sample) -> Observation:
        import gymnasium

        extra = sample.extra_info
        # Some environments lack the parameter.
        render_arguments: dict[str, Any] = {"render_mode": self._render_mode} if self._render_mode else {}
        self._environment = gymnasium.make(
            self._id, **render_arguments, **self._arguments | extra.get("gymnasium", {})
        )
        self._read_action = _make_action_reader(self._environment.action_space, self._action_names)

        observation, _ = self._environment.reset(seed=int(extra.get("seed", sample.row)))
        return self._observe(observation)

    def _take_action(self, text: str) -> Observation:
        try:
            action = self._read_action(text)
        except ValueError as error:
            return text_observation(str(error), self._unreadable)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return self._observe(observation, float(reward), bool(terminated or truncated))

    def _close_environment(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _observe(self, observation: Any, reward: float = 0.0, done: bool = False) -> Observation:
        description = ""
        if self._describe is not None:
            description = self._describe(observation, self._environment.unwrapped)

        if self._render_mode == "rgb_array":
            import PIL.Image

            image = PIL.Image.fromarray(self._environment.render())
            content = [description, image] if description else [image]
            return image_observation(*content, reward=reward, done=done)
        if self._describe is not None:
            return text_observation(description, reward, done)
        if self._render_mode is None:
            return text_observation(str(observation), reward, done)

        text = _ESCAPE_SEQUENCE.sub("", _COLOURED_TEXT.sub(r"[\1]", self._environment.render()))
        return text_observation(text.strip("\n"), reward, done)


def _make_action_reader(action_space: Any, action_names: Sequence[str]) -> Callable[[str], Any]:
    """Make a function that reads an action from a turn; its ValueError tells the model which text to
    write."""
    import gymnasium.spaces as spaces

    if isinstance(action_space, spaces.Text):
        return lambda text: text
    if not isinstance(action_space, spaces.Discrete):
        raise ConfigError(f"actions of type {type(action_space).__name__} cannot be read from text")

    first_action = int(action_space.start)
    action_count = int(action_space.n)
    if action_names and len(action_names) != action_count:
        raise ConfigError(
            f"actions must list {action_count} names, one for each action, not {len(action_names)} "
            f"({', '.join(action_names)})"
        )

    actions_by_word = {str(first_action + number): first_action + number for number in range(action_count)}
    actions_by_word |= {name.lower(): first_action + number for number, name in enumerate(action_names)}
    pattern = re.compile(
        r"(?<![\w.-])(" + "|".join(map(re.escape, actions_by_word)) + r")(?![\w-]|\.\d)", re.IGNORECASE
    )

    hint = f"No action found. Answer with one of: {', '.join(action_names or actions_by_word)}."

    def read_action(text: str) -> int:
        mentioned_words = pattern.findall(text)
        if not mentioned_words:
            raise ValueError(hint)
        return actions_by_word[mentioned_words[-1].lower()]

    return read_action


def _find_render_modes(id: str) -> list[str]:
    """Find the render modes of an environment. ConfigError: unknown id, or Gymnasium is not installed."""
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("Gymnasium is not installed; pip install 'asyncrl[gymnasium]'") from None

    module_name, _, environment_name = id.rpartition(":")
    try:
        if module_name:  # unlike `make`, `spec` does not import the module
            importlib.import_module(module_name)
        creator: Any = gymnasium.spec(environment_name).entry_point
        if isinstance(creator, str):
            creator = gymnasium.envs.registration.load_env_creator(creator)
    except (gymnasium.error.Error, ImportError, AttributeError) as error:
        raise ConfigError(f"unknown environment {id!r} ({one_line(error)})") from None

    return list(getattr(creator, "metadata", {}).get("render_modes", ()))


def _read_json_object(text: str) -> dict[str, Any]:
    with ConfigError.instead_of(ValueError, text=f"arguments must be a JSON object, not {text!r}"):
        json_object = json.loads(text)
    if not isinstance(json_object, dict):
        raise ConfigError(f"arguments must be a JSON object, not {text!r}")
    return json_object
