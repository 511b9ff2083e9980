"""The types of a sandbox (jail.py): kinds of runs, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import AsyncrlError
from asyncrl.isolation.sandbox.frames import ISOLATION as ISOLATION
from asyncrl.isolation.sandbox.frames import RunEnding as RunEnding
from asyncrl.isolation.sandbox.frames import SandboxLimits as SandboxLimits

RunKind = Literal["cell", "program", "shell"]
"""`cell`: statements for the interpreter that keeps variables; the value of a final expression is printed. A
cell that exceeds its time is interrupted, and a second later killed together with the variables. `program`:
an entire Python program in a new interpreter and an empty directory: earlier processes, cells and files are
removed first; only the program's files survive. `shell`: one command; its background processes continue only
during later runs."""


MAX_CHANGE_BYTES = 64 << 20  # bytes


class SandboxError(AsyncrlError):
    """The sandbox could not be started, or lacks a required isolation, or a file could not be written or
    read."""


@dataclass(frozen=True)
class RunResult:
    """Hold the result of a run. `output`: standard output and error; the middle of a long output is left out
    (`omitted` bytes). `status`: the exit status, or minus the signal that ended the process; 0 for a cell.
    `lost`: the variables of earlier cells are gone; `emptied`: so are the files, as the sandbox was started
    again."""

    ending: RunEnding
    output: str
    status: int = 0
    lost: bool = False
    emptied: bool = False
    omitted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Program:
    """Describe a program to execute. `environment`: all environment variables of the program. `directory`:
    where to start, relative to the sandbox's directory; made if missing."""

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str = "."
