"""The pipes of an MCP server that a worker starts, as streams of the package `mcp`.

The package's `stdio_client` keeps a line of any length in memory, and logs a traceback for each line that
is no message.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from asyncrl.isolation.child import wrapped

MAX_BYTES = 8 << 20  # bytes of one message
MAX_NOISE = 1 << 18  # bytes on standard output that are no messages
TAIL = 2000  # bytes of standard error that are kept
END_SECONDS = 2.0  # for a server to end by itself once its input has ended; then SIGTERM, 1 s later SIGKILL
GONE_SECONDS = 8.0  # for all of its processes to be gone after SIGTERM; the wrapper kills them before
# How a JSON-RPC answer begins, and how one ends whose id is not at the beginning.
ANSWER_HEAD = re.compile(
    rb'\s*\{(?:\s*"jsonrpc"\s*:\s*"2\.0"\s*,|\s*"id"\s*:\s*(\d{1,18})\s*,)*\s*"(?:result|error)"\s*:'
)
ANSWER_TAIL = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
NO_JSON = -32700  # the code of JSON-RPC
FLUSH_SECONDS = 0.5  # to read what an ended server wrote; its children may hold its pipes open


@asynccontextmanager
async def started(line: str, env: Mapping[str, str], wrote: bytearray) -> AsyncIterator[Any]:
    """Start a server by the command `line`, and yield its streams. `wrote`: the end of what it writes beside
    messages."""
    from anyio import create_memory_object_stream

    program, *arguments = shlex.split(line)
    command = wrapped([sys.executable if program == "python" else program, *arguments])
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_BYTES
    )
    received, read = create_memory_object_stream[Any](0)
    write, sent = create_memory_object_stream[Any](0)
    errors = asyncio.create_task(_keep_all(process.stderr, wrote))
    pipes = (_receive(process, received, wrote, errors), _send(process, sent, received))
    tasks = [errors, *map(asyncio.create_task, pipes)]
    try:
        yield read, write
    finally:
        read.close()
        await _end(process, tasks, wrote)


async def _end(process: Process, tasks: list[asyncio.Task[None]], wrote: bytearray) -> None:
    """End it as the protocol says: end of input, then SIGTERM. Read what is still in the pipes: `wait`
    returns only when they have ended, and an event loop that ends also cancels the tasks that read."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    finally:
        _terminate(process)
        for task in tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(GONE_SECONDS):
                await asyncio.wait(tasks)
                await _skip(process.stdout)
                await _keep_all(process.stderr, wrote)
                await process.wait()


def _terminate(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()


async def _receive(process: Process, received: Any, wrote: bytearray, errors: asyncio.Task[None]) -> None:
    """Pass on lines that are messages; more than MAX_NOISE bytes of others end the server. An answer that
    cannot be read is an error of its call."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert process.stdout is not None
    noise = 0
    async with received:
        with suppress(BrokenResourceError, ClosedResourceError):  # the connection was closed
            while noise <= MAX_NOISE:
                line = b""
                size = MAX_BYTES  # a line beyond the limit is a ValueError, too, and is not returned
                try:
                    line = await process.stdout.readline()
                    size = len(line)
                    if not line:
                        break
                    if b'"jsonrpc"' not in line:  # servers may log in JSON, too
                        raise ValueError
                    text = line.decode(errors="replace")
                    message = jsonrpc_message_adapter.validate_json(text, by_name=False)
                except ValueError:
                    noise += size
                    _keep(wrote, line)
                    message = _unreadable(line)
                if message is not None:
                    await received.send(SessionMessage(message))
        if noise > MAX_NOISE:
            said = f"\nit sent {noise} bytes that are no MCP messages of at most {MAX_BYTES} bytes"
            _keep(wrote, said.encode())
            _terminate(process)
        else:
            await asyncio.wait({errors}, timeout=FLUSH_SECONDS)
    await _skip(process.stdout)  # a server that waits to write does not see that it should end


def _unreadable(line: bytes) -> Any:
    """The error that takes the place of an answer that is no JSON; None for a line that is no answer."""
    from mcp.types import ErrorData, JSONRPCError

    call_id = answered_call_id(line)
    if call_id is None:
        return None
    error = ErrorData(code=NO_JSON, message="the server's answer is no JSON-RPC message")
    return JSONRPCError(jsonrpc="2.0", id=call_id, error=error)


def answered_call_id(line: bytes) -> int | None:
    """Return the id of the call that a line answers, as far as its edges say: the line may be no JSON, and
    ids within a result are other things. None for logs, requests and notifications."""
    head = ANSWER_HEAD.match(line) if b'"jsonrpc"' in line else None
    if head is None:
        return None
    if head[1]:
        return int(head[1])

    tail = ANSWER_TAIL.search(line)
    braces = JSON_STRING.sub(b"", line)
    is_cut = braces.count(b"{") != braces.count(b"}")  # then the last id may be one of the result
    return int(tail[1]) if tail and not is_cut else None


async def _send(process: Process, sent: Any, received: Any) -> None:
    assert process.stdin is not None
    with suppress(OSError), received:  # closed, else a call would wait for a server that reads no more
        async for item in sent:
            process.stdin.write(
                item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            )
            await process.stdin.drain()


async def _skip(output: Any) -> None:
    while await output.read(1 << 16):
        pass


async def _keep_all(errors: Any, wrote: bytearray) -> None:
    while data := await errors.read(1 << 16):
        _keep(wrote, data)


def _keep(wrote: bytearray, data: bytes) -> None:
    wrote[:] = (wrote + data)[-TAIL:]
