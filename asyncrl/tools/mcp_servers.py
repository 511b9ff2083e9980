"""Connections to MCP servers, and who may use them for how long.

All of a process's connections live in the event loop of one thread, whatever loop a call comes from. What the
package enters in one task must be left in it, so each connection is held by a task of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.tools.mcp_transports import Life, Server, connected

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")

CLOSE = 5.0  # seconds for all of a connection's end
STUCK = 8  # calls in a row that were given up without an answer, after which a server counts as hung
PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a connection, by failures in a row before it
ENDED = ("Connection closed", "Session terminated")  # what the package says when no call can succeed any more


class ServerError(AsyncrlError):
    """An MCP server refused a request, or could not be reached."""


class ServerLost(ServerError):
    """The connection ended while a call was under way: nobody knows whether it had its effect."""


# -- the thread ------------------------------------------------------------------------------------------

_loops: list[asyncio.AbstractEventLoop] = []
_starting = threading.Lock()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run it in the thread of the connections."""
    with _starting:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, daemon=True, name="mcp").start()
            atexit.register(_at_exit)
    return asyncio.run_coroutine_threadsafe(work, _loops[0])


async def there(work: Coroutine[Any, Any, T]) -> T:
    """Await it in the thread of the connections; cancelled with its caller."""
    return await asyncio.wrap_future(submit(work))


# -- connections; everything below runs in that thread ------------------------------------------------------

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


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
        _open.add(self)

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
                    client = await stack.enter_async_context(connected(self._server, self._life))
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


async def close_servers() -> None:
    """End all connections of this process, within CLOSE seconds: servers may have something to put away. A
    later call opens them again."""
    if _loops:
        await there(_close_all())


async def _close_all() -> None:
    await asyncio.gather(*(connection.close() for connection in list(_open) if not connection.over))


def _at_exit() -> None:
    with suppress(TimeoutError):
        submit(_close_all()).result(CLOSE)


def _why(error: BaseException) -> str:
    """The first cause within groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)
