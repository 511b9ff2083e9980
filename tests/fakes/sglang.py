"""A scripted server on a real socket: says what a test wants it to say, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.config import RunConfig, WeightsConfig, parse
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.loader import ServerLoader, Shapes
from asyncrl.engines.sglang.receiver import Receiver

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sglang_config(
    max_tokens: int,
    mode: str = "in_place",
    silence: float = 30.0,
    replay: bool = False,
    lora_rank: int = 0,
    model: str = "m",
) -> RunConfig:
    """What a client reads of a run's configuration."""
    required = {"name": "x", "model": {"path": model, "lora_rank": lora_rank}, "data": {"train": "d"}}
    rollout = {"max_tokens": max_tokens, "max_new_tokens": max_tokens}
    engine = {"name": "sglang", "request_timeout": silence}
    sections = {"rollout": rollout, "engine": engine, "trainer": {"router_replay": replay}}
    return parse(required | sections | {"weights": {"mode": mode, "adapters": lora_rank > 0}})


class Script:
    """`answers`: by path. `asked`: (path, body, Authorization) in the order of arrival."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, Any, str]] = []
        self.came = asyncio.Event()  # anything

    def says(self, path: str, status: int, content: bytes = b"") -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, body=content)

        self.answers[path] = answer

    def streams(self, *parts: bytes, then: asyncio.Event | None = None, cut: bool = False) -> None:
        """`/generate` sends these bytes, waits for `then`, and ends or cuts the connection."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            if then is not None:
                await then.wait()

            if cut:
                assert request.transport is not None
                request.transport.abort()

            return response

        self.answers["/generate"] = answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = msgspec.json.decode(content) if content else None
        self.requests.append((request.path, body, request.headers.get("Authorization", "")))
        self.came.set()
        return await self.answers[request.path](request)


@asynccontextmanager
async def scripted() -> AsyncIterator[Script]:
    script = Script()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script._answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()

    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield script
    finally:
        await runner.cleanup()


def event(
    ids: Sequence[int], total: int, label: str = "e0-v0", finish: dict[str, Any] | None = None, **meta: Any
) -> bytes:
    """One event of a stream, in which the token i has the log-prob -i / 2."""
    meta_info: dict[str, Any] = {
        "finish_reason": finish,
        "weight_version": label,
        "completion_tokens": total,
        "output_token_logprobs": [[-token / 2, token, None] for token in ids],
    }

    if finish is not None:
        meta_info["weight_versions"] = [{"version": label, "start": 0, "end": total}]
    body = {"text": "", "output_ids": list(ids), "meta_info": meta_info | meta}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def loader_of(
    api: ServerApi,
    config: WeightsConfig,
    cache: Path | None = None,
    receiver: Receiver | None = None,
    model_shapes: Shapes | None = None,
) -> ServerLoader:
    """As a supervisor has it; without more, it is given whole versions in files."""
    directory = cache or Path("/dev/null/cache")
    return ServerLoader(api, config, directory, receiver or Receiver(api, 0, 1), model_shapes)
