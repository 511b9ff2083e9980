"""The pipes of an MCP server that a worker starts, as streams of the package `mcp`.

The package's `stdio_client` keeps a line of any length in memory, and logs a traceback for each line that is
not a message."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from asyncrl.isolation.child import wrapped_command

MAX_MESSAGE_BYTES = 8 << 20  # bytes of one message
MAX_NOISE_BYTES = 1 << 18  # bytes of standard output beside messages
MAX_ERROR_BYTES = 2000  # bytes of standard error that are kept
END_SECONDS = 2.0  # a server may take so long to end after its input; then SIGTERM, 1 s later SIGKILL
GONE_SECONDS = 8.0  # all processes must be gone so long after SIGTERM; the wrapper kills them earlier
# The beginning of a JSON-RPC answer, and the end of an answer whose id is not at the beginning.
ANSWER_HEAD = re.compile(
    rb'\s*\{(?:\s*"jsonrpc"\s*:\s*"2\.0"\s*,|\s*"id"\s*:\s*(\d{1,18})\s*,)*\s*"(?:result|error)"\s*:'
)
ANSWER_TAIL = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
PARSE_ERROR_CODE = -32700  # defined by JSON-RPC
FLUSH_SECONDS = 0.5  # to read the output of an ended server, whose children may hold the pipes open


@asynccontextmanager
async def start_server(
    command_line: str, environment: Mapping[str, str], server_output: bytearray
) -> AsyncIterator[Any]:
    """Start a server by `command_line`, and yield its streams. `server_output` gets the end of the server's
    output beside messages."""
    from anyio import create_memory_object_stream

    program, *arguments = shlex.split(command_line)
    wrapped_line = wrapped_command([sys.executable if program == "python" else program, *arguments])

    process = await asyncio.create_subprocess_exec(
        *wrapped_line, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_MESSAGE_BYTES
    )

    incoming_writer, incoming_reader = create_memory_object_stream[Any](0)
    outgoing_writer, outgoing_reader = create_memory_object_stream[Any](0)

    error_task = asyncio.create_task(_keep_output(process.stderr, server_output))
    pipes = (
        _receive_messages(process, incoming_writer, server_output, error_task),
        _send_messages(process, outgoing_reader, incoming_writer),
    )
    tasks = [error_task, *map(asyncio.create_task, pipes)]

    try:
        yield incoming_reader, outgoing_writer
    finally:
        incoming_reader.close()
        await _end_server(process, tasks, server_output)


async def _end_server(process: Process, tasks: list[asyncio.Task[None]], server_output: bytearray) -> None:
    """End the server as the protocol says: end of input, then SIGTERM. Then read the rest of the pipes:
    `wait` returns only when the pipes have ended, and an ending event loop also cancels the reading
    tasks."""
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
                await _skip_output(process.stdout)
                await _keep_output(process.stderr, server_output)
                await process.wait()


def _terminate(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()


async def _receive_messages(
    process: Process, incoming_writer: Any, server_output: bytearray, error_task: asyncio.Task[None]
) -> None:
    """Pass on lines that are messages; more than MAX_NOISE_BYTES of other lines end the server. An unreadable
    answer becomes an error of the call."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp.shared.message import SessionMessage
    from mcp.types import ErrorData, JSONRPCError, jsonrpc_message_adapter

    assert process.stdout is not None
    noise_bytes = 0

    async with incoming_writer:
        with suppress(BrokenResourceError, ClosedResourceError):  # the connection was closed
            while noise_bytes <= MAX_NOISE_BYTES:
                line = b""
                message: Any = None
                line_bytes = MAX_MESSAGE_BYTES  # readline raises ValueError for a line beyond the limit
                try:
                    line = await process.stdout.readline()
                    line_bytes = len(line)
                    if not line:
                        break
                    if b'"jsonrpc"' not in line:  # servers may also log in JSON
                        raise ValueError
                    text = line.decode(errors="replace")
                    message = jsonrpc_message_adapter.validate_json(text, by_name=False)
                except ValueError:
                    noise_bytes += line_bytes
                    _keep_end(server_output, line)
                    if (call_id := answered_call_id(line)) is not None:
                        problem = "the server's answer is not a JSON-RPC message"
                        error = ErrorData(code=PARSE_ERROR_CODE, message=problem)
                        message = JSONRPCError(jsonrpc="2.0", id=call_id, error=error)

                if message is not None:
                    await incoming_writer.send(SessionMessage(message))
        if noise_bytes > MAX_NOISE_BYTES:
            noise_text = (
                f"\nthe server sent {noise_bytes} bytes that are not MCP messages of at most "
                f"{MAX_MESSAGE_BYTES} bytes"
            )
            _keep_end(server_output, noise_text.encode())
            _terminate(process)
        else:
            await asyncio.wait({error_task}, timeout=FLUSH_SECONDS)
    await _skip_output(process.stdout)  # a server that blocks on writing does not notice the end of its input


def answered_call_id(line: bytes) -> int | None:
    """Return the id of the answered call, judged by the ends of a line: the line may not be JSON, and ids
    within a result are other ids. None for logs, requests and notifications."""
    answer_head = ANSWER_HEAD.match(line) if b'"jsonrpc"' in line else None
    if answer_head is None:
        return None
    if answer_head[1]:
        return int(answer_head[1])

    answer_tail = ANSWER_TAIL.search(line)
    braces = JSON_STRING.sub(b"", line)
    is_cut = braces.count(b"{") != braces.count(b"}")  # then the last id may belong to the result
    return int(answer_tail[1]) if answer_tail and not is_cut else None


async def _send_messages(process: Process, outgoing_reader: Any, incoming_writer: Any) -> None:
    assert process.stdin is not None
    with suppress(OSError), incoming_writer:  # closing ends calls that wait for a server that reads no more
        async for outgoing_message in outgoing_reader:
            process.stdin.write(
                outgoing_message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            )
            await process.stdin.drain()


async def _skip_output(output: Any) -> None:
    while await output.read(1 << 16):
        pass


async def _keep_output(error_stream: Any, server_output: bytearray) -> None:
    while data := await error_stream.read(1 << 16):
        _keep_end(server_output, data)


def _keep_end(server_output: bytearray, data: bytes) -> None:
    server_output[:] = (server_output + data)[-MAX_ERROR_BYTES:]
