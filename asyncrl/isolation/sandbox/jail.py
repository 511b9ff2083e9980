"""The owner's side of the sandbox that needs only Python and Linux: it starts, asks and ends it.

    owner ──socket──► guard ──fork──► warden.py ──fork──► interpreter.py, programs, shells

Replies are untrusted: they are read as bounded bytes and never unpickled or evaluated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from asyncrl.errors import one_line
from asyncrl.isolation.calls import in_thread
from asyncrl.isolation.images import Image
from asyncrl.isolation.sandbox import changes, emptying, frames
from asyncrl.isolation.sandbox.base import (
    ISOLATION,
    MOST_CHANGES,
    Program,
    RunEnding,
    RunKind,
    RunResult,
    SandboxError,
    SandboxLimits,
)
from asyncrl.isolation.sandbox.confine import HOME
from asyncrl.isolation.sandbox.guard import START
from asyncrl.isolation.sandbox.imaging import ETC

START_SECONDS = 20.0
LATE_SECONDS = 5.0
"""The warden may answer so much later than asked: one second of grace, and a busy machine."""
MOVE_SECONDS = 60.0  # to move files, or what changed
END_SECONDS = 2.0  # after SIGTERM, and after SIGKILL
CLEAN_SECONDS = 5.0  # that the owner waits for a directory to be emptied
MAX_OUTPUT = 16 << 20
OWN_FILES = (*("/proc", "/dev", "/sys"), *(f"/etc/{name}" for name in ETC))  # of every sandbox with an image
MISSING = {
    "resident": "no process namespace and /proc, to measure `resident` in",
    "listener": "no network namespace to listen in",
}
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
ENVIRONMENT = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each would take 128 MiB of the address space that is counted as memory
}
"""All environment variables of the code: keys and tokens of the trainer's environment are left out."""


class Jail:
    """An isolated place for code, with processes, a directory, and no network, made of namespaces, Landlock,
    seccomp and resource limits (confine.py). Calls run one after the other; nothing runs between two of them.

    `require`: isolation that must be in force (words of ISOLATION), else `start` raises SandboxError. `show`:
    paths that the code may read, beside this Python and the system's programs. `listen`: after `start`,
    `listener` is a socket that listens on 127.0.0.1 of the sandbox's own network, and nowhere else; it is the
    caller's, who closes it, and such a sandbox is not started again by itself. `home` is the code's
    directory, after `start`; `losses`: how often variables of cells were lost.

    `image`: its files are the sandbox's root, and this Python and the system's programs are not there; what
    the code writes is gone with the sandbox. `user`: the code's name inside: an unprivileged user, or "root",
    who may do with all files of the image what root may. `directory`: where programs start; that of the image
    if it is not given, or `home`.
    """

    def __init__(
        self,
        limits: SandboxLimits = SandboxLimits(),
        *,
        require: Iterable[str] = ISOLATION,
        show: Iterable[str] = (),
        listen: bool = False,
        image: Image | None = None,
        user: Literal["", "root"] = "",
        directory: str = "",
    ) -> None:
        self.limits = limits
        self.holds: frozenset[str] = frozenset()
        self.notes = self.home = ""
        self.listener: socket.socket | None = None
        self._require = frozenset(require)
        self._listen = listen
        self._show = tuple(show)
        self._image = image
        self._user = user
        self._directory = directory or (image.directory if image else "")
        self._turn = asyncio.Lock()
        self._closed = False
        self.losses = self._reported = 0
        self._emptied = False  # since the last report
        self._fallback = ""  # where there is no new root: its directory
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._passage: socket.socket  # brings descriptors

    @property
    def pid(self) -> int | None:
        """Return the pid of the process above all of its processes; None when it is not open."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Jail:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start within START_SECONDS; `run` starts it, too. SandboxError when it does not start, or does not
        isolate what it must."""
        self._closed = False
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._connect()
                await self._handshake()
        except (OSError, EOFError) as error:
            await self._end()
            raise SandboxError(f"the sandbox did not start: {one_line(error)}") from error
        except BaseException:
            await self._end()
            raise

    async def run(self, kind: RunKind, source: str, seconds: float, stdin: str = "") -> RunResult:
        """Run code; whatever it does is a result. A run that is cancelled ends the sandbox; the next one
        starts it again, and reports what is lost. ValueError for a source that is too long."""
        given = (text.encode(errors="replace") for text in (source, stdin))
        return await self._report(frames.RunRequest(kind[0].encode(), seconds, *given))

    async def prepare(self, source: str, seconds: float) -> RunResult:
        """Run a cell. What was lost is reported by the next run, as if this one had not been."""
        return await self._ask(frames.RunRequest(b"c", seconds, source.encode(errors="replace")))

    async def execute(
        self, program: Program, streams: tuple[int, int, int], seconds: float = math.inf
    ) -> RunResult:
        """Run a program that lives as long as it likes. Its standard streams are `streams`, descriptors (of
        pipes, say) that are closed here as soon as it has them: their readers see its output live, and the
        end when all of its processes have closed it; `output` of the result is empty. It finds no processes
        of earlier calls and leaves none, but finds and leaves files. Exit status 127 and a line on its
        standard error: it cannot be run. ValueError for a NUL in a text, or more than 1 MiB of them."""
        ours = list(streams)
        try:
            for fd in ours:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                    os.fchmod(fd, 0o666)  # another user opens /dev/stdin by that name
            source = frames.exec_source(program.words, program.environment, program.directory)
            return await self._report(frames.RunRequest(b"e", seconds, source), ours)
        finally:
            _close(ours)

    def stop(self) -> None:
        """End the program of the `execute` that runs, if there is one; its status is that of a kill."""
        with contextlib.suppress(OSError):
            if self._process and self._turn.locked():
                self._passage.send(b"s")

    async def write_file(self, path: str, data: bytes) -> None:
        """Write with the rights of the code. `path`: absolute, or in the directory of the code. SandboxError
        when it cannot be written."""
        await self._send(f"file {path!r}", frames.WRITE, os.fsencode(path), data)

    async def read_file(self, path: str) -> bytes:
        """Read with the rights of the code. SandboxError when it cannot be read, or is larger than an output
        may be."""
        most = self.limits.output
        return await self._receive(f"file {path!r}", frames.READ, json.dumps((most, path)).encode(), most)

    async def changes(
        self, roots: Sequence[str] = (), skip: Sequence[str] = (), most: int = MOST_CHANGES
    ) -> bytes:
        """Collect what was changed, made and deleted, or only what is below `roots`: an archive as changes.py
        reads it. Names that match a glob of `skip` are left out. SandboxError for more than `most` bytes, a
        root that is a link, and where the sandbox has ended."""
        top = self.home or "/"
        ours_too = tuple[str, ...]()
        if self._image:
            top = "/"
            ours_too = (*OWN_FILES, *self._show)
        source = changes.request(most, top, roots, (*skip, *ours_too))
        return await self._receive("the changes", frames.TAKE, source, most)

    async def apply(self, archive: bytes, keep: Sequence[str] = ()) -> None:
        """Apply what `changes` returned for another sandbox of the same image. Names that match a glob of
        `keep` stay as they are here. SandboxError when it cannot be applied."""
        source = changes.request(len(archive), "/", (), keep)
        await self._send("the changes", frames.GIVE, source, archive)

    async def close(self) -> None:
        """End every process of it. Never raises but for cancellation, and may be called twice."""
        self._closed = True
        await self._end()

    async def _report(self, request: frames.RunRequest, streams: list[int] | None = None) -> RunResult:
        started = time.monotonic()
        result = await self._ask(request, streams)
        lost = self.losses > self._reported
        emptied = self._emptied
        self._reported = self.losses
        self._emptied = False
        return replace(result, lost=lost, emptied=emptied, seconds=time.monotonic() - started)

    async def _receive(self, what: str, kind: bytes, source: bytes, most: int) -> bytes:
        (ours, theirs), data = os.pipe(), bytearray()
        await self._move(what, kind, source, theirs, partial(changes.receive, ours, data, most))
        return bytes(data)

    async def _send(self, what: str, kind: bytes, source: bytes, data: bytes) -> None:
        theirs, ours = os.pipe()
        await self._move(what, kind, source, theirs, partial(changes.send, ours, data))

    async def _move(
        self, what: str, kind: bytes, source: bytes, theirs: int, work: Callable[[], None]
    ) -> None:
        """Move files over a pipe. `work` in a thread serves our end, and closes it."""
        streams = [theirs]
        serving = asyncio.ensure_future(in_thread(work, "sandbox"))
        try:
            result = await self._ask(frames.RunRequest(kind, MOVE_SECONDS, source), streams)
        finally:
            _close(streams)
        await serving
        if result.ending is not RunEnding.DONE:
            why = result.output.strip() or result.ending
            raise SandboxError(f"{what} of the sandbox: {why}")

    async def _ask(self, request: frames.RunRequest, streams: list[int] | None = None) -> RunResult:
        if len(request.source) > (most := frames.LARGEST[request.kind]):
            raise ValueError(f"the code has {len(request.source)} bytes; at most {most} can be run")
        async with self._turn:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._process is None:
                if self._listen:
                    raise SandboxError("the sandbox ended, and with it the listener that is served")
                if request.kind == frames.TAKE:
                    raise SandboxError("the sandbox ended, and with it the files that changed")
                await self.start()
            try:
                async with asyncio.timeout(request.seconds + LATE_SECONDS):
                    result = await self._exchange(request, streams)
            except BaseException as error:
                self.losses = self.losses + 1
                self._emptied = True
                await self._end()
                if isinstance(error, OSError | EOFError | SandboxError):
                    return RunResult(RunEnding.DIED, "")
                raise  # cancelled: the reply would answer the next question
            self.losses += result.lost
            return result

    async def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        if self._writer is not None:
            self._writer.close()  # the warden reads the end, and goes
        self._passage.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await in_thread(process.wait, "sandbox")
                    break
        if os.path.lexists(self._fallback):  # noqa: ASYNC240 (the guard was killed, who removes it)
            with contextlib.suppress(TimeoutError):  # the thread goes on by itself
                async with asyncio.timeout(CLEAN_SECONDS):
                    await in_thread(partial(emptying.remove, self._fallback), "sandbox")

    async def _connect(self) -> None:
        ours, theirs = socket.socketpair()
        self._passage, their_passage = socket.socketpair()
        self._fallback = f"{tempfile.gettempdir()}/asyncrl-sandbox-{secrets.token_hex(8)}"
        with theirs, their_passage:
            try:
                self._process = self._spawn(theirs.fileno(), their_passage.fileno())
            except OSError:
                ours.close()
                self._passage.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)

    def _spawn(self, link: int, passage: int) -> subprocess.Popen[bytes]:
        """Start a Python that knows nothing of our environment. The arguments: see guard.main."""
        image = self._image
        system = () if image else (*SYSTEM, *SETTINGS, sys.base_prefix, sys.prefix)
        arguments = (
            tuple(self.limits),
            sysconfig.get_path("purelib"),
            _existing((*system, *self._show)),
            image.layers if image else (),
            image.environment if image else {},
            *(self._fallback, self._listen, self._user, self._directory),
        )
        root = str(Path(__file__).resolve().parents[3])
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START.format(root=root, arguments=arguments)],
            stdin=link,
            stdout=passage,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    async def _handshake(self) -> None:
        bits, size = frames.HELLO.unpack(await self._reader.readexactly(frames.HELLO.size))
        if size > MAX_OUTPUT:
            raise SandboxError("the sandbox broke the protocol")
        self.notes = (await self._reader.readexactly(size)).decode("utf-8", "replace")
        given = frozenset(name for bit, name in enumerate(frames.GIVEN) if bits >> bit & 1)
        self.holds = given & frozenset(ISOLATION)
        self.home = HOME if "root" in given else self._fallback
        wanted = {"resident": self.limits.resident, "listener": self._listen}
        if self._image and "root" not in given:
            raise SandboxError(f"no sandbox can have an image here: {self.notes} (docs/sandbox.md)")
        if missing := sorted((self._require | {name for name in wanted if wanted[name]}) - given):
            lacks = ", ".join(MISSING.get(name, f"no isolation of {name}") for name in missing)
            raise SandboxError(
                f"this machine gives the sandbox {lacks} ({self.notes}); allow namespaces "
                f"(docs/sandbox.md), or require less"
            )
        if self._listen:
            _, (found,), *_ = socket.recv_fds(self._passage, 1, 1, socket.MSG_CMSG_CLOEXEC)
            self.listener = socket.socket(fileno=found)

    async def _exchange(self, request: frames.RunRequest, streams: list[int] | None) -> RunResult:
        assert self._writer is not None
        if streams:
            socket.send_fds(self._passage, [request.kind], streams)
            _close(streams)
        self._writer.write(request.frame())
        await self._writer.drain()
        header = await self._reader.readexactly(frames.REPLY.size)
        ending, status, lost, omitted, size = frames.REPLY.unpack(header)
        if ending >= len(frames.ENDINGS) or size > MAX_OUTPUT:
            raise SandboxError("the sandbox broke the protocol")
        output = (await self._reader.readexactly(size)).decode("utf-8", "replace")
        return RunResult(frames.ENDINGS[ending], output, status, lost, omitted=omitted)


def _close(descriptors: list[int]) -> None:
    for fd in set(descriptors):  # two of them may be one
        os.close(fd)
    descriptors.clear()


def _existing(paths: Iterable[str]) -> list[str]:
    """Keep what exists, links resolved beside their names; a directory before what is in it."""
    there = [path for path in paths if os.path.exists(path)]
    names = dict.fromkeys((*map(os.path.abspath, there), *map(os.path.realpath, there)))
    return sorted(names, key=len)
