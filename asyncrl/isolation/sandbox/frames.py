"""Messages between a sandbox and its owner: frames of one header and raw bytes, bounded on both sides.

Shared by the owner and the child, so it imports nothing that is slow to start.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

DONE, FAILED, LATE, DIED = b"d", b"f", b"l", b"x"

REQUEST = struct.Struct("!cdII")  # kind, seconds, bytes of the source, bytes of the input
REPLY = struct.Struct("!ci?QI")  # ending, status, state lost, bytes left out, bytes of the output
HELLO = struct.Struct("!BI")  # which isolations hold (bits, see ISOLATION), bytes of the notes

ISOLATION = ("network", "files", "processes", "orphans", "memory")
"""A sandbox can keep these from its code, in the order of their bits: any network but its own empty one;
every file but those it was shown; more processes than allowed; processes that outlive it; memory that no
limit counts, such as files without a directory, shared segments and file systems of its own."""

LARGEST = {b"c": 60_000, b"p": 4 << 20, b"s": 60_000}
"""Kinds of a request (cell, program, shell) and the bytes that a source may have: a cell is sent
without waiting for its reader, a command is one argument."""


class SandboxLimits(NamedTuple):
    """Sizes are MiB. `memory`, `open_files` and `file` (the largest) are of one process; `disk` is of the
    private directory, `processes` of all processes and threads together."""

    memory: int = 512
    processes: int = 32
    open_files: int = 64
    file: int = 32
    disk: int = 64
    output: int = 16_384  # bytes of a reply


class RunRequest(NamedTuple):
    """`source` is UTF-8."""

    kind: bytes
    seconds: float
    source: bytes
    stdin: bytes = b""

    def frame(self) -> bytes:
        return REQUEST.pack(self.kind, self.seconds, len(self.source), len(self.stdin)) + self[2] + self[3]


class RunReply(NamedTuple):
    """`status`: exit status, or minus the signal that ended the process; 0 for a cell that ran."""

    ending: bytes
    status: int
    lost: bool
    omitted: int
    output: bytes

    def frame(self) -> bytes:
        return REPLY.pack(*self[:4], len(self.output)) + self.output


def read_request(fd: int) -> RunRequest:
    """Blocks. EOFError when the other end closed."""
    kind, seconds, source, stdin = REQUEST.unpack(read_exactly(fd, REQUEST.size))
    return RunRequest(kind, seconds, read_exactly(fd, source), read_exactly(fd, stdin))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
