"""An environment from the episode's side: calls run one after another, with a deadline, and every answer is
checked.

TurnPlayer ──► EpisodeEnvironment.step ──► call_user ──► Environment.step ──► Observation | EnvironmentFailed

The content of an observation's message may be an image, or a list of texts and images; recorded messages have
text and references to the images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec

from asyncrl.environments import Environment
from asyncrl.errors import describe, users_code
from asyncrl.isolation.calls import CallTimeout, call_user, in_thread
from asyncrl.rollout.episode_runner import EnvironmentFailed
from asyncrl.runtime.activity import Waits
from asyncrl.tools.toolbox import AddImage
from asyncrl.types import Message, Observation, Sample
from asyncrl.values import encodable, finite_number
from asyncrl.vision.content import Content, read_content
from asyncrl.vision.layout import ImageLayout

T = TypeVar("T")

CLOSE_SECONDS = 5.0  # deadline for closing an environment
MAX_MESSAGES = 64  # messages of an observation
MAX_NAME_LENGTH = 256  # characters of a role, a name or an id


class EpisodeEnvironment:
    """The environment of an episode. `default_limit`: seconds for each answer, if the environment states no
    limit. A call that takes longer is cancelled and abandoned. `image_layout`: how the model reads images;
    None for a model that reads text only. `add_image` takes images of observations into the episode. Only
    EnvironmentFailed is raised."""

    def __init__(
        self,
        make_environment: Callable[[], Environment],
        default_limit: float,
        waits: Waits,
        image_layout: ImageLayout | None = None,
        add_image: AddImage = lambda image: image.ref,
    ) -> None:
        try:
            with users_code():
                self.environment = make_environment()
        except Exception as error:
            raise EnvironmentFailed(f"the environment cannot be created: {describe(error)}") from error

        self._default_limit = default_limit
        self._waits = waits
        self._image_layout = image_layout
        self._add_image = add_image
        self._call_lock = asyncio.Lock()  # a cancelled call may still be ending

    async def reset(self, sample: Sample) -> Observation:
        async def reset_and_read() -> Observation:
            return await self._read_observation(await self.environment.reset(sample))

        return await self._call_environment("reset", reset_and_read)

    async def step(self, message: Message) -> Observation:
        async def step_and_read() -> Observation:
            return await self._read_observation(await self.environment.step(message))

        loop_time = asyncio.get_running_loop().time
        started_at = loop_time()
        observation = await self._call_environment("step", step_and_read)
        return msgspec.structs.replace(observation, seconds=loop_time() - started_at)

    async def cut_short(self, unanswered: Message | None) -> float:
        async def read_reward() -> float:
            return finite_number("the reward", await self.environment.cut_short(unanswered))

        return await self._call_environment("cut_short", read_reward)

    async def close(self) -> str:
        """Close the environment; return why closing failed, or ''. Bounded in time, and never raises."""
        try:
            await call_user(lambda: self._locked_call(self.environment.close), CLOSE_SECONDS)
        except Exception as error:
            return describe(error)
        return ""

    async def _call_environment(self, method_name: str, function: Callable[[], Awaitable[T]]) -> T:
        limit = self.environment.timeout or self._default_limit
        with self._waits.wait_named("the environment", limit):
            try:
                with users_code():
                    answer: T = await call_user(lambda: self._locked_call(function), limit)
                    return answer
            except CallTimeout as call_timeout:
                text = (
                    f"the environment's {method_name} did not finish within {limit:g} s"
                    f"{call_timeout.last_wait}"
                )
                raise EnvironmentFailed(text) from None
            except Exception as error:
                raise EnvironmentFailed(
                    f"the environment's {method_name} failed: {describe(error)}"
                ) from error

    async def _locked_call(self, function: Callable[[], Awaitable[T]]) -> T:
        async with self._call_lock:
            return await function()

    async def _read_observation(self, answer: Any) -> Observation:
        """Return an observation that can be recorded: rewards may be numpy numbers, and messages a list.
        TypeError, ValueError or ImageError."""
        if not isinstance(answer, Observation):
            raise TypeError(f"expected an Observation, not {type(answer).__name__}")

        messages = tuple(islice(answer.messages, MAX_MESSAGES + 1))
        if len(messages) > MAX_MESSAGES:
            raise ValueError(f"an Observation can have at most {MAX_MESSAGES} messages")

        return Observation(
            messages=tuple([await self._read_message(message) for message in messages]),
            reward=finite_number("the reward", answer.reward),
            done=bool(answer.done),
        )

    async def _read_message(self, message: Any) -> Message:
        """Check a message, and take its images into the episode; content and reasoning are cut later, where
        the model's tokens are counted."""
        if not isinstance(message, Message):
            raise TypeError(f"the messages in an Observation must be Messages, not {type(message).__name__}")
        if message.tool_calls:
            raise ValueError(
                "the messages in an Observation cannot contain tool calls; only the model makes tool calls"
            )
        if message.images:
            raise ValueError(
                "the images of a message in an Observation must be in its content, a list of texts and images"
            )

        content = Content(message.content)
        if not isinstance(message.content, str):
            read_call = partial(read_content, message.content, self._image_layout)
            content = await in_thread(read_call, "image")

        return Message(
            _checked_name("role", message.role),
            encodable(content.text),
            tool_call_id=_checked_name("tool_call_id", message.tool_call_id),
            name=_checked_name("name", message.name),
            reasoning=_checked_text("reasoning", message.reasoning),
            images=tuple(map(self._add_image, content.images)),
        )


def _checked_name(key: str, value: Any) -> str:
    checked_name = _checked_text(key, value)
    if len(checked_name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"the {key} of a message can have at most {MAX_NAME_LENGTH} characters, not {len(checked_name)}"
        )
    return checked_name


def _checked_text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {key} of a message must be text, not {type(value).__name__}")
    return encodable(value)
