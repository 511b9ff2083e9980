"""Messages between a sandbox and its owner: frames of one header and raw bytes, bounded on both sides.

Shared by the owner and the child, so it imports nothing that is slow to start.
"""

from __future__ import annotations

import enum
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

REQUEST = struct.Struct("!cdII")  # kind, seconds, bytes of the source, bytes of the input
REPLY = struct.Struct("!Bi?QI")  # which ending, status, state lost, bytes left out, bytes of the output
HELLO = struct.Struct("!BI")  # what there is (bits, see GIVEN), bytes of the notes

ISOLATION = ("network", "files", "processes", "orphans", "memory")
"""A sandbox can keep these from its code, in the order of their bits: any network but its own empty one;
every file but those it was shown; more processes than allowed; processes that outlive it; memory that no
limit counts, such as files without a directory, shared segments and file systems of its own."""

GIVEN = (*ISOLATION, "root", "resident", "listener")
"""Beside these isolations: a root of its own, a measure of all memory, a socket that listens inside."""

TAKE = b"t"
GIVE = b"g"
WRITE = b"w"
READ = b"r"
LARGEST = {b"c": 60_000, b"p": 4 << 20, b"s": 60_000, b"e": 1 << 20} | dict.fromkeys(
    (TAKE, GIVE, WRITE, READ), 1 << 20
)
"""Kinds of a request (cell, program, shell, exec; take or give changes; write or read a file) and the bytes
that a source may have: a cell is sent without waiting for its reader, a command is one argument."""


class RunEnding(enum.StrEnum):
    """The end of a run."""

    DONE = "done"
    FAILED = "failed"  # an exception, or an exit status that is not 0
    LATE = "late"  # its time ran out, and it was ended
    DIED = "died"  # the interpreter of the cells ended, or broke
    OVER = "over"  # all memory together was over `resident`, and everything was killed
    STARVED = "starved"  # the machine had no memory left, and everything was killed


ENDINGS = tuple(RunEnding)


class SandboxLimits(NamedTuple):
    """Sizes are MiB. `memory` (address space), `open_files` and `file` (the largest) are of one process;
    `disk` is of the private directory, `processes` of all processes and threads together, `resident` of the
    memory and files of all of them while an `execute` runs. A `memory` or `resident` of 0 is no limit."""

    memory: int = 512
    processes: int = 32
    open_files: int = 64
    file: int = 32
    disk: int = 64
    resident: int = 0
    output: int = 16_384  # bytes of a reply


class RunRequest(NamedTuple):
    """`source` is UTF-8. Of an exec: see `exec_source`, of what files are moved by, changes.py; their streams
    have been sent before, as descriptors."""

    kind: bytes
    seconds: float
    source: bytes
    stdin: bytes = b""

    def frame(self) -> bytes:
        return REQUEST.pack(self.kind, self.seconds, len(self.source), len(self.stdin)) + self[2] + self[3]


class RunReply(NamedTuple):
    """`status`: exit status, or minus the signal that ended the process; 0 for a cell that ran."""

    ending: RunEnding
    status: int
    lost: bool
    omitted: int
    output: bytes

    def frame(self) -> bytes:
        return REPLY.pack(ENDINGS.index(self.ending), *self[1:4], len(self.output)) + self.output


def exec_source(words: Sequence[str], environment: Mapping[str, str], directory: str) -> bytes:
    """ValueError for a text with a NUL."""
    if any("\0" in text for text in (directory, *words, *environment, *environment.values())):
        raise ValueError("the words, the environment or the directory of a program hold a NUL")
    return json.dumps((list(words), dict(environment), directory)).encode()


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
