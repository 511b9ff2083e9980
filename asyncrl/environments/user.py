"""Simulated users: scripted replies from the data set, or a second model that plays a person."""

from __future__ import annotations

from typing import Literal

from asyncrl.environments.base import Environment, environments, text_observation
from asyncrl.remote import RemoteModel
from asyncrl.types import Message, Observation, Sample

USER_INSTRUCTIONS = """You play a user who talks with an assistant. Who you are and what you want:

{scenario}

Write only the user's next message: short, natural, in character. Give details when you are asked for them.
Never do the assistant's work. When you have what you wanted, or it is plain that you will not get it, write
{stop} and nothing else."""


@environments.register("scripted_user")
class ScriptedUser(Environment):
    """Reply with the strings of `extra_info.user` in order; the turn after the last reply ends the episode,
    as does a turn that contains `stop` (empty: no turn does)."""

    def __init__(self, *, stop: str = "") -> None:
        self._stop_text = stop

    async def reset(self, sample: Sample) -> Observation:
        replies = sample.extra_info.get("user")
        if not isinstance(replies, list) or not all(isinstance(text, str) and text for text in replies):
            raise ValueError(f"row {sample.row}: extra_info.user must be a list of non-empty strings")
        self._replies = iter(replies)
        return Observation()

    async def step(self, message: Message) -> Observation:
        if self._stop_text and self._stop_text in message.content:
            return Observation(done=True)
        reply = next(self._replies, None)
        return Observation(done=True) if reply is None else text_observation(reply)


@environments.register("simulated_user")
class SimulatedUser(Environment):
    """Let a model behind an OpenAI-compatible URL play a user; `extra_info.user` describes user and goal.

    The prompt's user messages count as messages of this user, who writes first if the prompt has none. A
    message that contains `stop` ends the episode. A reply has at most `max_tokens` tokens and is cut at
    `max_chars` characters. `timeout`: seconds per reply, repetitions included. Replies cannot be reproduced,
    so an interrupted episode starts again.
    """

    replay: Literal["reapply", "no"] = "no"

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api_key_env: str = "",
        timeout: float = 60.0,
        retries: int = 2,
        temperature: float = 0.7,
        max_tokens: int = 256,
        max_chars: int = 4096,
        stop: str = "###STOP###",
    ) -> None:
        self._model = RemoteModel(url, model, api_key_env, timeout, retries, temperature, max_tokens)
        self.timeout = timeout + 1.0  # the error of RemoteModel says more
        self._stop_text = stop
        self._max_chars = max_chars
        self._history: list[Message] = []

    async def reset(self, sample: Sample) -> Observation:
        scenario = sample.extra_info.get("user")
        if not isinstance(scenario, str) or not scenario:
            raise ValueError(
                f"row {sample.row}: extra_info.user must be text that describes the user and a goal"
            )

        instructions = USER_INSTRUCTIONS.replace("{stop}", self._stop_text).replace("{scenario}", scenario)
        roles = {"user": "assistant", "assistant": "user"}  # swapped, for the model that plays the user
        conversation = [
            Message(roles[message.role], message.content)
            for message in sample.prompt
            if message.role in roles
        ]
        self._history = [Message("system", instructions), *conversation]
        if conversation:
            return Observation()
        return await self._reply(Message("user", "Hello! How can I help you?"))

    async def step(self, message: Message) -> Observation:
        return await self._reply(Message("user", message.content))

    async def _reply(self, message: Message) -> Observation:
        self._history.append(message)
        text = (await self._model.chat(self._history)).strip()[: self._max_chars]
        if not text:
            raise ValueError("the model that plays the user returned an empty reply")
        self._history.append(Message("assistant", text))
        return text_observation(text, done=self._stop_text in text)
