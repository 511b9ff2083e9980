"""Has one server give up its memory on the devices, and take the memory again with a whole version.

    pause ──► release KV cache and weights ──► … ──► resume weights ──► load ──► resume KV cache ──► continue

Requests under way stay open, with their tokens. SGLang ends if memory is released twice, or resumed twice. So
this module remembers what the server holds. If a step fails, or the answer to a step is lost, the server's
state is not known any more, and the server must be replaced.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext

from asyncrl.engines.sglang.http import ServerApi


class ServerSleep:
    """The sleep of the server at `api.url`. `asleep`: the server holds neither KV cache nor weights.
    `unknown_reason`: why the server's state is not known; empty if the state is known."""

    def __init__(self, api: ServerApi) -> None:
        self.asleep = False
        self.unknown_reason = ""
        self._api = api

    async def sleep(self) -> None:
        """Have the server give up KV cache and weights, unless asleep. Raises EngineError, and sets
        `unknown_reason`, if a step fails."""
        if not self.asleep:
            with self._unknown_until_done("falling asleep"):
                await self._api.pause("retract")  # a release while requests run would end the server
                await self._api.release_memory()
                self.asleep = True

    def waking(self) -> AbstractContextManager[None]:
        """Enter this context to wake the server, if asleep. A failure in the body sets `unknown_reason`."""
        return self._unknown_until_done("waking") if self.asleep else nullcontext()

    @asynccontextmanager
    async def waking_load(self) -> AsyncIterator[None]:
        """Enter this context to load whole weights into a sleeping server, which then goes on."""
        await self._api.resume_memory("weights")
        yield
        await self._api.resume_memory("kv_cache")
        await self._api.resume()
        self.asleep = False

    @contextmanager
    def _unknown_until_done(self, activity: str) -> Iterator[None]:
        problem = f"{activity} did not finish, so the server's state is unknown"
        self.unknown_reason = f"server {self._api.url}: {problem}"
        yield
        self.unknown_reason = ""
