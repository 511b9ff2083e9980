"""What the tests of a server's traps share: raw requests, a server that stands still, waits for facts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.engines.base import EngineBusy, Request
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import PauseMode, ServerApi
from asyncrl.engines.sglang.loader import ServerLoader
from asyncrl.types import Generation, PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from tests.fakes import weights as fake_weights
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.sglang.conformance import MAX_LEN, VOCABULARY, ask, prompt
from tests.sglang.models import random_model

Answer = TypeVar("Answer")
DEADLINE = 240.0  # seconds for one test
PATIENCE = 120.0  # seconds for a server to come to what a test waits for
LONG = 900  # tokens: still running when whatever the test does has happened
WHOLE = 400  # tokens of a request that is waited for


class Kept:
    """A server with a supervisor's loader and one worker's client."""

    def __init__(
        self, api: ServerApi, loader: ServerLoader | None = None, max_len: int = MAX_LEN, **settings: Any
    ) -> None:
        config = sglang_config(max_len, **settings)
        self.api = api
        self.loader = loader or loader_of(api, config.weights)
        self.client = SGLangClient(api, config, VOCABULARY)
        self.generate = self.client.generate
        self.use = self.client.use

    async def load(self, ref: WeightsRef) -> None:
        await self.loader.load(ref)
        self.client.mark_version(ref.version)

    async def close(self) -> None:
        await self.client.close()
        await self.loader.close()


@asynccontextmanager
async def kept(server: SGLangServer, *keys: str, **settings: Any) -> AsyncIterator[Kept]:
    """Within the deadline of one test."""
    new_server = Kept(ServerApi(server.url, *keys), **settings)
    try:
        async with asyncio.timeout(DEADLINE):
            yield new_server
    finally:
        await new_server.close()


@asynccontextmanager
async def paused(server: ServerApi, mode: PauseMode) -> AsyncIterator[None]:
    await server.pause(mode)
    try:
        yield
    finally:
        await server.resume()


@contextmanager
def frozen(server: SGLangServer) -> Iterator[None]:
    """None of the server's processes moves."""
    processes = server.processes()
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110 (another process: there is no event)
            await asyncio.sleep(0.02)


async def idle(api: ServerApi) -> bool:
    """The server has nothing to do, and nothing in a queue."""
    load = await _load(api)
    return bool(load["num_running_reqs"] + load["num_waiting_reqs"] == 0)


async def running(api: ServerApi, count: int) -> bool:
    return bool((await _load(api))["num_running_reqs"] == count)


async def _load(api: ServerApi) -> dict[str, Any]:
    answer: dict[str, Any] = await api.get_struct("/v1/loads", dict[str, Any], 10.0)
    return dict(answer["loads"][0])


def raw(ids: tuple[int, ...], new: int, **fields: Any) -> dict[str, Any]:
    """A request as the client would not send it."""
    knobs = {"max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": knobs, "return_logprob": True, **fields}


async def sampling(engine: Kept, request: Request) -> asyncio.Task[Generation]:
    """Start a request, and return when the server samples it: a later one is done by then. A server whose
    queue is full for a moment is asked again."""
    async with asyncio.timeout(PATIENCE):
        while True:
            task = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(0)  # a task has sent nothing before it has run
            await accepted(lambda: engine.generate(ask(prompt(3, "gate"), 8, "gate")))
            if not task.done() or not isinstance(task.exception(), EngineBusy):
                return task


async def accepted(send: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer, asked for again while the server's queue is full."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await send()
            except EngineBusy:
                await asyncio.sleep(0.02)


def publish(directory: Path, version: int, family: str = "qwen2", **changes: object) -> WeightsRef:
    """Random weights, by default of the model that the family's servers serve."""
    model = random_model(family, VOCABULARY, version, **changes)
    return fake_weights.publish(model.state_dict(), directory, PolicyVersion(0, version))
