"""How MCP servers are reached: over the pipes of a process that is started, or at a URL (streamable HTTP).

Whatever a server sends is bounded: a message that is too long ends the connection, not the worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.errors import one_line
from asyncrl.remote.model import bearer

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("asyncrl.tools")

MAX_BYTES = 8 << 20  # of one message; a server that sends more is given up
MAX_NOISE = 1 << 18  # bytes on a server's standard output that are no messages
TAIL = 2000  # last bytes of a server's standard error that are kept for error messages
GRACE = 1.0  # seconds between asking a server to end and making it
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # not in the child between fork and exec, where a lock may be held


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


@asynccontextmanager
async def connected(server: Server, life: Life) -> AsyncIterator[Client]:
    """A client after its handshake."""
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
    """No more input, then SIGTERM; when it has ended, or will not, SIGKILL to all that it started."""
    assert process.stdin is not None
    process.stdin.close()
    if not await _ends(process):
        _signal(process, signal.SIGTERM)
        await _ends(process)
    _signal(process, signal.SIGKILL)  # its helpers, too, which outlive a server that leaves by itself
    await _ends(process)


async def _ends(process: asyncio.subprocess.Process) -> bool:
    """Within GRACE."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE):
            await process.wait()
            return True
    return False


def _signal(process: asyncio.subprocess.Process, step: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, step)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
