"""Agents in an episode: a runner over a scripted engine, and a client that says what it wants in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from asyncrl.conversation.turns import rows_of
from asyncrl.engines.base import Request
from asyncrl.episodes.scoring import Scorer
from asyncrl.gateway import Agent, Endpoint, Gateway
from asyncrl.rewards import RewardInput
from asyncrl.rewards.loading import in_loop
from asyncrl.rollout.agent_player import AgentPlayer, Agents
from asyncrl.rollout.context import EpisodeContext
from asyncrl.rollout.episode_runner import EpisodeRunner
from asyncrl.rollout.samplers import LocalSampler
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.types import Turn
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Assign, Failed, Finished, Generated, Record
from asyncrl.wire.outbox import Outbox
from tests.fakes.chat import FakeChat, rules, sample
from tests.fakes.engine import ScriptedEngine
from tests.fakes.loop import Intervals, settle

SECONDS = 60.0  # that a whole episode of a test may take


def read(ids: Sequence[int]) -> str:
    """The text of a prompt."""
    return "".join(chr(token) for token in ids if token > 3)


def one(given: RewardInput) -> float:
    return 1.0


class AgentBench:
    """Plays episodes of an agent. `script`: the text of a turn, from its prompt's. `limits`: see Limits."""

    def __init__(
        self,
        agent: Agent,
        script: Callable[[str], str] = lambda prompt: "42",
        reward: Any = one,
        *,
        limits: dict[str, Any] | None = None,
        chat: FakeChat | None = None,
        **options: Any,
    ) -> None:
        self.agent, self.auto_ack, self.posted = agent, True, asyncio.Event()
        self.lane, self.sample = "train", sample()
        self.sent: list[Record] = []
        self.frames: list[list[bytes]] = []
        self.engine = ScriptedEngine(lambda request: self.script(request))
        self.text = script
        self.waits = Waits()
        self.outbox = Outbox(self._send)
        config = {"episode_timeout": SECONDS, "agent": "a:b", **(limits or {}), **options}
        made = rules(**config, chat=chat)
        self.context = EpisodeContext(
            made, Scorer([in_loop(reward)], 60.0), self.outbox, self.waits, oldest=lambda: 0
        )

    def script(self, request: Request) -> str:
        return self.text(read(request.ids))

    async def _send(self, record: Record, frames: Sequence[bytes]) -> None:
        self.sent.append(record)
        self.frames.append(list(frames))
        self.posted.set()
        if self.auto_ack:
            self.outbox.ack(record.seq)

    def play(self, frames: Sequence[bytes] = ()) -> Finished | Failed:
        """One episode, to its end."""
        asyncio.run(self.run(frames))
        end = self.sent[-1]
        assert isinstance(end, Finished | Failed)
        return end

    async def run(self, frames: Sequence[bytes] = ()) -> None:
        lane = LocalSampler(
            "train", lambda: self.engine, self.waits, BusyTimer(Intervals()), Intervals(), 60.0
        )
        lane.engine = self.engine
        shared = Agents(self.agent, Gateway(self.context.rules.chat.decode))
        await shared.gateway.start()
        service = asyncio.create_task(self.outbox.run())
        assign = Assign(1, Attempt("u", 1), self.sample, self.lane, temperature=1.0, key=99, seconds=5.0)
        try:
            async with asyncio.timeout(SECONDS):
                runner = EpisodeRunner(self.context, lambda run: AgentPlayer(run, shared))
                await runner.run(assign, frames, lane)
                await settle()
        finally:
            service.cancel()
            await shared.close()

    @property
    def turns(self) -> list[Turn]:
        """As they were posted."""
        pairs = zip(self.sent, self.frames, strict=True)
        return [msgspec.msgpack.decode(f[0], type=Turn) for r, f in pairs if isinstance(r, Generated)]

    @property
    def rows(self) -> list[str]:
        return [read(ids) for ids in rows_of(self.turns)]

    @property
    def record(self) -> list[bytes]:
        """The turns as an Assign brings them."""
        pairs = zip(self.sent, self.frames, strict=True)
        return [part for r, f in pairs if isinstance(r, Generated) for part in (f[0], b"")]


async def ask(endpoint: Endpoint, *messages: Any, path: str = "/chat/completions", **body: Any) -> Any:
    """(status, body) of a request. A str is a user's message."""
    said = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = endpoint.base_url + path
    body = {"model": endpoint.model, "messages": said, **body}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
        return answer.status, await answer.json()


async def message(endpoint: Endpoint, *messages: Any, **body: Any) -> dict[str, Any]:
    """The answer's message. AssertionError where there is none."""
    status, found = await ask(endpoint, *messages, **body)
    assert status == 200, found
    return dict(found["choices"][0]["message"])
