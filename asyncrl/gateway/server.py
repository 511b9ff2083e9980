"""The endpoint: one HTTP server per worker, for the agents of the episodes that it runs.

    agent program ──key, request──► Exchange ──► Host ──AgentReply | Refusal──► JSON, or a stream of events

A key is random and names one episode, as long as that runs. Each path has its dialect, in which errors are
answered, too; none ends the server. A stream has the text of a turn as it is sampled; calls, and the end,
when it is durable. It says something every BEAT_SECONDS, or clients would take a long turn for a dead one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec.structs import replace

from asyncrl.conversation.requests import AgentRequest, Refusal
from asyncrl.errors import AsyncrlError, ConfigError, ProtocolError, one_line
from asyncrl.gateway import completions, messages, responses, text_completions
from asyncrl.gateway import exchange as exchanges
from asyncrl.gateway.connections import READ_BYTES, Connections
from asyncrl.gateway.exchange import AgentReply, ApiDialect, ApiError, Event, Exchange, Listener, written
from asyncrl.values import in_short

log = logging.getLogger("asyncrl.gateway")

MAX_BODY = 16 << 20  # bytes of a request
MAX_PARTS = 300_000  # brackets and commas of a request, texts included: what it takes to read its JSON
READ_SECONDS = 60.0  # for a request to arrive
LINGER_SECONDS = 1.0  # for a client to read why its request is not read to the end
BODIES = 4  # of an episode's requests that are read at once
STOP_SECONDS = 2.0  # for connections to end when the server does
BEAT_SECONDS = 8.0  # in which a stream says something
# Likewise of an answer in one piece: proxies wait for 60 s, clients for 300 s. An error before is told.
SILENT_SECONDS = 45.0
DIALECTS = {
    "/v1/chat/completions": completions.DIALECT,
    "/v1/responses": responses.DIALECT,
    "/v1/messages": messages.DIALECT,
    "/v1/completions": text_completions.DIALECT,
}
COUNT = "/v1/messages/count_tokens"
MOST_UNANSWERED = 8  # requests of an episode whose unanswered tries are remembered
OTHER_BYTES = bytes(set(range(256)) - set(b"[{,"))
# By its first words opencode and qwen-code know that they have to make their history shorter.
TOO_LARGE = f"Request Entity Too Large: the request has more than {MAX_BODY >> 20} MiB; send less"
UNREAD_ERRORS = (
    HttpProcessingError,
    ConnectionError,
)  # aiohttp's: for broken requests, for clients that left
RETRIES = ("x-stainless-retry-count", "x-retry-count", "x-retry-attempt")  # headers with a number

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True):
    """The way to an agent's model: the settings of any OpenAI client. `base_url` ends with /v1; clients of
    Anthropic's API want `anthropic_url`, without it. `max_tokens`: of a row, prompt included. `seconds`:
    that the episode had left at first, on its `clock`."""

    base_url: str
    api_key: str
    model: str = exchanges.MODEL
    max_tokens: int = 0
    seconds: float = math.inf

    @property
    def anthropic_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def clock(self) -> float:
        """Return the episode's time in seconds, which stands while a turn waits for a scorer."""
        gateway = _gateways.get(self.api_key)
        return gateway.admitted[self.api_key].clock() if gateway is not None else time.monotonic()

    async def through(self, listener: socket.socket) -> Endpoint:
        """Serve the episode on this listening socket, too, and return the endpoint with its address; in any
        event loop. The socket, which may be of another network namespace, is the gateway's from now on: it
        and its connections are closed when the episode is over. AsyncrlError if that is so already."""
        gateway = _gateways.get(self.api_key)
        if gateway is None:
            raise AsyncrlError("the episode of this endpoint is over, or another process runs it")
        served = asyncio.run_coroutine_threadsafe(gateway.listen(self.api_key, listener), gateway.loop)
        return replace(self, base_url=await asyncio.wrap_future(served))

    async def wait_for_first_request(self) -> None:
        """Wait for the agent's first request for a turn, in any event loop; for ever, where no gateway of
        this process runs the episode."""
        gateway = _gateways.get(self.api_key)
        admitted = gateway.admitted[self.api_key] if gateway is not None else None
        first_request = Future[None]() if admitted is None else admitted.first_request
        await asyncio.shield(asyncio.wrap_future(first_request))


_gateways: dict[str, Gateway] = {}  # by the keys of episodes that run in this process


class Host(Protocol):
    """An episode that answers an agent. Requests may overlap; one whose client has left is cancelled."""

    async def answer(
        self, ask: AgentRequest, count: int, listener: Listener | None, attempt: int = 0
    ) -> Sequence[AgentReply] | Refusal:
        """`count` answers; `listener`, if given, hears of them as they grow. `attempt`: the number of the
        try, as the client counts them; 0 for the first. ConfigError: the template cannot write the messages.
        Anything else it raises ends the episode."""

    async def count(self, ask: AgentRequest) -> int:
        """The tokens of a request's prompt, which is not answered. ConfigError as above."""

    def lose(self, reply: AgentReply) -> None:
        """Take note that the client left before it got this answer; it may ask again."""


Answering = asyncio.Task[Sequence[AgentReply] | Refusal]


@dataclass(eq=False)
class OpenRequest:
    """A request for turns, until it is answered, or its client has left and nothing of it is under way.
    `attempt`: the number of the try, as the client counts them. `retry_noted`: it is noted that a further
    try may come, or this is followed by one."""

    ask: AgentRequest
    attempt: int
    request: web.Request
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    retry_noted: bool = False

    @property
    def abandoned(self) -> bool:
        return _is_gone(self.request)

    def abandon(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


@dataclass(eq=False)
class _Admitted:
    """An episode that runs. `unanswered`: tries of requests that ended without an answer and that no further
    try has followed, by request and number."""

    host: Host
    clock: Callable[[], float]
    first_request: Future[None] = field(default_factory=Future)  # done with the first request for a turn
    running: set[Answering] = field(default_factory=set)
    open: set[OpenRequest] = field(default_factory=set)
    unanswered: Counter[tuple[AgentRequest, int]] = field(default_factory=Counter)
    listeners: list[asyncio.Server] = field(default_factory=list)  # its own
    bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BODIES))

    def note_unanswered(self, request: OpenRequest) -> None:
        """Note, once, that a try has ended without an answer: its client may try again."""
        if request.retry_noted:
            return

        request.retry_noted = True
        self.unanswered[request.ask, request.attempt] += 1
        if len(self.unanswered) > MOST_UNANSWERED:
            del self.unanswered[next(iter(self.unanswered))]

    def take_unanswered(self, ask: AgentRequest, attempt: int) -> bool:
        """Return whether a try of this number had ended without an answer. Another one follows it now."""
        count = self.unanswered.pop((ask, attempt), 0)
        if count > 1:
            self.unanswered[ask, attempt] = count - 1
        return count > 0


class _Events:
    """The events of a stream that are not sent yet. See `Listener`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._waiting: list[Event] = []
        self.changed = asyncio.Event()  # there are some, or the request is answered

    def begun(self, prompt_tokens: int) -> None:
        self._add(self._exchange.begin(prompt_tokens))

    def delta(self, index: int, reasoning: str, content: str) -> None:
        self._add(self._exchange.delta(index, reasoning, content))

    def _add(self, events: Iterable[Event]) -> None:
        self._waiting += events
        self.changed.set()

    async def wait(self, seconds: float | None) -> bool:
        """False if nothing has changed in so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                return await self.changed.wait()
        except TimeoutError:
            return False

    def take(self) -> list[Event]:
        self.changed.clear()
        events = self._waiting
        self._waiting = []
        return events


class _UnreadRequests(logging.Filter):
    """Counts requests that aiohttp cannot read, by error, instead of logging them: a program in a sandbox can
    send any number of them, with its key. The first of each error is logged without its text, which may have
    bytes of the request; the counts when the server closes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        # Apart from other loggers: nothing handles its records.
        self.logger = logging.Logger("aiohttp.server", logging.WARNING)
        self.logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        name = type(error).__name__ if error else f"{record.levelname} in {record.funcName}"
        self.counts[name] += 1
        if self.counts[name] > 1:
            return False

        if isinstance(error, UNREAD_ERRORS):
            log.warning(
                "refused a request of an agent that could not be read: %s (further ones are only counted)",
                name,
            )
        else:
            frames = "".join(traceback.format_tb(error.__traceback__)) if error else ""
            log.error("a request of an agent failed: %s (further ones are only counted)\n%s", name, frames)
        return False

    def tell(self) -> None:
        if self.counts:
            log.warning(
                "%d requests of agents could not be read, or failed: %s",
                self.counts.total(),
                ", ".join(f"{name} {count}" for name, count in self.counts.most_common()),
            )


class Gateway:
    """`address`: of this machine."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address
        self.admitted: dict[str, _Admitted] = {}  # by key
        self._logged: set[str] = set()  # unheeded parameters that were logged
        self._url = ""
        app = web.Application(middlewares=[self._boundary], client_max_size=MAX_BODY)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post(COUNT, self._count)
        app.router.add_route("HEAD", "/", _head)
        for path in DIALECTS:
            app.router.add_post(path, self._exchange)
        self._listener: asyncio.Server | None = None
        self._unread = _UnreadRequests()
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=self._unread.logger,
            handler_cancellation=True,
            shutdown_timeout=STOP_SECONDS,
            auto_decompress=False,
            lingering_time=0.0,
            read_bufsize=READ_BYTES,
        )

    async def start(self) -> None:
        """Listen on a free port of the address. ConfigError where that is none of this machine."""
        await self._runner.setup()
        assert self._runner.server is not None
        self.loop, self._connections = asyncio.get_running_loop(), Connections(self._runner.server)
        where = f"rollout.agent_address is {self._address!r}"
        try:
            (_, _, _, _, socket_address), *_ = await self.loop.getaddrinfo(
                self._address, 0, type=socket.SOCK_STREAM
            )
            host = str(socket_address[0])
            if ip_address(host).is_unspecified:
                raise ConfigError(f"{where}, to which no agent can connect; give an address of this machine")
            self._listener = await self.loop.create_server(self._connections.of(), host, 0)
        except OSError as error:
            wrong = f"{where}: {error.strerror or error}; give an address of this machine, or the name of one"
            raise ConfigError(wrong) from error
        self._url = _url(self._listener.sockets[0])

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._unread.tell()

    @asynccontextmanager
    async def admit(self, host: Host, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Endpoint]:
        """The agent is served while the body runs. Requests under way at its end are cancelled."""
        key = secrets.token_urlsafe(32)
        admitted = _Admitted(host, clock)
        self.admitted[key], _gateways[key] = admitted, self
        self._connections.begin(admitted)
        try:
            yield Endpoint(self._url, key)
        finally:
            del self.admitted[key], _gateways[key]
            for listener in admitted.listeners:
                listener.close()
            self._connections.end(admitted)
            for task in admitted.running:
                task.cancel()
            await asyncio.gather(*admitted.running, return_exceptions=True)

    async def listen(self, key: str, listener: socket.socket) -> str:
        """Serve an episode on a listener (see `Endpoint.through`), in the gateway's loop. Returns the URL."""
        admitted = self.admitted.get(key)
        if admitted is None:
            raise AsyncrlError("the episode of this endpoint is over")
        episode_socket = socket.socket(fileno=listener.detach())  # nobody else can close it
        server = await self.loop.create_server(
            self._connections.of(admitted), sock=episode_socket, start_serving=False
        )
        admitted.listeners.append(server)
        await server.start_serving()
        return _url(episode_socket)

    # -- requests ------------------------------------------------------------------------------------

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request when its episode may take the loop's time, which counts for the episode."""
        return await self._connections.answer(request, _answer(request, handler))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._by_key(request)
        return _json({"object": "list", "data": [exchanges.model()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._by_key(request)
        return _json(exchanges.model(request.match_info["name"]))  # requests may have any name for it

    async def _count(self, request: web.Request) -> web.StreamResponse:
        admitted = self._by_key(request)
        exchange = messages.read(await self._body(request, admitted))
        return _json({"input_tokens": await admitted.host.count(exchange.ask)})

    async def _exchange(self, request: web.Request) -> web.StreamResponse:
        # before the body is read
        admitted = self._by_key(request)
        dialect = DIALECTS[request.path]
        if not admitted.first_request.done():
            admitted.first_request.set_result(None)
        body = await self._body(request, admitted)
        exchange = dialect.read(body)
        self._log_unheeded(body, exchange)

        open_request = OpenRequest(exchange.ask, _attempt(request), request)
        equal_requests = [earlier for earlier in admitted.open if earlier.ask == exchange.ask]
        admitted.open.add(open_request)
        task: Answering | None = None

        def finish(_: object) -> None:
            admitted.open.discard(open_request)
            open_request.finished.set()

        try:
            await _end_earlier_tries(admitted, open_request, equal_requests)
            self._by_key(request)  # the episode may be over
            events = _Events(exchange) if exchange.request.stream else None
            answering = admitted.host.answer(exchange.ask, exchange.count, events, open_request.attempt)
            task = asyncio.ensure_future(answering)
            admitted.running.add(task)
            task.add_done_callback(admitted.running.discard)
            return await self._answered(admitted, open_request, dialect, exchange, task, events)
        except BaseException:
            admitted.note_unanswered(open_request)
            raise
        finally:
            finish(task) if task is None else task.add_done_callback(finish)

    async def _body(self, request: web.Request, admitted: _Admitted) -> bytes:
        """Read a request's body, and wait until it may be decoded. ApiError when it does not arrive, is
        compressed (a few bytes could become gigabytes) or too large, or the episode ends meanwhile. An
        episode's slow bodies keep only its own waiting."""
        codings = ", ".join(request.headers.getall("Content-Encoding", ())).strip()
        if codings.lower() not in ("", "identity"):
            raise ApiError(415, f"Content-Encoding {in_short(codings)}: requests must not be compressed")
        if (request.content_length or 0) > MAX_BODY:
            raise ApiError(413, TOO_LARGE)

        try:
            async with self._connections.timeout(admitted, READ_SECONDS), admitted.bodies:
                body = await request.read()
        except TimeoutError as error:
            late = f"the request's body did not arrive within {READ_SECONDS:g} s; send it again"
            raise ApiError(408, late) from error
        except web.RequestPayloadError as error:
            broken = "the request's body is broken: invalid chunks, or not of the announced length"
            raise ApiError(400, broken) from error
        await self._connections.until_released(admitted)
        self._by_key(request)  # the episode may be over
        _check_parts(body)
        return body

    def _log_unheeded(self, body: bytes, exchange: Exchange) -> None:
        if len(self._logged) >= exchanges.LOGGED:  # else an agent's inventions would keep the loop each time
            return

        unheeded = exchanges.without_effect(body, exchange.request) | exchange.left_out
        for name in sorted(unheeded.keys() - self._logged)[: exchanges.LOGGED - len(self._logged)]:
            self._logged.add(name)
            has_key = any(key in name for key in self.admitted)
            described = (
                "a parameter with an episode's key in its name" if has_key else ascii(name[:100])[1:-1][:100]
            )
            log.warning("agents set %s, which %s", described, unheeded[name])

    async def _answered(
        self,
        admitted: _Admitted,
        open_request: OpenRequest,
        dialect: ApiDialect,
        exchange: Exchange,
        task: Answering,
        events: _Events | None,
    ) -> web.StreamResponse:
        """Send what the task gives. If the client leaves, the task is cancelled, or its turns are lost."""
        request = open_request.request

        def lose() -> None:
            admitted.note_unanswered(open_request)
            for reply in _replies_of(task):
                admitted.host.lose(reply)

        try:
            if events is not None:
                response = await self._stream(request, dialect, exchange, task, events)
            else:
                response = await self._whole(request, exchange, task)
        except (
            asyncio.CancelledError,
            ConnectionError,
        ):  # the client has left, or the engine was not reached
            if not task.cancel():
                lose()
            raise

        if _replies_of(task):
            self._connections.answered(request, lose)
        else:
            admitted.note_unanswered(open_request)  # the answer was an error
        return response

    async def _whole(self, request: web.Request, exchange: Exchange, task: Answering) -> web.StreamResponse:
        """Answer in one piece. If a turn is long, line breaks come first, which mean nothing in JSON: clients
        wait for a silent server for five or ten minutes, and an engine may sleep for longer."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        while not (await asyncio.wait([task], timeout=SILENT_SECONDS))[0]:
            await response.prepare(request)
            await response.write(b"\n")
        try:
            body = msgspec.json.encode(exchange.whole(await _outcome(task)))
        except Exception:
            if not response.prepared:
                raise
            request.protocol.force_close()  # 200 was sent: what breaks off is no answer
            return response
        if not response.prepared:
            response.content_length = len(body)
            await response.prepare(request)
        await response.write_eof(body)
        return response

    async def _stream(
        self, request: web.Request, dialect: ApiDialect, exchange: Exchange, task: Answering, events: _Events
    ) -> web.StreamResponse:
        """Stream events from the moment that the request has its place: its client need not fear that nobody
        is there. An error before that is an answer of its own, and an event later."""
        task.add_done_callback(lambda _: events.changed.set())
        await events.wait(None)
        first_events = events.take()
        if not first_events:
            await _outcome(task)  # refused
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        await response.write(written(first_events))
        while not task.done():
            changed = await events.wait(BEAT_SECONDS)
            await response.write(written(events.take() if changed else exchange.ping()))
        last_events = events.take()
        try:
            replies = await _outcome(task)
        except Exception as error:
            await response.write_eof(
                written([*last_events, ("error", dialect.error(_error(request, error)))])
            )
        else:
            last_events += exchange.end(replies)
            await response.write_eof(written(last_events) + dialect.done)
        return response

    def _by_key(self, request: web.Request) -> _Admitted:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        admitted = self.admitted.get(key.strip())
        if admitted is None or not self._connections.trust(request, admitted):
            raise ApiError(401, "this API key names no running episode", "invalid_api_key")
        return admitted


def _attempt(request: web.Request) -> int:
    """Return the number of the try, where the client counts them; 0 for the first."""
    counts = (request.headers.get(name, "").strip() for name in RETRIES)
    return max((int(count[:9]) for count in counts if count.isascii() and count.isdigit()), default=0)


async def _end_earlier_tries(
    admitted: _Admitted, open_request: OpenRequest, equal_requests: Sequence[OpenRequest]
) -> None:
    """Wait until the turns of equal requests whose clients have left are cancelled or kept: else this one
    would begin new turns beside them.

    A further try also ends the try before it whose connection is still open, as proxies keep it. Other
    samples of the same prompt may be under way, too, and go on: the try is ended only if no try of that
    number went without an answer, and a single one can be meant."""
    for earlier in equal_requests:
        if earlier.abandoned:
            admitted.note_unanswered(earlier)

    if open_request.attempt > 0 and not admitted.take_unanswered(open_request.ask, open_request.attempt - 1):
        previous_tries = [
            earlier
            for earlier in equal_requests
            if earlier.attempt == open_request.attempt - 1 and not earlier.abandoned
        ]
        if len(previous_tries) == 1:
            previous_tries[0].retry_noted = True  # this is the try that follows
            previous_tries[0].abandon()

    for earlier in equal_requests:
        if earlier.abandoned:
            await earlier.finished.wait()


def _check_parts(body: bytes) -> None:
    """ApiError for a body that would take too long to decode, and the objects of it too much memory."""
    if len(body) > MAX_PARTS and len(body.translate(None, OTHER_BYTES)) > MAX_PARTS:
        count = f"{MAX_PARTS:,} brackets and commas"
        raise ApiError(413, f"the request has more than {count}; send fewer or shorter messages")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


async def _outcome(task: Answering) -> Sequence[AgentReply]:
    """Wait for the answer to a request. ApiError when it was refused or failed."""
    await asyncio.wait([task])
    if task.cancelled():
        raise ApiError(410, "the episode is over", "episode_over")
    try:
        outcome = task.result()
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    if isinstance(outcome, Refusal):
        code = exchanges.LIMITS.get(outcome.end, str(outcome.end))
        raise ApiError(400, outcome.detail, code, refusal=outcome)
    return outcome


def _replies_of(task: Answering) -> Sequence[AgentReply]:
    """The answers, if the task has them."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return ()
    outcome = task.result()
    return () if isinstance(outcome, Refusal) else outcome


def _is_gone(request: web.Request) -> bool:
    """Return whether the client has left."""
    return request.transport is None or request.transport.is_closing()


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes an answer."""
    try:
        return await handler(request)
    except Exception as error:
        if isinstance(error, ConnectionError) and _is_gone(request):
            return web.Response()  # to nobody; raised on, the error would be logged with its traceback
        api_error = _error(request, error)
        dialect = DIALECTS.get(request.path.removesuffix("/count_tokens"), completions.DIALECT)
        response = _json(dialect.error(api_error), api_error.status)
        if api_error.status == 401:
            response.force_close()
        if not request.content.is_eof():
            await _answer_unread(request, response)
        return response


async def _answer_unread(request: web.Request, response: web.Response) -> None:
    """Answer a request that is not read to its end, and end its connection. What the client still sends is
    not read, not even to be thrown away; it has LINGER_SECONDS to find the answer."""
    response.force_close()
    with suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
    if request.transport is not None:
        request.transport.pause_reading()
        await asyncio.sleep(LINGER_SECONDS)


def _error(request: web.Request, error: Exception) -> ApiError:
    """Return the error that a client gets."""
    match error:
        case ApiError():
            return error
        case web.HTTPNotFound() | web.HTTPMethodNotAllowed():
            paths = ", ".join(f"POST {path}" for path in (*DIALECTS, COUNT))
            wrong = f"there is no {request.method} {request.path}; available: {paths}, GET /v1/models[/NAME]"
            return ApiError(error.status, wrong, "unknown_url")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, TOO_LARGE)
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case ProtocolError():
            pass  # the agent did not repeat itself: its episode starts again, and the coordinator says so
        case _:
            log.warning("a request failed: %s", one_line(error))
    return ApiError(500, one_line(error), kind="server_error")


async def _head(request: web.Request) -> web.StreamResponse:
    """Answer clients that look if somebody is there, before they have a key."""
    return web.Response()


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
