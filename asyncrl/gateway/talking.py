"""Talks to a program in its place: gives it its input, and keeps the end of what it prints."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.gateway.lines import CommandError
from asyncrl.gateway.places import EpisodePlace
from asyncrl.isolation.wrapper import KILL_SECONDS
from asyncrl.values import MAX_RESULT

MAX_ERROR = 1 << 16  # bytes of stderr that are kept
MAX_COMPLAINT = 300  # characters
FRAME = re.compile(r'^ +File "([^"<>]+)", line (\d+)', re.MULTILINE)  # of a Python traceback
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python\d")


async def talk(
    words: Sequence[str], place: EpisodePlace, environment: Mapping[str, str], given: bytes = b""
) -> list[str]:
    """Run a program in a place, and return the last lines of its output. CommandError, with the last line of
    its errors, if it fails."""
    (stdin, feed), (read_out, stdout), (read_err, stderr) = (os.pipe() for _ in range(3))
    out = asyncio.ensure_future(_tail(read_out, MAX_RESULT))
    err = asyncio.ensure_future(_tail(read_err, MAX_ERROR))
    fed = asyncio.ensure_future(_feed(feed, given))
    try:
        status = await place.run(words, environment, (stdin, stdout, stderr))
    finally:  # all of its processes have ended, and so do the pipes
        await asyncio.wait([fed, out, err], timeout=KILL_SECONDS)
    if status:
        raise CommandError(f"{words[0]} ended with code {status}: {_complaint(err.result()) or 'no message'}")
    return out.result()


async def _feed(descriptor: int, given: bytes) -> None:
    connect = asyncio.get_running_loop().connect_write_pipe
    writer, _ = await connect(asyncio.BaseProtocol, os.fdopen(descriptor, "wb", 0))
    writer.write(given)
    writer.close()  # when all of it is read, or nobody can read it


async def _tail(descriptor: int, limit: int) -> list[str]:
    """Read a pipe to its end, and return the lines in its last `limit` bytes."""
    stream, kept = asyncio.StreamReader(), bytearray()
    protocol = partial(asyncio.StreamReaderProtocol, stream)
    await asyncio.get_running_loop().connect_read_pipe(protocol, os.fdopen(descriptor, "rb", 0))
    while data := await stream.read(1 << 16):
        kept += data
        if len(kept) > 2 * limit:  # not each time: it would copy all that is kept
            del kept[:-limit]
    return kept[-limit:].decode(errors="replace").strip().splitlines()


def _complaint(lines: Sequence[str]) -> str:
    """Return the last line; for a Python traceback, with the innermost place in a user's file."""
    if not lines:
        return ""
    above = "\n".join(lines[:-1]).rpartition("Traceback (most recent call last):")[2]
    frames = [frame for frame in FRAME.findall(above) if not INSTALLED.search(frame[0])]
    raised = frames and lines[-2].startswith(" ")
    return lines[-1].strip()[:MAX_COMPLAINT] + (
        f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if raised else ""
    )


def result_in(line: str) -> Any:
    """Read the number or object in the last line; None for any other text."""
    with suppress(ValueError, RecursionError):
        value = msgspec.json.decode(line)
        if isinstance(value, dict | int | float) and not isinstance(value, bool):
            return value
    return None
