"""A gateway for a test, an episode that answers as the test says, and requests of any kind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from asyncrl.conversation.requests import AgentRequest, Refusal
from asyncrl.gateway import Endpoint, Gateway
from asyncrl.gateway.exchange import AgentReply, Listener
from asyncrl.gateway.images import TEXT_ONLY
from asyncrl.types import Generation, Message, StopReason, Turn, VersionSpan


class FakeHost:
    """An episode that answers with `result`, or raises it, when the gate is open.

    `streamed` is streamed first (None: the host has not even a place for the request). Only a second
    cancellation ends a `slow` host.
    """

    images = TEXT_ONLY

    def __init__(self, result: Any = "42", streamed: str | None = "", slow: bool = False) -> None:
        self.result = result
        self.streamed = streamed
        self.slow = slow
        self.requests: list[AgentRequest] = []
        self.lost: list[AgentReply] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()

        self.gate.set()
        self.cancelled = asyncio.Event()
        self.has_ended = False

    def lose(self, reply: AgentReply) -> None:
        self.lost.append(reply)

    async def count(self, ask: AgentRequest) -> int:
        return len(ask.messages[0].content)

    async def answer(
        self, ask: AgentRequest, count: int, listener: Listener | None, attempt: int = 0
    ) -> list[AgentReply] | Refusal:
        self.requests.append(ask)
        self.entered.set()

        if listener is not None and self.streamed is not None:
            listener.start(1)
            listener.delta(0, "", self.streamed)

        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            if self.slow:
                await asyncio.Event().wait()
            raise
        finally:
            self.has_ended = True

        if isinstance(self.result, Exception):
            raise self.result
        if isinstance(self.result, Refusal):
            return self.result
        turn = Turn(0, (1,), Generation((65, 66), (-0.5, -1.5), (VersionSpan(0, 2, 0, 0),), StopReason.STOP))
        message = Message("assistant", self.result)
        return [AgentReply(message, turn, 1, lambda ids: "".join(map(chr, ids)))] * count


def served(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Give the test a gateway, for at most 30 s."""

    def run(**fixtures: Any) -> None:
        async def main() -> None:
            gateway = Gateway()
            await gateway.start()
            try:
                async with asyncio.timeout(30):
                    await test(gateway, **fixtures)
            finally:
                await gateway.close()

        asyncio.run(main())

    parameters = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


async def fetch(
    endpoint: Endpoint, path: str, key: str | None = None, method: str = "GET", **options: Any
) -> tuple[int, Any]:
    """Send a request, by POST with `json` or `data`, and return (status, body); JSON is decoded."""
    headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}
    method = "POST" if options else method
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, endpoint.base_url + path, **options) as answer,
    ):
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())
