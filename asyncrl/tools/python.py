"""Python that keeps its variables for an episode, in a sandbox; `workspace` adds a shell to it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.isolation.sandbox.abilities import demand
from asyncrl.isolation.sandbox.box import Ending, Result, Sandbox
from asyncrl.isolation.sandbox.confine import SandboxLimits
from asyncrl.isolation.sandbox.wire import HOLDS
from asyncrl.tools.base import Tool, ToolError, tools
from asyncrl.tools.replies import MAX_REPLY
from asyncrl.tools.schema import signature_of
from asyncrl.types import Sample

ALL = " ".join(HOLDS)
OUTPUT = MAX_REPLY - 1024  # bytes that are kept of an output; the rest is for the notes on its end
SPARE = 10.0  # seconds that a call may take beside its code: a start, an interrupt, a kill

Seconds = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=1)]


class Workspace:
    """One sandbox for one episode: an interpreter, a shell, and the directory they share."""

    def __init__(self, limits: SandboxLimits, require: frozenset[str], seconds: float) -> None:
        self._box = Sandbox(limits, require=require)
        self._seconds = seconds
        self._setup = ""
        self._row = 0
        self._ready = False  # the interpreter has run the setup, and was not lost since
        self._lost = self._emptied = False  # and the model was not told yet

    async def open(self, sample: Sample, setup: str = "") -> None:
        """`setup`: code that an interpreter runs first, such as the data of this sample."""
        self._setup, self._row = setup, sample.row
        await self._box.open()
        await self._prepare()

    async def python(self, code: str) -> str:
        """Run Python code; shows what it prints, and the value of a last expression. Variables are kept.

        Args:
            code: The code to run.
        """
        return spoken(await self._run(self._box.cell, code), self._seconds)

    async def shell(self, command: str) -> str:
        """Run a shell command; shows what it prints. Files are kept.

        Args:
            command: The command to run.
        """
        result = await self._run(self._box.shell, command)
        status = f"[exit status {result.status}]" if result.ending == Ending.FAILED else ""
        return spoken(result, self._seconds, status)

    async def close(self) -> None:
        await self._box.close()

    async def _run(self, call: Callable[[str, float], Awaitable[Result]], text: str) -> Result:
        await self._prepare()
        self._ready = False  # unless the call comes to its end: it may be cancelled
        result = self._noted(await call(text, self._seconds))
        self._ready = not result.lost
        told = replace(result, lost=self._lost, emptied=self._emptied)
        self._lost = self._emptied = False
        return told

    def _noted(self, result: Result) -> Result:
        """Any call may be the one that is told of a loss before it."""
        self._lost |= result.lost
        self._emptied |= result.emptied
        return result

    async def _prepare(self) -> None:
        """Run the setup where the interpreter has not."""
        if self._ready or not self._setup:
            return
        result = self._noted(await self._box.cell(self._setup, self._seconds))
        if result.ending != Ending.DONE:
            raise ToolError(f"the setup of row {self._row} did not run: {result.output[-500:]}")
        self._ready = True


def _alone(label: str, method: Callable[..., Awaitable[str]]) -> Callable[..., Tool]:
    """The factory of a tool that has a sandbox for itself."""

    def make(
        *,
        seconds: Seconds = 10.0,
        memory_mb: Size = 512,
        disk_mb: Size = 64,
        processes: Size = 32,
        require: str = ALL,
        name: str = label,
    ) -> Tool:
        """Code that runs longer than `seconds` is interrupted, then killed. `memory_mb` is of each process.
        `require`: what the sandbox must isolate (docs/sandbox.md), words in one text; empty: whatever it
        can."""
        limits = (seconds, memory_mb, disk_mb, processes, require)
        return _tool(name, method, _maker(f"tool {name!r}", *limits), seconds)

    tools.register(label)(make)
    return make


python = _alone("python", Workspace.python)
shell = _alone("shell", Workspace.shell)


@tools.register("workspace")
def workspace(
    *,
    seconds: Seconds = 10.0,
    memory_mb: Size = 512,
    disk_mb: Size = 64,
    processes: Size = 32,
    require: str = ALL,
) -> Sequence[Tool]:
    """`python` and `shell` in one sandbox, over the same files. The options are those of `python`."""
    make = _maker("tool 'workspace'", seconds, memory_mb, disk_mb, processes, require)
    return (
        _tool("python", Workspace.python, make, seconds),
        _tool("shell", Workspace.shell, make, seconds),
    )


def spoken(result: Result, seconds: float, status: str = "") -> str:
    """What the model reads: the output, and how it ended where that is not plain from it."""
    notes = {
        Ending.LATE: f"[stopped after {seconds:g} s]",
        Ending.DIED: f"[the interpreter ended{_signal(result.status)}]",
    }
    parts = [result.output.rstrip("\n"), notes.get(result.ending, ""), status]
    if result.lost:
        what = "variables and files" if result.emptied else "variables"
        parts.append(f"[the {what} of earlier calls are lost]")
    return "\n".join(part for part in parts if part) or "[no output]"


def _signal(status: int) -> str:
    return f" by signal {-status}" if status < 0 else ""


def _maker(
    where: str, seconds: float, memory: int, disk: int, processes: int, require: str
) -> Callable[[], Workspace]:
    limits = SandboxLimits(memory=memory, disk=disk, file=disk, processes=processes, output=OUTPUT)
    return functools.partial(Workspace, limits, demand(require, where), seconds)


def _tool(name: str, method: Callable[..., Any], make: Callable[[], Workspace], seconds: float) -> Tool:
    found = signature_of(method, name, method)
    return Tool(
        name,
        found.schema,
        method,
        found.decode,
        make,
        timeout=2 * seconds + SPARE,  # the setup may have to run again
        replay="reapply",
    )
