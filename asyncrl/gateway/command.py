"""An agent that is a program of its own: any language, any framework.

    sample as JSON ──stdin──► program ──stdout──► its last line, as JSON, is the result

It finds its model by OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Nothing of it or of what it started is
left when the episode is over, or when the worker is killed.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.gateway.agents import MAX_RESULT, agents
from asyncrl.gateway.server import Endpoint
from asyncrl.isolation.child import wrapped
from asyncrl.isolation.wrapper import KILL, KILL_SECONDS
from asyncrl.types import Sample

MAX_ERROR = 4096  # bytes of stderr that are read back
CLOSE_SECONDS = 2.0  # for the pipes of a program that has ended

Line = Annotated[str, msgspec.Meta(min_length=1)]


class CommandError(AsyncrlError):
    """The program could not be run, or failed."""


@agents.register("command")
async def command(sample: Sample, endpoint: Endpoint, *, line: Line, directory: str = "") -> Any:
    """Run `line`, a command with its arguments (no shell; `sh -c '...'` is one), in `directory` (default:
    where the run was started). CommandError on an exit code other than 0, with the last line of stderr."""
    program = _Program()
    transport = await _start(program, _split(line), directory or None, _environment(os.environ, endpoint))
    try:
        stdin: Any = transport.get_pipe_transport(0)
        stdin.write(_written(sample))
        stdin.close()  # when all of it is read, or the program has ended
        await program.exited.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(program.closed.wait(), CLOSE_SECONDS)
    finally:
        await _end(program, transport)
    if code := transport.get_returncode():
        raise CommandError(
            f"{line.split()[0]} ended with code {code}: {program.err.last_line or 'no message'}"
        )
    return _result(program.out.last_line)


class _Tail:
    """The end of a stream of any length."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, b""

    def add(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-self._limit :]

    @property
    def last_line(self) -> str:
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


class _Program(asyncio.SubprocessProtocol):
    """What asyncio tells of a process. `exited`: it has; `closed`: and nobody holds its pipes any more."""

    def __init__(self) -> None:
        self.out, self.err = _Tail(MAX_RESULT), _Tail(MAX_ERROR)
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        (self.out if fd == 1 else self.err).add(data)

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


def _written(sample: Sample) -> bytes:
    """The sample with the values of its JSON texts."""
    values = {name: msgspec.json.decode(getattr(sample, name)) for name in ("ground_truth", "extra_info")}
    return msgspec.json.encode({**msgspec.to_builtins(sample), **values})


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise CommandError(f"rollout.agent.command.line {line!r}: {error}") from None


def _environment(own: Mapping[str, str], endpoint: Endpoint) -> dict[str, str]:
    """This process's, with the endpoint; a proxy would not find it."""
    no_proxy = ",".join(filter(None, (own.get("NO_PROXY") or own.get("no_proxy"), "127.0.0.1")))
    return {
        **own,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


async def _start(
    program: _Program, words: list[str], directory: str | None, environment: dict[str, str]
) -> asyncio.SubprocessTransport:
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            lambda: program, *wrapped(words), cwd=directory, env=environment, start_new_session=True
        )
    )
    try:
        transport, _ = await asyncio.shield(starting)
    except asyncio.CancelledError:  # asyncio would wait for the program
        await asyncio.wait([starting])
        if starting.exception() is None:
            await _end(program, starting.result()[0])
        raise
    except OSError as error:
        raise CommandError(f"{words[0]} cannot be run: {error.strerror}") from error
    return transport


async def _end(program: _Program, transport: asyncio.SubprocessTransport) -> None:
    """Kill what is left, and wait for that: closing the transport sooner would kill the wrapper alone."""
    try:
        if transport.get_returncode() is None:
            with suppress(ProcessLookupError):
                os.kill(transport.get_pid(), KILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(program.exited.wait(), 2 * KILL_SECONDS)
    finally:
        transport.close()


def _result(line: str) -> Any:
    """A program may end with words for people: that is no result."""
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(line)
        if isinstance(value, dict | int | float) and not isinstance(value, bool):
            return value
    return None
