"""An agent that is a program of its own: any language, any framework.

    sample as JSON ──stdin──► program ──stdout──► its last line, as JSON, is the result

It finds its model by OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. It runs in a process group of its own,
of which nothing is left when the episode is over.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.gateway.agents import MAX_RESULT, agents
from asyncrl.gateway.server import Endpoint
from asyncrl.types import Sample

MAX_ERROR = 4096  # bytes of stderr that are read back
CLOSE_SECONDS = 2.0  # for the pipes of a program that has ended
CHUNK = 1 << 16
PR_SET_PDEATHSIG = 1

Line = Annotated[str, msgspec.Meta(min_length=1)]

_libc = ctypes.CDLL(None)


class CommandError(AsyncrlError):
    """The program could not be run, or failed."""


@agents.register("command")
async def command(sample: Sample, endpoint: Endpoint, *, line: Line, directory: str = "") -> Any:
    """Run `line`, a command with its arguments (no shell; `sh -c '...'` is one), in `directory` (default:
    where the run was started). CommandError on an exit code other than 0, with the last line of stderr."""
    process = await _start(_split(line), directory or None, _environment(os.environ, endpoint))
    out, err = _Tail(MAX_RESULT), _Tail(MAX_ERROR)
    assert process.stdout is not None and process.stderr is not None
    reading = asyncio.gather(out.read(process.stdout), err.read(process.stderr))
    try:
        await _feed(process, _written(sample))
        code = await process.wait()
        _kill(process)  # children that hold the pipes
        with suppress(TimeoutError):
            await asyncio.wait_for(reading, CLOSE_SECONDS)
    finally:
        _kill(process)
        reading.cancel()
        await process.wait()
    if code != 0:
        raise CommandError(f"{line.split()[0]} ended with code {code}: {err.last_line or 'no message'}")
    return _result(out.last_line)


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


async def _start(words: list[str], directory: str | None, environment: dict[str, str]) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=directory,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        raise CommandError(f"{words[0]} cannot be run: {error.strerror}") from error


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _feed(process: Process, text: bytes) -> None:
    """A program need not read it."""
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


def _kill(process: Process) -> None:
    """What is left of the group, the program's own children included."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Tail:
    """The end of a stream of any length."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(CHUNK):
            self._kept = (self._kept + chunk)[-self._limit :]

    @property
    def last_line(self) -> str:
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def _result(line: str) -> Any:
    """A program may end with words for people: that is no result."""
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(line)
        if isinstance(value, dict | int | float) and not isinstance(value, bool):
            return value
    return None
