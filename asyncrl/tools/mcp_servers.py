"""Connections to MCP servers: processes that talk over pipes, or URLs (streamable HTTP).

All of a process's connections live in the event loop of one thread, whatever loop a call comes from: they are
opened when first needed, and end with the process. What the package enters in one task must be left in it, so
each connection is held by a task of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.remote.model import bearer

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
log = logging.getLogger("asyncrl.tools")

MAX_BYTES = 8 << 20  # of one message; a server that sends more is given up
MAX_NOISE = 1 << 18  # bytes on a server's standard output that are no messages
TAIL = 2000  # last bytes of a server's standard error that are kept for error messages
GRACE = 1.0  # seconds between asking a server to end and making it
CLOSE = 5.0  # seconds for all of a connection's end
STUCK = 8  # calls in a row that were given up without an answer, after which a server counts as hung
PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a connection, by failures in a row before it
ENDED = ("Connection closed", "Session terminated")  # what the package says when no call can succeed any more
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # not in the child between fork and exec, where a lock may be held


class ServerError(AsyncrlError):
    """An MCP server refused a request, or could not be reached."""


class ServerLost(ServerError):
    """The connection ended while a call was under way: nobody knows whether it had its effect."""


@dataclass(frozen=True)
class Server:
    """Where a server is: the `command` line that starts it, or its `url`. `python` is this interpreter.

    `env` names variables of this process that a started server sees beside the usual ones (PATH, HOME, ...);
    `api_key_env` the one that holds the bearer token of a URL. `start_timeout`: seconds for the handshake.
    """

    command: str = ""
    url: str = ""
    env: tuple[str, ...] = ()
    api_key_env: str = ""
    start_timeout: float = 60.0

    def __str__(self) -> str:
        return self.command or self.url


# -- the thread ------------------------------------------------------------------------------------------

_loops: list[asyncio.AbstractEventLoop] = []
_starting = threading.Lock()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run it in the thread of the connections."""
    with _starting:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, daemon=True, name="mcp").start()
    return asyncio.run_coroutine_threadsafe(work, _loops[0])


async def there(work: Coroutine[Any, Any, T]) -> T:
    """Await it in the thread of the connections; cancelled with its caller."""
    return await asyncio.wrap_future(submit(work))


# -- connections; everything below runs in that thread ------------------------------------------------------


class Life:
    """What is seen of a server from its start to its end: `over` when it answers no more."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.stderr = b""
        self.noise = 0
        self.problem = ""

    def end(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.over.set()

    def told(self) -> str:
        """What it wrote to standard error at last, in brackets."""
        text = " ".join(self.stderr.decode("utf-8", "replace").split())[-300:]
        return f" (it wrote: {text})" if text else ""


class Connection:
    """One connection, from the handshake to its end; after that it raises ServerLost.

    Entered after `pause` seconds, by a task that starts at once.
    """

    def __init__(self, server: Server, pause: float = 0.0) -> None:
        self._server = server
        self._life = Life()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda client: client.cancelled() or client.exception())
        self._holder = asyncio.create_task(self._hold(pause))

    @property
    def over(self) -> bool:
        return self._life.over.is_set()

    def give_up(self, problem: str) -> None:
        """End it, unless it is still in its handshake, which has a deadline of its own."""
        if self._client.done():
            self._life.end(problem)

    async def client(self) -> Client:
        """After the handshake. ServerError says why there is none; whoever stops waiting does not stop it."""
        return await asyncio.shield(self._client)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The server's CallToolResult. ServerError, or ServerLost when it ended meanwhile."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await self.client()
        if self.over:
            raise ServerLost(f"the MCP server was lost: {self._life.problem}")
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            if error.message in ENDED:
                self._life.end(error.message)
            if not self.over and error.code != CONNECTION_CLOSED:
                raise ServerError(f"{name}: {one_line(error)}") from error
            why = self._life.problem or error.message
            raise ServerLost(f"the MCP server was lost during the call: {why}") from error

    async def close(self) -> None:
        """End it, within CLOSE seconds; a process is gone afterwards."""
        self._life.end("it was closed")
        if not self._client.done():  # the handshake is cut short
            self._holder.cancel()
        done, _ = await asyncio.wait({self._holder}, timeout=CLOSE)
        if not done:
            self._holder.cancel()

    async def _hold(self, pause: float) -> None:
        why = "it was closed"
        try:
            await asyncio.sleep(pause)
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.start_timeout):
                    client = await stack.enter_async_context(_client(self._server, self._life))
                self._client.set_result(client)
                await self._life.over.wait()
        except TimeoutError:
            why = f"no handshake within {self._server.start_timeout:g} s"
        except Exception as error:  # the boundary: of the package, its transports and the server
            why = _why(error)
        finally:
            self._life.end(why)
            if not self._client.done():
                problem = f"no MCP server at {self._server}: {self._life.problem}{self._life.told()}"
                self._client.set_exception(ServerError(problem))


class Link:
    """The connection that all episodes of a worker share: made when it is first needed, and again, after a
    pause that grows, when it was lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._failures = 0
        self._unanswered = 0
        self._current: Connection | None = None

    async def call(self, name: str, arguments: dict[str, Any], again: bool) -> Any:
        """See Connection.call. `again`: a call whose connection was lost may be repeated once."""
        try:
            return await self._call(name, arguments)
        except ServerLost:
            if not again:
                raise
            return await self._call(name, arguments)

    async def close(self) -> None:
        """It is opened again by the next call."""
        current, self._current = self._current, None
        if current is not None:
            await current.close()

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        connection = self._connected()
        try:
            result = await connection.call(name, arguments)
        except asyncio.CancelledError:
            self._unanswered += 1
            if self._unanswered >= STUCK:
                connection.give_up("it does not answer")
            raise
        self._failures = self._unanswered = 0
        return result

    def _connected(self) -> Connection:
        if self._current is None or self._current.over:
            self._failures += self._current is not None
            pause = PAUSES[min(self._failures, len(PAUSES) - 1)]
            self._current = Connection(self._server, pause)
        return self._current


def _why(error: BaseException) -> str:
    """The first cause within groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)


# -- transports ------------------------------------------------------------------------------------------


@asynccontextmanager
async def _client(server: Server, life: Life) -> AsyncIterator[Client]:
    from mcp import Client

    transport = _pipes(server, life) if server.command else _http(server)
    async with Client(transport, cache=None) as client:
        yield client


@asynccontextmanager
async def _http(server: Server) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    client = httpx2.AsyncClient(
        transport=_bounded_transport(),
        headers=bearer(server.api_key_env),
        timeout=httpx2.Timeout(10.0, read=None, pool=None),  # deadlines of answers are those of the calls
        follow_redirects=True,
    )
    async with client, streamable_http_client(server.url, http_client=client) as streams:
        yield streams


def _bounded_transport() -> Any:
    """HTTP whose answers fail after MAX_BYTES; in a stream of events, the bytes of one event count."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, response: Any) -> None:
            self._stream = response.stream
            self._events = response.headers.get("content-type", "").startswith("text/event-stream")

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in self._stream:
                ended = self._events and (b"\n\n" in chunk or b"\r\n\r\n" in chunk)
                size = 0 if ended else size + len(chunk)
                if size > MAX_BYTES:
                    log.warning("an answer of an MCP server was cut off after %d bytes", MAX_BYTES)
                    raise httpx2.ReadError(f"the server's answer is larger than {MAX_BYTES} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            response.stream = Bounded(response)
            return response

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    return Transport(limits=limits)


@asynccontextmanager
async def _pipes(server: Server, life: Life) -> AsyncIterator[Any]:
    """A started server. Unlike the package's own transport it bounds what it reads, and knows of its end."""
    import anyio
    from mcp.client.stdio import get_default_environment

    passed = {name: os.environ[name] for name in server.env if name in os.environ}
    program, *arguments = shlex.split(server.command)
    process = await asyncio.create_subprocess_exec(
        sys.executable if program == "python" else program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_BYTES,
        env=get_default_environment() | passed,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    heard, messages = anyio.create_memory_object_stream[Any](0)
    said, outgoing = anyio.create_memory_object_stream[Any](0)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_listen, process, heard, life)
            group.start_soon(_speak, process, outgoing, life)
            group.start_soon(_keep_stderr, process, life)
            yield messages, said
            group.cancel_scope.cancel()
    finally:
        for stream in (heard, messages, said, outgoing):
            stream.close()
        with anyio.CancelScope(shield=True):
            await _stop(process)


async def _listen(process: asyncio.subprocess.Process, heard: Any, life: Life) -> None:
    """Hand on messages until the process closes its output, or breaks the rules."""
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert process.stdout is not None
    problem = "it ended"
    with heard:
        try:
            while life.noise < MAX_NOISE and (line := await process.stdout.readline()):
                message = None
                if line.lstrip().startswith(b"{"):
                    with suppress(ValueError):
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                if message is not None:
                    await heard.send(SessionMessage(message))
                else:
                    life.noise += len(line)
                    life.stderr = (life.stderr + line[:TAIL])[-TAIL:]
        except ValueError:  # of readline: over its limit
            problem = f"it sent a message of more than {MAX_BYTES} bytes"
        life.end("its output is no MCP" if life.noise >= MAX_NOISE else problem)


async def _speak(process: asyncio.subprocess.Process, outgoing: Any, life: Life) -> None:
    assert process.stdin is not None
    try:
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()
    except ConnectionError as error:
        life.end(f"it takes no input ({one_line(error)})")


async def _keep_stderr(process: asyncio.subprocess.Process, life: Life) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(1 << 16):
        life.stderr = (life.stderr + chunk)[-TAIL:]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """No more input, then SIGTERM, then SIGKILL, to all that it started."""
    assert process.stdin is not None
    process.stdin.close()
    for step in (None, signal.SIGTERM, signal.SIGKILL):
        if step is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, step)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await process.wait()
                return


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
