"""A sandbox, from its owner's side: start it, ask it, end it. Nothing it says is taken for more than bytes.

async with Sandbox(Limits(memory=256)) as box:
    result = await box.cell("x = 6 * 7\\nx", seconds=5)      # prints 42; x is there for the next cell
    result = await box.program(source, seconds=5, stdin="1 2")  # a fresh interpreter
    result = await box.shell("ls -la", seconds=5)
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.errors import AsyncrlError, one_line
from asyncrl.isolation.sandbox import files, wire
from asyncrl.isolation.sandbox.confine import SandboxLimits
from asyncrl.isolation.sandbox.jail import START

START_SECONDS = 20.0
LATE_SECONDS = 5.0
"""How much later than asked the warden may answer: one second of grace, and a busy machine."""
CLEAN_SECONDS = 5.0
MAX_OUTPUT = 16 << 20
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
ROOT = Path(__file__).resolve().parents[3]


class SandboxError(AsyncrlError):
    """It could not be started, or does not isolate what it must."""


class Ending(enum.StrEnum):
    """How a run ended."""

    DONE = "done"
    FAILED = "failed"  # an exception, or an exit status that is not 0
    LATE = "late"  # its time ran out, and it was ended
    DIED = "died"  # the interpreter of the cells ended, or broke


@dataclass(frozen=True)
class Result:
    """`output`: what was printed, standard error included, its middle left out where it is long (`omitted`
    bytes). `status`: the exit status, or minus the signal that ended the process; 0 for a cell. `lost`: the
    variables of earlier cells are gone; `emptied`: so are the files, as the sandbox was started again."""

    ending: Ending
    output: str
    status: int = 0
    lost: bool = False
    emptied: bool = False
    omitted: int = 0
    seconds: float = 0.0


ENDINGS = {wire.DONE: Ending.DONE, wire.FAILED: Ending.FAILED, wire.LATE: Ending.LATE, wire.DIED: Ending.DIED}


class Sandbox:
    """One private machine for code: processes, a directory, no network.

    `require`: what must hold (`wire.HOLDS`); SandboxError from `open` where it does not. `show`: paths beside
    this Python and the system's programs that may be read. Calls on one sandbox run one after the other.
    """

    def __init__(
        self,
        limits: SandboxLimits = SandboxLimits(),
        *,
        require: Iterable[str] = wire.HOLDS,
        show: Iterable[str] = (),
    ) -> None:
        self.limits = limits
        self.holds: frozenset[str] = frozenset()
        self.notes = ""
        self._require = frozenset(require)
        self._show = tuple(show)
        self._turn = asyncio.Lock()
        self._closed = False
        self._cut_off = False  # a call was, and with it all state ended; nobody was told yet
        self._fallback = ""  # where there is no new root: its directory
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Of the process above all of its processes; None when it is not open."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Sandbox:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Start it within START_SECONDS. SandboxError if it does not start, or what must hold does not."""
        self._closed = False
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._connect()
                await self._greet()
        except (OSError, EOFError) as error:
            await self._end()
            raise SandboxError(f"the sandbox did not start: {one_line(error)}") from error
        except BaseException:
            await self._end()
            raise

    async def cell(self, code: str, seconds: float) -> Result:
        """Run statements in the interpreter that keeps its variables; a last expression is printed.

        Over time it is interrupted, and a second later killed, with the variables (`lost`)."""
        return await self._ask(wire.Request(wire.CELL, seconds, _encoded(code, wire.MAX_CELL)))

    async def program(self, code: str, seconds: float, stdin: str = "") -> Result:
        """Run a whole Python program in an interpreter of its own and an empty directory: processes, cells
        and files of before end. Of the program its files survive."""
        source = _encoded(code, wire.MAX_SOURCE)
        return await self._ask(wire.Request(wire.PROGRAM, seconds, source, stdin.encode(errors="replace")))

    async def shell(self, command: str, seconds: float, stdin: str = "") -> Result:
        """Run one shell command. What it starts in the background goes on in later calls, and only then."""
        source = _encoded(command, wire.MAX_CELL)
        return await self._ask(wire.Request(wire.SHELL, seconds, source, stdin.encode(errors="replace")))

    async def close(self) -> None:
        """End every process of it. Never raises but for cancellation, and may be called twice."""
        self._closed = True
        await self._end()

    async def _ask(self, request: wire.Request) -> Result:
        started = time.monotonic()
        async with self._turn:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._process is None:
                await self.open()
            try:
                async with asyncio.timeout(request.seconds + LATE_SECONDS):
                    result = await self._exchange(request)
            except (OSError, EOFError, SandboxError):
                await self._end()
                result = Result(Ending.DIED, "", lost=True, emptied=True)
            except BaseException:  # cancelled: the reply would answer the next question
                self._cut_off = True
                await self._end()
                raise
            if self._cut_off:
                self._cut_off = False
                result = replace(result, lost=True, emptied=True)
        return replace(result, seconds=time.monotonic() - started)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._writer is not None:
            self._writer.close()  # the warden reads the end, and goes
        _signal(process, signal.SIGTERM)
        if not await _ended(process, 2.0):
            _signal(process, signal.SIGKILL)
            await _ended(process, 2.0)
        await _removed(self._fallback)

    async def _connect(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._start(theirs.fileno())
            except OSError:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)

    def _start(self, link: int) -> subprocess.Popen[bytes]:
        self._fallback = f"{tempfile.gettempdir()}/asyncrl-sandbox-{secrets.token_hex(8)}"
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(ROOT), *self._arguments()],
            stdin=link,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    async def _greet(self) -> None:
        bits, size = wire.HELLO.unpack(await self._reader.readexactly(wire.HELLO.size))
        if size > MAX_OUTPUT:
            raise SandboxError("the sandbox speaks another protocol")
        self.notes = (await self._reader.readexactly(size)).decode("utf-8", "replace")
        self.holds = frozenset(name for bit, name in enumerate(wire.HOLDS) if bits >> bit & 1)
        if missing := sorted(self._require - self.holds):
            raise SandboxError(
                f"this machine gives the sandbox no isolation of {', '.join(missing)} ({self.notes}); allow "
                f"namespaces (docs/sandbox.md), or require less"
            )

    async def _exchange(self, request: wire.Request) -> Result:
        assert self._writer is not None
        self._writer.write(request.frame())
        await self._writer.drain()
        header = await self._reader.readexactly(wire.REPLY.size)
        ending, status, lost, omitted, size = wire.REPLY.unpack(header)
        if ending not in ENDINGS or size > MAX_OUTPUT:
            raise SandboxError("the sandbox broke the protocol")
        output = (await self._reader.readexactly(size)).decode("utf-8", "replace")
        return Result(ENDINGS[ending], output, status, lost, omitted=omitted)

    def _arguments(self) -> list[str]:
        pairs = [(name, str(value)) for name, value in self.limits._asdict().items()]
        pairs += [("show", path) for path in _shown(self._show)]
        pairs += [("path", sysconfig.get_path("purelib"))]
        pairs += [("fallback", self._fallback)]
        return [f"{name}={value}" for name, value in pairs]


ENVIRONMENT = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each would take 128 MiB of the address space that is counted as memory
}
"""All that the code sees of it: keys and tokens of the trainer's environment stay outside."""


def _shown(more: Iterable[str]) -> list[str]:
    """What exists of the system, this Python, and what was asked for, links resolved beside their names."""
    found: dict[str, None] = {}
    for path in (*SYSTEM, *SETTINGS, sys.base_prefix, sys.prefix, *more):
        if os.path.exists(path):
            found |= dict.fromkeys((os.path.abspath(path), os.path.realpath(path)))
    return list(found)


def _encoded(text: str, most: int) -> bytes:
    data = text.encode(errors="replace")
    if len(data) > most:
        raise ValueError(f"the code has {len(data)} bytes; at most {most} can be run")
    return data


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


async def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process without a thread. Whether it ended in time."""
    if process.poll() is not None:
        return True
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    fd = os.pidfd_open(process.pid)
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(seconds):
            await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.poll() is not None


async def _removed(directory: str) -> None:
    """If the guard, who does it, was killed. A thread, as there may be any number of files."""
    if os.path.lexists(directory):  # noqa: ASYNC240 (one look, and it almost never is)
        with contextlib.suppress(Exception):  # what is left harms nobody; each start has another directory
            await asyncio.to_thread(files.remove, directory, CLEAN_SECONDS)
