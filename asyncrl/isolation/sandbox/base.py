"""The sandbox protocol: an isolated place for code, with processes, a directory, and no network.

sandbox = new_sandbox(SandboxLimits(memory=256), require=frozenset())    # jail.py
await sandbox.start()
result = await sandbox.run("cell", "x = 6 * 7\\nx", seconds=5)    # prints 42; x is there for the next cell
program = Program(["node", "app.js"], {"PATH": "/usr/bin"}, "work")
await sandbox.execute(program, streams=(stdin, stdout, stderr), seconds=3600)    # descriptors of pipes
await sandbox.close()
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from asyncrl.errors import AsyncrlError
from asyncrl.isolation.sandbox.frames import ISOLATION as ISOLATION
from asyncrl.isolation.sandbox.frames import SandboxLimits as SandboxLimits

RunKind = Literal["cell", "program", "shell"]
"""`cell`: statements for the interpreter that keeps its variables; a last expression is printed. Over time it
is interrupted, and a second later killed, with the variables. `program`: a whole Python program in an
interpreter of its own and an empty directory: processes, cells and files of before end; of the program its
files survive. `shell`: one command; what it starts in the background goes on in later runs, and only then."""


MOST_CHANGES = 64 << 20  # bytes


class SandboxError(AsyncrlError):
    """The sandbox could not be started, or does not isolate what it must, or a file could not be written or
    read."""


class RunEnding(enum.StrEnum):
    """The end of a run."""

    DONE = "done"
    FAILED = "failed"  # an exception, or an exit status that is not 0
    LATE = "late"  # its time ran out, and it was ended
    DIED = "died"  # the interpreter of the cells ended, or broke
    OVER = "over"  # all memory together was over `resident`, and everything was killed


@dataclass(frozen=True)
class RunResult:
    """`output`: what was printed, standard error included, its middle left out where it is long (`omitted`
    bytes). `status`: the exit status, or minus the signal that ended the process; 0 for a cell. `lost`: the
    variables of earlier cells are gone; `emptied`: so are the files, as the sandbox was started again."""

    ending: RunEnding
    output: str
    status: int = 0
    lost: bool = False
    emptied: bool = False
    omitted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Program:
    """Describes a program to execute. `environment`: all of its variables. `directory`: relative to the
    sandbox's own; made if it is missing."""

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str = "."


class Sandbox(Protocol):
    """Calls on one sandbox run one after the other. Nothing runs in it between two calls."""

    async def start(self) -> None:
        """SandboxError when it does not start, or does not isolate what it must. `run` starts it, too."""

    async def run(self, kind: RunKind, source: str, seconds: float, stdin: str = "") -> RunResult:
        """Whatever the code does is a result. A run that is cancelled ends the sandbox; the next one starts
        it again, and reports what is lost. ValueError for a source that is too long."""

    async def execute(
        self, program: Program, streams: tuple[int, int, int], seconds: float = math.inf
    ) -> RunResult:
        """Run a program that lives as long as it likes. Its standard streams are `streams`, descriptors (of
        pipes, say) that are closed here as soon as it has them: their readers see its output live, and the
        end when all of its processes have closed it; `output` of the result is empty. It finds no processes
        of earlier calls and leaves none, but finds and leaves files. Exit status 127 and a line on its
        standard error: it cannot be run. ValueError for a NUL in a text, or more than 1 MiB of them."""

    async def write_file(self, path: str, data: bytes) -> None:
        """`path`: absolute, or in the directory of the code. SandboxError when it cannot be written."""

    async def read_file(self, path: str) -> bytes:
        """SandboxError when it cannot be read, or is larger than an output may be."""

    async def changes(
        self, roots: Sequence[str] = (), skip: Sequence[str] = (), most: int = MOST_CHANGES
    ) -> bytes:
        """Collect what was changed, made and deleted, or only what is below `roots`: an archive as changes.py
        reads it. Names that match a glob of `skip` are left out. SandboxError for more than `most` bytes, a
        root that is a link, and where the sandbox has ended. No process of it runs meanwhile."""

    async def apply(self, archive: bytes, keep: Sequence[str] = ()) -> None:
        """Apply what `changes` returned for another sandbox of the same image. Names that match a glob of
        `keep` stay as they are here. SandboxError when it cannot be applied."""

    async def close(self) -> None:
        """End every process of it. Never raises but for cancellation, and may be called twice."""
