"""Serves the endpoint: one HTTP server per worker, for the agents of the worker's episodes.

    agent program ──key, request──► Exchange ──► Host ──AgentReply | Refusal──► JSON, or a stream of events

A key is random and names one episode while the episode runs. Each path has a dialect, also for errors; no
error ends the server. A stream sends the text of a turn during sampling, and calls and the end when the turn
is durable. A stream sends something every HEARTBEAT_SECONDS, or clients would take a long turn for a dead
server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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
from asyncrl.gateway.exchange import (
    AgentReply,
    ApiDialect,
    ApiError,
    Body,
    Event,
    Exchange,
    Listener,
    encode_events,
)
from asyncrl.gateway.images import PREPARE_SECONDS, HasImageError, RequestImages
from asyncrl.isolation.calls import to_its_end
from asyncrl.values import shorten_to_line
from asyncrl.vision.content import ImageTimeoutError
from asyncrl.vision.files import ImageError

log = logging.getLogger("asyncrl.gateway")

MAX_BODY_BYTES = 16 << 20  # of a request to a model that reads text only
# Of a request to a model that reads images: an agent sends all images of its history again, in base64.
MAX_IMAGE_BODY_BYTES = 64 << 20
MAX_READ_TWICE_BYTES = 1 << 20  # of a request that may turn out to have images only while it is read
MAX_PARTS = 300_000  # brackets and commas of a request, texts included: they bound the cost of decoding
COUNT_STEP = 1 << 20  # bytes in which brackets and commas are counted at a time, as this holds Python's lock
MAX_THREADS_DECODING = 2  # requests that are decoded at once in threads, without the waits for images
READ_SECONDS = 60.0  # for the body of a request to arrive
REQUEST_WAIT_SECONDS = READ_SECONDS + PREPARE_SECONDS  # for earlier requests of the episode
LINGER_SECONDS = 1.0  # for a client to find the answer to a request that was not read to the end
REQUEST_SLOTS = 4  # requests of an episode that are received or decoded at once
# The same for a model that reads images: the bodies of an episode take 64 MiB in either case, and an agent
# keeps one thread busy at a time.
IMAGE_REQUEST_SLOTS = 1
STOP_SECONDS = 2.0  # for connections to end when the server ends
HEARTBEAT_SECONDS = 8.0  # between two signs of life of a stream
# Until the first sign of life of an answer in one piece: proxies wait for 60 s, clients for 300 s. An error
# before the first sign of life still has a status.
SILENT_SECONDS = 45.0
DIALECTS = {
    "/v1/chat/completions": completions.DIALECT,
    "/v1/responses": responses.DIALECT,
    "/v1/messages": messages.DIALECT,
    "/v1/completions": text_completions.DIALECT,
}
COUNT_PATH = "/v1/messages/count_tokens"
MAX_UNANSWERED = 8  # requests of an episode whose unanswered tries are remembered
OTHER_BYTES = bytes(set(range(256)) - set(b"[{,"))
# Errors of aiohttp for broken requests, and for clients that left.
UNREAD_ERRORS = (HttpProcessingError, ConnectionError)
# Headers with the number of the try.
RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count", "x-retry-attempt")


class _ReadTimeoutError(ApiError):
    """A request that did not arrive in time, or that waited too long for earlier requests."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True):
    """The address of an agent's model: the settings of any OpenAI client. `base_url` ends with /v1; clients
    of Anthropic's API need `anthropic_url`, without /v1. `max_tokens`: the token limit of a row, including
    the prompt. `seconds`: the time that the episode had left at the start, on the episode's `clock`."""

    base_url: str
    api_key: str
    model: str = exchanges.MODEL
    max_tokens: int = 0
    seconds: float = math.inf

    @property
    def anthropic_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def clock(self) -> float:
        """Return the episode's time in seconds, which pauses while a turn waits for a scorer."""
        gateway = _gateways.get(self.api_key)
        return gateway.running_episodes[self.api_key].clock() if gateway is not None else time.monotonic()

    async def serve_on(self, listener: socket.socket) -> Endpoint:
        """Also serve the episode on this listening socket, and return the endpoint with the socket's address.
        Works in any event loop. The gateway takes over the socket, which may belong to another network
        namespace, and closes the socket and its connections when the episode has ended. Raises AsyncrlError
        if the episode has ended."""
        gateway = _gateways.get(self.api_key)
        if gateway is None:
            raise AsyncrlError("the episode of this endpoint has ended, or runs in another process")
        served_url = asyncio.run_coroutine_threadsafe(
            gateway.listen_for_episode(self.api_key, listener), gateway.loop
        )
        return replace(self, base_url=await asyncio.wrap_future(served_url))

    async def wait_for_first_request(self) -> None:
        """Wait for the agent's first request for a turn, in any event loop; waits for ever if no gateway of
        this process serves the episode."""
        gateway = _gateways.get(self.api_key)
        running_episode = gateway.running_episodes[self.api_key] if gateway is not None else None
        first_request = Future[None]() if running_episode is None else running_episode.first_request
        await asyncio.shield(asyncio.wrap_future(first_request))


_gateways: dict[str, Gateway] = {}  # by the keys of episodes that run in this process


class Host(Protocol):
    """An episode that answers an agent. Requests may overlap; a request whose client has left is
    cancelled."""

    @property
    def images(self) -> RequestImages:
        """Return what reads the images of the episode's requests: the same object each time."""
        raise NotImplementedError

    async def answer(
        self, agent_request: AgentRequest, count: int, listener: Listener | None, attempt: int = 0
    ) -> Sequence[AgentReply] | Refusal:
        """Return `count` answers; `listener`, if given, hears of growing answers. `attempt`: the number of
        the try, as the client counts tries; 0 for the first. ConfigError: the template cannot write the
        messages. Any other exception ends the episode."""

    async def count(self, agent_request: AgentRequest) -> int:
        """Count the tokens of a request's prompt, without an answer. ConfigError as above."""

    def lose(self, reply: AgentReply) -> None:
        """Note that the client left before getting this answer; the client may repeat the request."""


AnswerTask = asyncio.Task[Sequence[AgentReply] | Refusal]


@dataclass(eq=False)
class OpenRequest:
    """A request for turns, until the answer is sent, or the client has left and no turn is under way.
    `attempt`: the number of the try, as the client counts tries. `retry_noted`: the try is counted in
    `unanswered_tries`, or a further try has followed."""

    request: web.Request
    dialect: ApiDialect
    exchange: Exchange
    attempt: int
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    retry_noted: bool = False

    @property
    def is_abandoned(self) -> bool:
        return _is_gone(self.request)

    def abort_connection(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


@dataclass(eq=False)
class _RunningEpisode:
    """An episode that runs. `unanswered_tries`: tries of requests that ended without an answer and that no
    further try has followed, by request and number."""

    host: Host
    clock: Callable[[], float]
    first_request: Future[None] = field(default_factory=Future)  # set by the first request for a turn
    answer_tasks: set[AnswerTask] = field(default_factory=set)
    open_requests: set[OpenRequest] = field(default_factory=set)
    unanswered_tries: Counter[tuple[AgentRequest, int]] = field(default_factory=Counter)
    own_listeners: list[asyncio.Server] = field(default_factory=list)  # listeners for this episode alone
    # Tries that were not received or not decoded, by their number: the client may try again.
    unread_tries: Counter[int] = field(default_factory=Counter)
    newest_request_images: RequestImages | None = None  # of the last request that was decoded in a thread
    request_slots: asyncio.Semaphore = field(init=False)  # taken until the request is decoded

    def __post_init__(self) -> None:
        self.request_slots = asyncio.Semaphore(IMAGE_REQUEST_SLOTS if self.reads_images else REQUEST_SLOTS)

    @property
    def reads_images(self) -> bool:
        """Return True if the episode's model reads images."""
        return self.host.images.layout is not None

    def note_unread(self, attempt: int) -> None:
        """Note that a try was not received or not decoded: the client may try again. A further try replaces
        the unread try before it."""
        self._take_unread(attempt - 1)
        self.unread_tries[attempt] += 1
        if len(self.unread_tries) > MAX_UNANSWERED:
            del self.unread_tries[next(iter(self.unread_tries))]

    def note_unanswered(self, request: OpenRequest) -> None:
        """Note, once, that a try has ended without an answer: the client may try again."""
        if request.retry_noted:
            return

        request.retry_noted = True
        self.unanswered_tries[request.exchange.agent_request, request.attempt] += 1
        if len(self.unanswered_tries) > MAX_UNANSWERED:
            del self.unanswered_tries[next(iter(self.unanswered_tries))]

    def take_unanswered(self, agent_request: AgentRequest, attempt: int) -> bool:
        """Return whether a try of this number ended without an answer, or may have: an unread request counts
        as a try of any request with this number. The next try follows now."""
        count = self.unanswered_tries.pop((agent_request, attempt), 0)
        if count > 1:
            self.unanswered_tries[agent_request, attempt] = count - 1
        return count > 0 or self._take_unread(attempt)

    def _take_unread(self, attempt: int) -> bool:
        """Return whether a try of this number was not read, and count one less."""
        count = self.unread_tries.pop(attempt, 0)
        if count > 1:
            self.unread_tries[attempt] = count - 1
        return count > 0


class _Events:
    """The events of a stream that are not sent yet: a `Listener`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._unsent_events: list[Event] = []
        self.changed = asyncio.Event()  # there are unsent events, or the request is answered

    def start(self, prompt_tokens: int) -> None:
        self._add_events(self._exchange.begin(prompt_tokens))

    def delta(self, index: int, reasoning: str, content: str) -> None:
        self._add_events(self._exchange.delta(index, reasoning, content))

    def _add_events(self, events: Iterable[Event]) -> None:
        self._unsent_events += events
        self.changed.set()

    async def wait_for_change(self, seconds: float | None) -> bool:
        """Wait for a change. False if nothing has changed within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                return await self.changed.wait()
        except TimeoutError:
            return False

    def take_unsent(self) -> list[Event]:
        self.changed.clear()
        unsent_events = self._unsent_events
        self._unsent_events = []
        return unsent_events


class _UnreadRequests(logging.Filter):
    """Counts requests that aiohttp cannot read, by error, instead of logging them: a program in a sandbox can
    send any number of bad requests, with the episode's key. The first error of each kind is logged without
    its text, which may contain bytes of the request; the counts are logged when the server closes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        # This logger stands apart from other loggers: nothing handles the records.
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
                "could not read a request from an agent: %s (further failures are only counted)",
                name,
            )
        else:
            frames = "".join(traceback.format_tb(error.__traceback__)) if error else ""
            log.error(
                "a request from an agent failed: %s (further failures are only counted)\n%s", name, frames
            )

        return False

    def log_counts(self) -> None:
        if self.counts:
            log.warning(
                "requests from agents that failed or could not be read: %d (%s)",
                self.counts.total(),
                ", ".join(f"{name} {count}" for name, count in self.counts.most_common()),
            )


class Gateway:
    """The HTTP server of a worker. `address`: an address of this machine. `episode_slots`: episodes that
    are served at once."""

    def __init__(self, address: str = "127.0.0.1", episode_slots: int = 64) -> None:
        self._address = address
        self.running_episodes: dict[str, _RunningEpisode] = {}  # by key
        self._logged_fields: set[str] = set()  # ignored fields that were logged
        self._base_url = ""
        # A thread for each episode: threads wait for images of other episodes. The loop's default threads
        # encode requests to servers, which must not wait for images of agents.
        self._image_threads = ThreadPoolExecutor(episode_slots, thread_name_prefix="gateway-images")
        self._request_decoders = threading.Semaphore(MAX_THREADS_DECODING)

        app = web.Application(middlewares=[self._boundary])
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{name:.+}", self._describe_model)
        app.router.add_post(COUNT_PATH, self._handle_count)
        app.router.add_route("HEAD", "/", _answer_head_request)
        for path in DIALECTS:
            app.router.add_post(path, self._handle_exchange)

        self._listener: asyncio.Server | None = None
        self._unread_requests = _UnreadRequests()
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=self._unread_requests.logger,
            handler_cancellation=True,
            shutdown_timeout=STOP_SECONDS,
            auto_decompress=False,
            lingering_time=0.0,
            read_bufsize=READ_BYTES,
        )

    async def start(self) -> None:
        """Listen on a free port of the address. ConfigError if this machine does not have the address."""
        await self._runner.setup()
        assert self._runner.server is not None
        self.loop = asyncio.get_running_loop()
        self._connections = Connections(self._runner.server)

        setting = f"rollout.agent_address {self._address!r}"
        try:
            (_, _, _, _, socket_address), *_ = await self.loop.getaddrinfo(
                self._address, 0, type=socket.SOCK_STREAM
            )
            host = str(socket_address[0])
            if ip_address(host).is_unspecified:
                problem = "agents cannot connect to this address; set an address of this machine"
                raise ConfigError(f"{setting}: {problem}")

            self._listener = await self.loop.create_server(self._connections.protocol_factory(), host, 0)
        except OSError as error:
            message = f"{setting}: {error.strerror or error}; set an address or host name of this machine"
            raise ConfigError(message) from error

        self._base_url = _listener_url(self._listener.sockets[0])

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._image_threads.shutdown(wait=False, cancel_futures=True)
        self._unread_requests.log_counts()

    @asynccontextmanager
    async def admit_episode(
        self, host: Host, clock: Callable[[], float] = time.monotonic
    ) -> AsyncIterator[Endpoint]:
        """Serve an agent while the body runs. At the end, answers under way are cancelled; requests that are
        still being received are refused once they have arrived."""
        key = secrets.token_urlsafe(32)
        running_episode = _RunningEpisode(host, clock)
        self.running_episodes[key] = running_episode
        _gateways[key] = self
        self._connections.loop_times.begin_episode(running_episode)

        try:
            yield Endpoint(self._base_url, key)
        finally:
            del self.running_episodes[key], _gateways[key]
            for listener in running_episode.own_listeners:
                listener.close()
            if running_episode.newest_request_images is not None:
                running_episode.newest_request_images.end_request()

            self._connections.end_episode(running_episode)
            for task in running_episode.answer_tasks:
                task.cancel()
            await asyncio.gather(*running_episode.answer_tasks, return_exceptions=True)

    async def listen_for_episode(self, key: str, listener: socket.socket) -> str:
        """Serve an episode on a listener (see `Endpoint.serve_on`), in the gateway's loop. Returns the
        URL."""
        running_episode = self.running_episodes.get(key)
        if running_episode is None:
            raise AsyncrlError("the episode of this endpoint has ended")

        episode_socket = socket.socket(fileno=listener.detach())  # nobody else can close it
        server = await self.loop.create_server(
            self._connections.protocol_factory(running_episode), sock=episode_socket, start_serving=False
        )
        running_episode.own_listeners.append(server)
        await server.start_serving()

        return _listener_url(episode_socket)

    # -- requests ------------------------------------------------------------------------------------

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request when the episode may take the loop's time, and charge the episode."""
        return await self._connections.answer_request(request, _answer(request, handler))

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._episode_of_key(request)
        return _json_response({"object": "list", "data": [exchanges.model()]})

    async def _describe_model(self, request: web.Request) -> web.StreamResponse:
        self._episode_of_key(request)
        # Any name in the path means the policy.
        return _json_response(exchanges.model(request.match_info["name"]))

    async def _handle_count(self, request: web.Request) -> web.StreamResponse:
        running_episode = self._episode_of_key(request)
        exchange = await self._read_exchange(request, running_episode, messages.DIALECT)
        return _json_response({"input_tokens": await running_episode.host.count(exchange.agent_request)})

    async def _handle_exchange(self, request: web.Request) -> web.StreamResponse:
        # The first request counts before the body is read: a body may take long.
        running_episode = self._episode_of_key(request)
        dialect = DIALECTS[request.path]
        if not running_episode.first_request.done():
            running_episode.first_request.set_result(None)

        try:
            exchange = await self._read_exchange(request, running_episode, dialect)
        except (_ReadTimeoutError, ImageTimeoutError, MemoryError, asyncio.CancelledError):
            running_episode.note_unread(_attempt(request))
            raise
        self._log_ignored(exchange.ignored_parts)

        agent_request = exchange.agent_request
        open_request = OpenRequest(
            request=request, dialect=dialect, exchange=exchange, attempt=_attempt(request)
        )
        equal_requests = [
            earlier
            for earlier in running_episode.open_requests
            if earlier.exchange.agent_request == agent_request
        ]
        running_episode.open_requests.add(open_request)

        task: AnswerTask | None = None

        def finish(_: object) -> None:
            running_episode.open_requests.discard(open_request)
            open_request.finished.set()

        try:
            await _end_earlier_tries(running_episode, open_request, equal_requests)
            self._episode_of_key(request)  # the episode may be over
            events = _Events(exchange) if exchange.request.stream else None
            task = asyncio.ensure_future(
                running_episode.host.answer(
                    agent_request, exchange.count, listener=events, attempt=open_request.attempt
                )
            )
            running_episode.answer_tasks.add(task)
            task.add_done_callback(running_episode.answer_tasks.discard)
            return await self._send_answer(running_episode, open_request, answer_task=task, events=events)
        except BaseException:
            running_episode.note_unanswered(open_request)
            raise
        finally:
            if task is None:
                finish(task)
            else:
                task.add_done_callback(finish)

    async def _read_exchange(
        self, request: web.Request, running_episode: _RunningEpisode, dialect: ApiDialect
    ) -> Exchange:
        """Receive and decode a request. Waits for a slot of the episode, and until the episode may take the
        loop's time: slow bodies delay only requests of the same episode. ApiError, also when the body does
        not arrive, or the episode ends meanwhile; ImageError."""
        max_bytes = MAX_IMAGE_BODY_BYTES if running_episode.reads_images else MAX_BODY_BYTES
        _check_headers(request, max_bytes)

        async with AsyncExitStack() as exit_stack:
            async with self._time_limit(
                running_episode, REQUEST_WAIT_SECONDS, "earlier requests of the episode were not read"
            ):
                await exit_stack.enter_async_context(running_episode.request_slots)

            self._episode_of_key(request)  # the episode may be over
            async with self._time_limit(running_episode, READ_SECONDS, "the request body did not arrive"):
                body = await _receive_body(request, max_bytes)

            await self._connections.loop_times.until_released(running_episode)
            self._episode_of_key(request)
            return await self._decode_exchange(dialect, body, running_episode)

    @asynccontextmanager
    async def _time_limit(
        self, running_episode: _RunningEpisode, seconds: float, problem: str
    ) -> AsyncIterator[None]:
        """Raise _ReadTimeoutError in the body after so many seconds in which the episode is not held."""
        try:
            async with self._connections.loop_times.reading_timeout(running_episode, seconds):
                yield
        except TimeoutError as error:
            raise _ReadTimeoutError(408, f"{problem} within {seconds:g} s; send the request again") from error

    async def _decode_exchange(
        self, dialect: ApiDialect, body: Body, running_episode: _RunningEpisode
    ) -> Exchange:
        """Decode a request; in a thread if it is long or has images to decode. ApiError, ImageError."""
        images = running_episode.host.images
        if images.layout is None or len(body) <= MAX_READ_TWICE_BYTES:
            with suppress(HasImageError):
                return self._decode_checked(dialect, body, images.without_images())

        request_images = images.for_request(self._lend_decoder)
        running_episode.newest_request_images = request_images
        decode = partial(self._decode_charged, dialect, body, request_images, running_episode)
        return await to_its_end(decode, self._image_threads)

    @contextmanager
    def _lend_decoder(self) -> Iterator[None]:
        """Let threads decode other requests while the body waits."""
        self._request_decoders.release()
        try:
            yield
        finally:
            self._request_decoders.acquire()

    def _decode_charged(
        self, dialect: ApiDialect, body: Body, images: RequestImages, running_episode: _RunningEpisode
    ) -> Exchange:
        """Decode a request in a thread, and charge the episode for the thread's time as for the loop's, since
        decoding holds Python's lock. New images are not charged: most of their time is without the lock."""
        started = time.thread_time()
        try:
            with self._request_decoders:
                return self._decode_checked(dialect, body, images)
        finally:
            seconds = time.thread_time() - started - images.prepare_seconds
            charge_episode = self._connections.loop_times.charge_episode
            self.loop.call_soon_threadsafe(charge_episode, running_episode, seconds)

    def _decode_checked(self, dialect: ApiDialect, body: Body, images: RequestImages) -> Exchange:
        """Decode a request whose brackets and commas are counted before. ApiError, ImageError."""
        _check_parts(body)
        exchange = dialect.read(body, images)
        # Large requests are decoded again, too, as an agent with screenshots may send no small ones.
        if self._can_log_fields:
            exchange.ignored_parts |= exchanges.ignored_fields(body, type(exchange.request))
        return exchange

    @property
    def _can_log_fields(self) -> bool:
        """Return False when invented names of fields would only cost time in each request."""
        return len(self._logged_fields) < exchanges.MAX_LOGGED_FIELDS

    def _log_ignored(self, ignored_parts: Mapping[str, str]) -> None:
        """Log each ignored part of requests once. `ignored_parts`: see `Exchange`."""
        if not self._can_log_fields:
            return

        new_names = sorted(ignored_parts.keys() - self._logged_fields)
        free_lines = exchanges.MAX_LOGGED_FIELDS - len(self._logged_fields)
        for field_name in new_names[:free_lines]:
            self._logged_fields.add(field_name)
            if any(key in field_name for key in self.running_episodes):
                described_name = "a parameter with an episode's key in its name"
            else:
                described_name = ascii(field_name[:100])[1:-1][:100]
            log.warning("agents sent %s, which %s", described_name, ignored_parts[field_name])

    async def _send_answer(
        self,
        running_episode: _RunningEpisode,
        open_request: OpenRequest,
        answer_task: AnswerTask,
        events: _Events | None,
    ) -> web.StreamResponse:
        """Send the result of the task. If the client leaves, the task is cancelled, or the turns are lost."""

        def lose() -> None:
            running_episode.note_unanswered(open_request)
            for reply in _replies_of(answer_task):
                running_episode.host.lose(reply)

        try:
            if events is not None:
                response = await self._send_stream(open_request, answer_task, events)
            else:
                response = await self._send_whole(open_request, answer_task)
        except (asyncio.CancelledError, ConnectionError):
            # The client has left, or the engine was not reached.
            if not answer_task.cancel():
                lose()
            raise

        if _replies_of(answer_task):
            self._connections.note_answer(open_request.request, lose)
        else:
            running_episode.note_unanswered(open_request)  # the answer was an error

        return response

    async def _send_whole(self, open_request: OpenRequest, answer_task: AnswerTask) -> web.StreamResponse:
        """Answer in one piece. During a long turn, line breaks are sent, which mean nothing in JSON: clients
        wait for a silent server for five or ten minutes, and an engine may sleep for longer."""
        request = open_request.request
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        while not (await asyncio.wait([answer_task], timeout=SILENT_SECONDS))[0]:
            await response.prepare(request)
            await response.write(b"\n")

        try:
            body = msgspec.json.encode(open_request.exchange.full_answer(await _outcome(answer_task)))
        except Exception:
            if not response.prepared:
                raise
            request.protocol.force_close()  # 200 was sent: a broken-off answer is no answer
            return response

        if not response.prepared:
            response.content_length = len(body)
            await response.prepare(request)

        await response.write_eof(body)
        return response

    async def _send_stream(
        self, open_request: OpenRequest, answer_task: AnswerTask, events: _Events
    ) -> web.StreamResponse:
        """Stream events from the moment that the request is placed: the client learns that the server works.
        An earlier error is an error response, a later error is an event."""
        answer_task.add_done_callback(lambda _: events.changed.set())
        await events.wait_for_change(None)
        first_events = events.take_unsent()
        if not first_events:
            await _outcome(answer_task)  # refused

        request = open_request.request
        exchange = open_request.exchange
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        await response.write(encode_events(first_events))

        while not answer_task.done():
            has_changed = await events.wait_for_change(HEARTBEAT_SECONDS)
            await response.write(encode_events(events.take_unsent() if has_changed else exchange.ping()))

        last_events = events.take_unsent()
        try:
            replies = await _outcome(answer_task)
        except Exception as error:
            error_body = open_request.dialect.error(_api_error(request, error))
            await response.write_eof(encode_events([*last_events, ("error", error_body)]))
        else:
            last_events += exchange.end(replies)
            await response.write_eof(encode_events(last_events) + open_request.dialect.done)

        return response

    def _episode_of_key(self, request: web.Request) -> _RunningEpisode:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        running_episode = self.running_episodes.get(key.strip())
        if running_episode is None or not self._connections.trust_connection(request, running_episode):
            raise ApiError(401, "this API key does not belong to a running episode", "invalid_api_key")
        return running_episode


def _attempt(request: web.Request) -> int:
    """Return the number of the try, if the client counts tries; 0 for the first."""
    try_counts = (request.headers.get(name, "").strip() for name in RETRY_HEADERS)
    return max(
        (int(try_count[:9]) for try_count in try_counts if try_count.isascii() and try_count.isdigit()),
        default=0,
    )


async def _end_earlier_tries(
    running_episode: _RunningEpisode, open_request: OpenRequest, equal_requests: Sequence[OpenRequest]
) -> None:
    """Wait until the turns of equal requests whose clients have left are cancelled or kept: else this request
    would begin more turns.

    A further try also ends the previous try if its connection is still open, since proxies keep connections.
    Equal requests may also be samples of the same prompt, which go on: the previous try is ended only if no
    try of that number went without an answer, and only one open request can be the previous try."""
    for earlier in equal_requests:
        if earlier.is_abandoned:
            running_episode.note_unanswered(earlier)

    if open_request.attempt > 0 and not running_episode.take_unanswered(
        open_request.exchange.agent_request, open_request.attempt - 1
    ):
        previous_tries = [
            earlier
            for earlier in equal_requests
            if earlier.attempt == open_request.attempt - 1 and not earlier.is_abandoned
        ]
        if len(previous_tries) == 1:
            previous_tries[0].retry_noted = True  # this is the try that follows
            previous_tries[0].abort_connection()

    for earlier in equal_requests:
        if earlier.is_abandoned:
            await earlier.finished.wait()


def _too_large(max_bytes: int) -> ApiError:
    # The first words tell opencode and qwen-code that the history must become shorter.
    return ApiError(
        413,
        f"Request Entity Too Large: the request is larger than {max_bytes >> 20} MiB; send fewer or shorter "
        "messages, or smaller images",
    )


def _check_headers(request: web.Request, max_bytes: int) -> None:
    """Raise ApiError for a body that is compressed (a few bytes could become gigabytes) or too large."""
    codings = ", ".join(request.headers.getall("Content-Encoding", ())).strip()
    if codings.lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {shorten_to_line(codings)}: requests must not be compressed")
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)


async def _receive_body(request: web.Request, max_bytes: int) -> bytearray:
    """Receive the body of a request. ApiError for a body that is too large or broken."""
    body = bytearray()
    try:
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except web.RequestPayloadError as error:
        body_problem = "the request body contains invalid chunks, or does not have the announced length"
        raise ApiError(400, body_problem) from error

    return body


def _check_parts(body: Body) -> None:
    """Raise ApiError for a body that would take too much time and memory to decode."""
    if len(body) <= MAX_PARTS:
        return

    part_count = sum(
        len(body[start : start + COUNT_STEP].translate(None, OTHER_BYTES))
        for start in range(0, len(body), COUNT_STEP)
    )
    if part_count > MAX_PARTS:
        count = f"{MAX_PARTS:,} brackets and commas"
        raise ApiError(413, f"the request contains more than {count}; send fewer or shorter messages")


def _listener_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


async def _outcome(answer_task: AnswerTask) -> Sequence[AgentReply]:
    """Wait for the answer to a request. ApiError when the request was refused or failed."""
    await asyncio.wait([answer_task])
    if answer_task.cancelled():
        raise ApiError(410, "the episode has ended", "episode_over")

    try:
        outcome = answer_task.result()
    except ConfigError as error:
        raise ApiError(400, str(error)) from error

    if isinstance(outcome, Refusal):
        code = exchanges.LIMIT_CODES.get(outcome.end, str(outcome.end))
        raise ApiError(400, outcome.detail, code, refusal=outcome)

    return outcome


def _replies_of(answer_task: AnswerTask) -> Sequence[AgentReply]:
    """Return the answers of a task; () if it has none."""
    if not answer_task.done() or answer_task.cancelled() or answer_task.exception() is not None:
        return ()
    outcome = answer_task.result()
    return () if isinstance(outcome, Refusal) else outcome


def _is_gone(request: web.Request) -> bool:
    """Return whether the client has left."""
    return request.transport is None or request.transport.is_closing()


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request; every error becomes an error response."""
    try:
        return await handler(request)
    except Exception as error:
        if isinstance(error, ConnectionError) and _is_gone(request):
            return web.Response()  # to nobody; raised on, the error would be logged with its traceback

        api_error = _api_error(request, error)
        dialect = DIALECTS.get(request.path.removesuffix("/count_tokens"), completions.DIALECT)
        response = _json_response(dialect.error(api_error), api_error.status)
        if api_error.status == 401:
            response.force_close()
        if request.content.is_eof():
            return response

        # The request is not read to the end: answer, and end the connection. Further bytes of the client are
        # not read, not even to be thrown away; the client has LINGER_SECONDS to find the answer.
        response.force_close()
        with suppress(ConnectionError):
            await response.prepare(request)
            await response.write_eof()
        if request.transport is not None:
            request.transport.pause_reading()
            await asyncio.sleep(LINGER_SECONDS)
        return response


def _api_error(request: web.Request, error: Exception) -> ApiError:
    """Return the error that a client gets."""
    match error:
        case ApiError():
            return error
        case ImageTimeoutError():
            return ApiError(408, str(error))
        case ImageError():
            return ApiError(400, str(error), "invalid_image")
        case web.HTTPNotFound() | web.HTTPMethodNotAllowed():
            paths = ", ".join(f"POST {path}" for path in (*DIALECTS, COUNT_PATH))
            message = (
                f"unknown endpoint {request.method} {request.path}; available: {paths}, GET /v1/models[/NAME]"
            )
            return ApiError(error.status, message, "unknown_url")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case ProtocolError():
            pass  # the agent did not repeat itself: its episode starts again, and the coordinator says so
        case _:
            log.warning("a request failed: %s", one_line(error))

    return ApiError(500, one_line(error), kind="server_error")


async def _answer_head_request(request: web.Request) -> web.StreamResponse:
    """Answer clients that check, before having a key, whether the server exists."""
    return web.Response()


def _json_response(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
