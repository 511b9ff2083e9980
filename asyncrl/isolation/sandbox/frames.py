"""Messages between a sandbox and its owner: frames of one header and raw bytes, bounded on both sides.

The owner and the child share this module, which therefore imports nothing that is slow to start.
"""

from __future__ import annotations

import enum
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

REQUEST_HEADER = struct.Struct("!cdII")  # kind, seconds, bytes of the source, bytes of the input
# Index of the ending, status, whether state was lost, bytes left out, bytes of the output
REPLY_HEADER = struct.Struct("!Bi?QI")
HELLO = struct.Struct("!BI")  # bits of the guarantees in force (see GUARANTEES), bytes of the notes

ISOLATION = ("network", "files", "processes", "orphans", "memory")
"""The isolation of a sandbox, in the order of the bits. The code cannot use any network except the
sandbox's own empty network, files that are not shown to it, more processes than allowed, processes that
outlive the sandbox, or memory that no limit counts, such as files without a directory, shared segments and
new file systems."""

GUARANTEES = (*ISOLATION, "root", "resident", "listener")
"""The isolation, a separate root, a measurement of all memory, and a socket that listens in the sandbox."""

COLLECT = b"t"
APPLY = b"g"
WRITE = b"w"
READ = b"r"
MAX_SOURCE_BYTES = {b"c": 60_000, b"p": 4 << 20, b"s": 60_000, b"e": 1 << 20} | dict.fromkeys(
    (COLLECT, APPLY, WRITE, READ), 1 << 20
)
"""Kinds of request (cell, program, shell, exec; collect or apply changes; write or read a file) and the size
limit of the source in bytes: a cell is sent without waiting for the reader, and a command is one argument."""


class RunEnding(enum.StrEnum):
    """Say how a run ended."""

    DONE = "done"
    FAILED = "failed"  # an exception, or an exit status that is not 0
    LATE = "late"  # the run was ended after its time
    DIED = "died"  # the interpreter of the cells ended, or broke
    OVER = "over"  # all memory together was over `resident`, and everything was killed
    STARVED = "starved"  # the machine had no memory left, and everything was killed


ENDINGS = tuple(RunEnding)


class SandboxLimits(NamedTuple):
    """Limit the code; sizes are in MiB. `memory` (address space), `open_files` and `file` (the largest file)
    hold for each process; `disk` for the private directory, `processes` for all processes and threads
    together, `resident` for the memory and files of all processes during an `execute`. A `memory` or
    `resident` of 0 is no limit."""

    memory: int = 512
    processes: int = 32
    open_files: int = 64
    file: int = 32
    disk: int = 64
    resident: int = 0
    output: int = 16_384  # bytes of a reply


class RunRequest(NamedTuple):
    """Hold a request. `source`: UTF-8 text of code; for an exec see `exec_source`, for requests that move
    files see changes.py. The streams of an exec and of moves are sent before, as descriptors."""

    kind: bytes
    seconds: float
    source: bytes
    stdin: bytes = b""

    def frame(self) -> bytes:
        return (
            REQUEST_HEADER.pack(self.kind, self.seconds, len(self.source), len(self.stdin))
            + self[2]
            + self[3]
        )


class RunReply(NamedTuple):
    """Hold the reply. `status`: exit status, or minus the signal that ended the process; 0 for a cell that
    ran."""

    ending: RunEnding
    status: int
    lost: bool
    omitted: int
    output: bytes

    def frame(self) -> bytes:
        return REPLY_HEADER.pack(ENDINGS.index(self.ending), *self[1:4], len(self.output)) + self.output


def exec_source(words: Sequence[str], environment: Mapping[str, str], directory: str) -> bytes:
    """Encode a program as the source of a request. ValueError: a text contains a NUL."""
    if any("\0" in text for text in (directory, *words, *environment, *environment.values())):
        raise ValueError(
            "the arguments, environment and directory of a program must not contain NUL characters"
        )
    return json.dumps((list(words), dict(environment), directory)).encode()


def read_request(fd: int) -> RunRequest:
    """Read a request, which blocks. EOFError: the other end was closed."""
    kind, seconds, source_size, stdin_size = REQUEST_HEADER.unpack(read_exactly(fd, REQUEST_HEADER.size))
    return RunRequest(kind, seconds, read_exactly(fd, source_size), read_exactly(fd, stdin_size))


def write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
