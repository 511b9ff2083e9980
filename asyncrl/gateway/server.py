"""The endpoint: one HTTP server per worker, on 127.0.0.1, for the agents of the episodes that it runs.

    agent program ──key, request──► Exchange ──► Host ──AgentReply | Refusal──► JSON, or a stream of events

A key is random and names one episode, as long as that runs. Errors are answered in OpenAI's format, and none
ends the server. A stream has the text of a turn as it is sampled; calls, and the end, when it is durable.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web

from asyncrl.conversation.branches import AgentRequest, Refusal
from asyncrl.errors import ConfigError, one_line
from asyncrl.gateway import completions, exchange, responses
from asyncrl.gateway.exchange import AgentReply, ApiError, Event, Exchange, OnDelta

log = logging.getLogger("asyncrl.gateway")

MAX_BODY = 16 << 20  # bytes of a request
READ_SECONDS = 60.0  # for a request to arrive
STOP_SECONDS = 2.0  # for connections to end when the server does

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True):
    """The way to an agent's model: the settings of any OpenAI client. `base_url` ends with /v1."""

    base_url: str
    api_key: str
    model: str = exchange.MODEL


class Host(Protocol):
    """An episode that answers an agent. Requests may overlap; one whose client has left is cancelled."""

    async def answer(
        self, ask: AgentRequest, count: int, on_delta: OnDelta | None
    ) -> Sequence[AgentReply] | Refusal:
        """`count` answers; `on_delta`, if given, is called as each grows. ConfigError: the template cannot
        write the messages. Anything else it raises ends the episode."""

    def lose(self, reply: AgentReply) -> None:
        """Take note that the client left before it got this answer; it may ask again."""


Answering = asyncio.Task[Sequence[AgentReply] | Refusal]


@dataclass(eq=False)
class _Admitted:
    host: Host
    running: set[Answering] = field(default_factory=set)


_Delta = tuple[int, str, str]
"""The number of an answer, and the new text of its reasoning and of its content."""


class Gateway:
    """`decode` gives the text of ids, for clients that ask for log-probs."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._admitted: dict[str, _Admitted] = {}  # by key
        self._logged: set[str] = set()  # unheeded parameters that were logged
        self._url = ""
        app = web.Application(middlewares=[_boundary], client_max_size=MAX_BODY)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", partial(self._exchange, completions.read))
        app.router.add_post("/v1/responses", partial(self._exchange, responses.read))
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
        return _json({"object": "list", "data": [exchange.model()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._by_key(request)
        return _json(exchange.model(request.match_info["name"]))  # requests may have any name for it

    async def _exchange(self, read: Callable[[bytes], Exchange], request: web.Request) -> web.StreamResponse:
        admitted = self._by_key(request)  # before the body is read
        async with asyncio.timeout(READ_SECONDS):
            asked = read(await request.read())
        deltas, stream = asyncio.Queue[_Delta](), bool(asked.request.stream)
        self._log_unheeded(exchange.unheeded(asked))
        on_delta: OnDelta | None = (lambda *what: deltas.put_nowait(what)) if stream else None
        task = asyncio.ensure_future(admitted.host.answer(asked.ask, asked.count, on_delta))
        admitted.running.add(task)
        task.add_done_callback(admitted.running.discard)
        try:
            if stream:
                return await self._stream(request, asked, task, deltas)
            replies = await _outcome(task)
            response = _json(asked.whole(replies, self._texts(asked, replies)))
            await response.prepare(request)
            await response.write_eof()
            return response
        except (asyncio.CancelledError, ConnectionError):  # the client has left
            if not task.cancel():
                for reply in _finished(task):
                    admitted.host.lose(reply)
            raise

    async def _stream(
        self, request: web.Request, asked: Exchange, task: Answering, deltas: asyncio.Queue[_Delta]
    ) -> web.StreamResponse:
        """Stream events as the text grows. An error before the first event is an answer of its own, and an
        event later."""
        delta = await _next(deltas, task)
        replies = await _outcome(task) if delta is None else ()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        await _send(response, asked.begin())
        while delta is not None:
            await _send(response, asked.delta(*delta))
            delta = await _next(deltas, task)
        try:
            replies = replies or await _outcome(task)
        except Exception as error:
            await _send(response, [("error", _error(request, error).body)])
        else:
            await _send(response, asked.end(replies, self._texts(asked, replies)))
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _texts(self, asked: Exchange, replies: Sequence[AgentReply]) -> list[list[str]]:
        """The text of each token, where log-probs are asked for."""
        return [
            [self._decode((token,)) for token in reply.turn.ids] if asked.logprobs else []
            for reply in replies
        ]

    def _by_key(self, request: web.Request) -> _Admitted:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        admitted = self._admitted.get(key.strip())
        if admitted is None or scheme.lower() != "bearer":
            raise ApiError(401, "this API key names no running episode", "invalid_api_key")
        return admitted

    def _log_unheeded(self, unheeded: Mapping[str, str]) -> None:
        """Log each parameter once."""
        for name in unheeded.keys() - self._logged:
            self._logged.add(name)
            log.warning("agents set %s, which %s", name, unheeded[name])


async def _outcome(task: Answering) -> Sequence[AgentReply]:
    """Wait for the answer to a request. ApiError when it was refused or failed."""
    await asyncio.wait([task])
    if task.cancelled():
        raise ApiError(410, "the episode is over", "episode_over")
    try:
        found = task.result()
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    if isinstance(found, Refusal):
        raise exchange.refused(found)
    return found


def _finished(task: Answering) -> Sequence[AgentReply]:
    """The answers, if the task has them."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return ()
    found = task.result()
    return () if isinstance(found, Refusal) else found


async def _next(deltas: asyncio.Queue[_Delta], task: Answering) -> _Delta | None:
    """Wait for the next new text; None when the task is done and all was streamed."""
    getting = asyncio.ensure_future(deltas.get())
    try:
        await asyncio.wait([getting, task], return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()


async def _send(response: web.StreamResponse, events: Iterable[Event]) -> None:
    for kind, data in events:
        named = f"event: {kind}\n".encode() if kind else b""
        await response.write(named + b"data: " + msgspec.json.encode(data) + b"\n\n")


@web.middleware
async def _boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes an answer."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has left
    except Exception as error:
        found = _error(request, error)
        return _json(found.body, found.status)


def _error(request: web.Request, error: Exception) -> ApiError:
    """Return the error that a client gets."""
    match error:
        case ApiError():
            return error
        case web.HTTPNotFound() | web.HTTPMethodNotAllowed():
            there = "POST /v1/chat/completions, POST /v1/responses, GET /v1/models, GET /v1/models/NAME"
            wrong = f"there is no {request.method} {request.path}; there are {there}"
            return ApiError(error.status, wrong, "unknown_url")
        case web.HTTPException():  # a body that is too large
            return ApiError(error.status, error.reason)
        case TimeoutError():
            return ApiError(408, f"no request within {READ_SECONDS:g} s")
    log.warning("a request failed: %s", one_line(error))
    return ApiError(500, one_line(error), kind="server_error")


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
