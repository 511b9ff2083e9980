"""Has one server give up what it holds on its devices, and take it again with a whole version.

    pause ──► release KV cache and weights ──► … ──► resume weights ──► load ──► resume KV cache ──► continue

Requests under way stay open, with their tokens. SGLang ends if memory is released twice, or resumed twice. So
what the server holds is remembered here. If one of these steps fails, or its answer is lost, that is not
known any more, and the server must be replaced.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext

from asyncrl.engines.sglang.http import ServerApi


class ServerSleep:
    """`asleep`: the server at `api.url` holds neither KV cache nor weights. `unknown`: why it
    is not known what the server holds; empty: it is known."""

    def __init__(self, api: ServerApi) -> None:
        self.asleep = False
        self.unknown = ""
        self._api = api

    async def sleep(self) -> None:
        """Give up KV cache and weights, if it is awake. Raises EngineError, and sets `unknown`, if a step
        fails."""
        if not self.asleep:
            with self._unknown_until_done("falling asleep"):
                await self._api.pause("retract")  # a release while requests run would end the server
                await self._api.release_memory()
                self.asleep = True

    def waking(self) -> AbstractContextManager[None]:
        """The body wakes the server, if it sleeps. Where that fails, see `unknown`."""
        return self._unknown_until_done("waking") if self.asleep else nullcontext()

    @asynccontextmanager
    async def waking_load(self) -> AsyncIterator[None]:
        """The body loads whole weights into a server that sleeps, which then goes on."""
        await self._api.resume_memory("weights")
        yield
        await self._api.resume_memory("kv_cache")
        await self._api.resume()
        self.asleep = False

    @contextmanager
    def _unknown_until_done(self, activity: str) -> Iterator[None]:
        self.unknown = f"server {self._api.url}: {activity} was not finished; what it holds is not known"
        yield
        self.unknown = ""
