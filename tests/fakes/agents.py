"""Agents in an episode: a runner over a scripted engine, and a client that says what it wants in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp

from asyncrl.conversation.requests import IsUntrained
from asyncrl.engines.base import Request
from asyncrl.gateway import Agent, Endpoint, Gateway
from asyncrl.rewards import RewardInput
from asyncrl.rollout.agent_player import AgentPlayer, Agents
from asyncrl.rollout.episode_run import EpisodeRun
from asyncrl.rollout.episode_runner import Player
from tests.fakes.chat import FakeChat
from tests.fakes.episodes import Bench, read


def always_one(reward_input: RewardInput) -> float:
    return 1.0


class AgentBench(Bench):
    """Plays episodes of an agent. `script`: the text of a turn, from its prompt's. `limits`: see Limits."""

    earlier_seconds = 5.0

    def __init__(
        self,
        agent: Agent,
        script: Callable[[str], str] = lambda prompt: "42",
        reward: Any = always_one,
        *,
        limits: dict[str, Any] | None = None,
        chat: FakeChat | None = None,
        untrained: IsUntrained = lambda request: False,
        **options: Any,
    ) -> None:
        super().__init__(self.script, reward, chat, **{"agent": "a:b", **(limits or {}), **options})
        self.agent = agent
        self.text = script
        self.untrained = untrained
        self.gateway = Gateway()

    def script(self, request: Request) -> str:
        return self.text(read(request.ids))

    async def run(self, frames: Sequence[bytes] = (), **assigned: Any) -> None:
        self.shared = Agents(self.agent, self.gateway, self.untrained)
        await self.shared.gateway.start()
        try:
            await super().run(frames, **assigned)
        finally:
            await self.shared.close()

    def player(self, run: EpisodeRun) -> Player:
        return AgentPlayer(run, self.shared)


async def ask(
    endpoint: Endpoint,
    *messages: Any,
    path: str = "/chat/completions",
    headers: Mapping[str, str] = MappingProxyType({}),
    **body: Any,
) -> Any:
    """(status, body) of a request. A str is a user's message."""
    sent_messages = [
        {"role": "user", "content": message} if isinstance(message, str) else message for message in messages
    ]
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **headers}
    url = endpoint.base_url + path
    body = {"model": endpoint.model, "messages": sent_messages, **body}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
        return answer.status, await answer.json()


async def message(endpoint: Endpoint, *messages: Any, **body: Any) -> dict[str, Any]:
    """Return the answer's message. AssertionError: there is none."""
    status, reply = await ask(endpoint, *messages, **body)
    assert status == 200, reply
    return dict(reply["choices"][0]["message"])
