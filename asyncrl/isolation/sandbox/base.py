"""The words of a sandbox (jail.py): what it runs, and how that ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import AsyncrlError
from asyncrl.isolation.sandbox.frames import ISOLATION as ISOLATION
from asyncrl.isolation.sandbox.frames import RunEnding as RunEnding
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
