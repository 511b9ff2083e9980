"""The endpoint: one HTTP server per worker, on 127.0.0.1, for the agents of the episodes that it runs.

    agent program ──key, request──► Host ──AgentReply | Refusal──► JSON, or a stream of events

A key is random and names one episode, as long as that runs. Errors are answered in OpenAI's format, and none
ends the server. A stream of events is sent when the turn is complete.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from aiohttp import web

from asyncrl.conversation.branches import AgentRequest, Refusal
from asyncrl.errors import ConfigError, one_line
from asyncrl.gateway import wire
from asyncrl.gateway.wire import AgentReply, ApiError, ChatRequest

log = logging.getLogger("asyncrl.gateway")

MAX_BODY = 16 << 20  # bytes of a request
READ_SECONDS = 60.0  # for a request to arrive
STOP_SECONDS = 2.0  # for connections to end when the server does

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True):
    """How an agent reaches its model: the settings of any OpenAI client. `base_url` ends with /v1."""

    base_url: str
    api_key: str
    model: str = wire.MODEL


class Host(Protocol):
    """An episode that answers an agent. Requests may overlap; one whose client has left is cancelled."""

    async def answer(self, ask: AgentRequest) -> AgentReply | Refusal:
        """ConfigError: the template cannot write the messages. Anything else it raises ends the episode."""

    def lose(self, reply: AgentReply) -> None:
        """Called when the client left before it got this answer; it may ask again."""


@dataclass(eq=False)
class _Admitted:
    host: Host
    running: set[asyncio.Task[AgentReply | Refusal]] = field(default_factory=set)


class Gateway:
    """`decode` gives the text of ids, for clients that ask for log-probs."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._admitted: dict[str, _Admitted] = {}  # by key
        self._logged: set[str] = set()  # ignored parameters that were logged
        self._url = ""
        app = web.Application(middlewares=[_boundary], client_max_size=MAX_BODY)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS
        )

    async def start(self) -> None:
        """Listen on a free port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def admit(self, host: Host) -> AsyncIterator[Endpoint]:
        """The agent is served while the body runs. Requests under way at its end are cancelled."""
        key, admitted = secrets.token_urlsafe(32), _Admitted(host)
        self._admitted[key] = admitted
        try:
            yield Endpoint(self._url, key)
        finally:
            del self._admitted[key]
            for task in admitted.running:
                task.cancel()
            await asyncio.gather(*admitted.running, return_exceptions=True)

    # -- requests ------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._by_key(request)
        return _json(wire.models())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        admitted = self._by_key(request)  # before the body is read
        async with asyncio.timeout(READ_SECONDS):
            body = await request.read()
        chat = wire.read_request(body)
        self._log_ignored(chat.ignored)
        task = asyncio.ensure_future(admitted.host.answer(wire.agent_request(chat)))
        admitted.running.add(task)
        task.add_done_callback(admitted.running.discard)
        try:
            return await self._send(request, chat, await _outcome(task))
        except (asyncio.CancelledError, ConnectionError):  # the client has left
            if not task.cancel() and (reply := _finished(task)) is not None:
                admitted.host.lose(reply)
            raise

    async def _send(self, request: web.Request, chat: ChatRequest, reply: AgentReply) -> web.StreamResponse:
        texts = [self._decode((token,)) for token in reply.turn.ids] if chat.logprobs else []
        if chat.stream:
            return await _stream(request, wire.chunks(chat, reply, texts))
        response = _json(wire.completion(chat, reply, texts))
        await response.prepare(request)
        await response.write_eof()
        return response

    def _by_key(self, request: web.Request) -> _Admitted:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        admitted = self._admitted.get(key.strip())
        if admitted is None or scheme.lower() != "bearer":
            raise ApiError(401, "this API key names no running episode", "invalid_api_key")
        return admitted

    def _log_ignored(self, ignored: list[str]) -> None:
        """Once per parameter."""
        for name in [name for name in ignored if name not in self._logged]:
            self._logged.add(name)
            log.warning("agents set %s, which is ignored: sampling is the run's (rollout.temperature)", name)


async def _outcome(task: asyncio.Task[AgentReply | Refusal]) -> AgentReply:
    """Wait for the answer to a request. ApiError when it was refused or failed."""
    await asyncio.wait([task])
    if task.cancelled():
        raise ApiError(410, "the episode is over", "episode_over")
    try:
        found = task.result()
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    if isinstance(found, Refusal):
        raise wire.refused(found)
    return found


def _finished(task: asyncio.Task[AgentReply | Refusal]) -> AgentReply | None:
    """The answer, if the task has one."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    found = task.result()
    return found if isinstance(found, AgentReply) else None


async def _stream(request: web.Request, chunks: Iterable[dict[str, Any]]) -> web.StreamResponse:
    """Server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes an answer."""
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.body, error.status)
    except web.HTTPException as error:  # no such path, no such method, a body that is too large
        return _json(ApiError(error.status, error.reason).body, error.status)
    except TimeoutError:
        return _json(ApiError(408, f"no request within {READ_SECONDS:g} s").body, 408)
    except ConnectionError:
        raise  # the client has left
    except Exception as error:
        log.warning("a request failed: %s", one_line(error))
        return _json(ApiError(500, one_line(error), kind="server_error").body, 500)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
