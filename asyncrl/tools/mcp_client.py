"""Connections to MCP servers that are started here, or reached at a URL (streamable HTTP).

    call of a tool ──► SharedConnection (of a worker) ──► McpConnection ──► Client of the package `mcp`
                  └──► McpConnection (of an episode)

The package must leave cancel scopes in the task that entered them, so each connection has its own task.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncrlError, ConfigError, UserCodeError, one_line, users_code
from asyncrl.isolation.child import inherited_environment
from asyncrl.remote import bearer_header, proxy_of
from asyncrl.tools.mcp_pipes import MAX_MESSAGE_BYTES, start_server
from asyncrl.types import Sample

log = logging.getLogger("asyncrl.tools")

MAX_TOOLS = 256  # tools of one server
CLOSE_SECONDS = 5.0  # to close a connection
MAX_UNANSWERED = 8  # after so many consecutive calls without an answer a server counts as hung
# Seconds before a new connection, by consecutive failures.
RECONNECT_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
VARIABLE_REFERENCE = re.compile(r"\$(\w+)")
# Errors of the package after which no call can succeed.
ENDED_MESSAGES = ("Connection closed", "Session terminated")


class McpError(AsyncrlError):
    """An MCP server refused a request, or could not be reached."""


class McpServerLost(McpError):
    """The connection ended. A call that was under way may or may not have had its effect."""


@dataclass(frozen=True)
class McpServer:
    """Describes a server: the `command` line to start (`python` is this interpreter), or the `url`.

    `env` names variables of this process that a started server sees beside the usual variables (PATH, HOME,
    ...); `api_key_env` the variable with the bearer token of a URL. `headers` of requests to a URL: (name,
    value), where $NAME stands for a variable, which is read for each connection. `start_timeout`: seconds for
    the handshake.
    """

    command: str = ""
    url: str = ""
    env: tuple[str, ...] = ()
    api_key_env: str = ""
    start_timeout: float = 60.0
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.command or self.url

    def request_headers(self) -> dict[str, str]:
        """Return the headers with the values of variables. ConfigError: a variable is empty, or holds no
        value of a header."""

        def variable_value(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], "")
            if not (value.isascii() and value.isprintable() and value):  # errors of httpx2 would quote it
                raise ConfigError(
                    f"the environment variable {match[1]} does not contain a valid header value; set it"
                )
            return value

        return bearer_header(self.api_key_env) | {
            name: VARIABLE_REFERENCE.sub(variable_value, text) for name, text in self.headers
        }


_connections: set[McpConnection] = set()

servers_of_older_handshake: set[McpServer] = set()
"""Servers that get the older handshake at once, because ignoring the newer handshake costs 10 s."""


class McpConnection:
    """Keeps one connection, from the handshake, which begins after `pause` seconds, to the end."""

    def __init__(self, server: McpServer, pause: float = 0.0) -> None:
        self._server = server
        self._server_output = bytearray()  # the end of the server's output beside messages
        self._end_reason = ""
        self._http_refusal = ""  # the HTTP error that was the newest answer to a request
        self._ending = asyncio.Event()
        self._message_stream: Any = None  # the stream of messages from a started server

        self.loop = asyncio.get_running_loop()
        self._client: asyncio.Future[Any] = self.loop.create_future()
        self._client.add_done_callback(lambda client: client.cancelled() or client.exception())
        self._holder_task = asyncio.create_task(self._hold_connection(pause))
        _connections.add(self)

    @property
    def is_over(self) -> bool:
        """Return whether no call can succeed any more."""
        closed = self._message_stream is not None and self._message_stream.statistics().open_send_streams == 0
        return closed or self._ending.is_set()

    async def open(self, sample: Sample) -> None:
        """Wait for the handshake, at the start of an episode. McpError says why it failed."""
        await asyncio.shield(self._client)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the server's CallToolResult. McpError, or McpServerLost when the connection ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await asyncio.shield(self._client)  # cancelling this wait does not cancel the handshake

        if self.is_over:
            end_text = self._describe_end("the connection was closed before the call")
            raise McpServerLost(f"the connection to the MCP server was lost: {end_text}")

        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            if error.message in ENDED_MESSAGES:
                self.end_connection(error.message)
            if not self.is_over and error.code != CONNECTION_CLOSED:
                raise McpError(f"{name}: {self._http_refusal or one_line(error)}") from error
            end_text = self._describe_end(error.message)
            lost_text = f"the connection to the MCP server was lost during the call: {end_text}"
            raise McpServerLost(lost_text) from error

    async def tools(self) -> list[Any]:
        """List the tools of the server, within `start_timeout`. Also raises errors of the package."""
        client = await asyncio.shield(self._client)
        listed_tools: list[Any] = []
        cursor: str | None = None

        async with asyncio.timeout(self._server.start_timeout):
            while len(listed_tools) <= MAX_TOOLS:
                page = await client.list_tools(cursor=cursor)
                listed_tools += page.tools
                if (cursor := page.next_cursor) is None:
                    return listed_tools
        raise ValueError(f"the server has more than {MAX_TOOLS} tools")

    def end_connection(self, end_reason: str) -> None:
        """Let the task close the connection. A handshake goes on, as it has its own deadline."""
        if self._client.done():
            self._end_reason = self._end_reason or end_reason
            self._ending.set()

    async def close(self) -> None:
        """End the connection within CLOSE_SECONDS; a started process is gone afterwards."""
        self.end_connection("the connection was closed")
        if not self._client.done():
            self._holder_task.cancel()

        done, _ = await asyncio.wait({self._holder_task}, timeout=CLOSE_SECONDS)
        if not done:
            self._holder_task.cancel()

    async def _hold_connection(self, pause: float) -> None:
        """Connect and shake hands, wait for the end, and close: the connection's task."""
        server = self._server
        problem = "the connection was closed"
        try:
            await asyncio.sleep(pause)
            with users_code():
                await self._connect_until_ending()
        except Exception as error:  # the boundary to the package, its transports and the server
            cause: BaseException = error
            if isinstance(error, UserCodeError) and error.__cause__ is not None:
                cause = error.__cause__
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]

            timed_out = isinstance(cause, TimeoutError)
            timeout_text = f"no handshake within {server.start_timeout:g} s"
            problem = self._http_refusal or (timeout_text if timed_out else one_line(cause))
        finally:
            end_text = self._describe_end(problem)
            if not self._client.done():
                self._client.set_exception(McpError(f"no MCP server at {server}: {end_text}"))
            self.end_connection(problem)
            _connections.discard(self)

    async def _connect_until_ending(self) -> None:
        from mcp import Client

        server = self._server
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(server.start_timeout):
                if server.command:
                    transport = start_server(
                        server.command, inherited_environment(server.env), self._server_output
                    )
                else:
                    transport = self._http_transport()
                streams = await stack.enter_async_context(transport)
                handshake_mode = "legacy" if server in servers_of_older_handshake else "auto"
                unconnected = Client(nullcontext(streams), cache=None, mode=handshake_mode)
                client = await stack.enter_async_context(unconnected)

            if client.session.initialize_result is not None:
                servers_of_older_handshake.add(server)
            self._message_stream = streams[0] if server.command else None
            self._client.set_result(client)
            await self._ending.wait()

    @asynccontextmanager
    async def _http_transport(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(10.0, read=None, pool=None),  # calls have their own deadlines
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            follow_redirects=True,
            # A server on this machine is reached without the environment's proxy.
            mounts={} if proxy_of(self._server.url) else {"all://": None},
            event_hooks={
                "request": [_header_hook(self._server)],
                "response": [self._note_refusal, _bound_answer],
            },
        )
        async with client, streamable_http_client(self._server.url, http_client=client) as streams:
            yield streams

    async def _note_refusal(self, response: Any) -> None:
        """Keep the HTTP error of a refused message, which the package does not pass on."""
        if response.request.method != "POST" or response.is_redirect:
            return

        status = response.status_code
        settings_hint = "; set headers or api_key_env" if status in (401, 403) else ""
        self._http_refusal = f"HTTP {status} {response.reason_phrase}{settings_hint}" if status >= 400 else ""

    def _describe_end(self, problem: str) -> str:
        """Say why the connection ended, with the end of the server's output beside messages."""
        output_end = " ".join(self._server_output.decode("utf-8", "replace").split())[-300:]
        return (self._end_reason or problem) + (f" (the server wrote: {output_end})" if output_end else "")


class SharedConnection:
    """Keeps the connection that all episodes of a worker share: made on first use, and made again, after a
    growing pause, when lost."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._failed_connections = 0
        self._unanswered_calls = 0
        self._current_connection: McpConnection | None = None

    async def call(self, name: str, arguments: dict[str, Any], max_attempts: int) -> Any:
        """Call a tool as McpConnection.call does, up to `max_attempts` times if connections are lost."""
        connection = self._current_connection
        if connection is None or connection.is_over:
            if connection is not None:
                connection.end_connection("the connection was closed")
                self._failed_connections += 1
            pause = RECONNECT_PAUSES[min(self._failed_connections, len(RECONNECT_PAUSES) - 1)]
            connection = self._current_connection = McpConnection(self._server, pause)

        try:
            result = await connection.call(name, arguments)
        except McpServerLost:
            if max_attempts == 1:
                raise
            return await self.call(name, arguments, max_attempts - 1)
        except asyncio.CancelledError:
            self._unanswered_calls += 1
            if self._unanswered_calls >= MAX_UNANSWERED:
                connection.end_connection("the server does not answer")
            raise

        self._failed_connections = self._unanswered_calls = 0
        return result


async def close_servers() -> None:
    """Close all connections of this event loop within CLOSE_SECONDS, as servers may have something to save. A
    later call opens new connections."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(
        *(connection.close() for connection in list(_connections) if connection.loop is loop)
    )


# -- HTTP ------------------------------------------------------------------------------------------


def _header_hook(server: McpServer) -> Callable[[Any], Awaitable[None]]:
    """Make a hook that adds the headers. No other host gets the headers, wherever the server redirects to."""
    import httpx2

    server_url = httpx2.URL(server.url)
    headers = server.request_headers()

    async def add_headers(request: Any) -> None:
        is_same_host = (request.url.scheme, request.url.netloc) == (server_url.scheme, server_url.netloc)
        for name, value in headers.items():
            request.headers.pop(name, None)
            if is_same_host:
                request.headers[name] = value

    return add_headers


async def _bound_answer(response: Any) -> None:
    """Let an answer fail after MAX_MESSAGE_BYTES; in a stream of events, the bytes of one event count."""
    import httpx2

    stream = response.stream
    max_bytes = MAX_MESSAGE_BYTES
    is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")

    class BoundedStream(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            received_bytes = 0
            async for chunk in stream:
                event_ended = is_event_stream and (b"\n\n" in chunk or b"\r\n\r\n" in chunk)
                received_bytes = 0 if event_ended else received_bytes + len(chunk)
                if received_bytes > max_bytes:
                    log.warning("a response from an MCP server was cut off after %d bytes", max_bytes)
                    raise httpx2.ReadError(f"the server's answer is larger than {max_bytes} bytes")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = BoundedStream()
