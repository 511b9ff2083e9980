"""The owner's side of a sandbox that needs only Python and Linux: starts, asks and ends the sandbox.

    owner ──socket──► guard ──fork──► warden.py ──fork──► interpreter.py, programs, shells

Replies are untrusted: they are read as bounded bytes, and never unpickled or evaluated.
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
from collections.abc import Iterable, Sequence
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
    MAX_CHANGE_BYTES,
    Program,
    RunEnding,
    RunKind,
    RunResult,
    SandboxError,
    SandboxLimits,
)
from asyncrl.isolation.sandbox.confine import SANDBOX_HOME
from asyncrl.isolation.sandbox.guard import GUARD_PROGRAM
from asyncrl.isolation.sandbox.imaging import ETC_FILES

START_SECONDS = 20.0
LATE_SECONDS = 5.0
"""Maximum delay between a run's time limit and the warden's answer: 1 s of grace, and a margin for a busy
machine."""
MOVE_SECONDS = 60.0  # to move a file or the changes
END_SECONDS = 2.0  # to end after SIGTERM, and again after SIGKILL
CLEAN_SECONDS = 5.0  # the owner waits so long for a directory to be emptied
MAX_OUTPUT_BYTES = 16 << 20
# Paths of every sandbox with an image that never count as changed
SANDBOX_FILES = (
    *("/proc", "/dev", "/sys"),
    *(f"/etc/{name}" for name in ETC_FILES),
)
MISSING_TEXTS = {
    "resident": "no process namespace with /proc in which to measure `resident`",
    "listener": "no network namespace in which to listen",
}
SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
CODE_ENVIRONMENT = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each arena takes 128 MiB of address space, which counts as memory
}
"""All environment variables that the code sees. Keys and tokens from the trainer's environment are left
out."""


class Jail:
    """Isolate code, with processes, a directory, and no network, by namespaces, Landlock, seccomp and
    resource limits (confine.py). Calls run one after the other; nothing runs between two calls.

    `require`: isolation that must be in force (words of ISOLATION), or `start` raises SandboxError. `show`:
    paths that the code may read, beside this Python and the system's programs. `listen`: after `start`,
    `listener` is a socket that listens on 127.0.0.1 of the sandbox's network, and nowhere else; the caller
    owns and closes the socket, and such a sandbox is not started again automatically. `home` is the code's
    directory, after `start`; `losses`: how often variables of cells were lost.

    `image`: the image's files are the sandbox's root, without this Python and the system's programs; files
    that the code writes are gone with the sandbox. `user`: the code's user inside: an unprivileged user, or
    "root", with root's rights over all files of the image. `directory`: where programs start; default: the
    image's directory, or `home`.
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
        self.enforced: frozenset[str] = frozenset()
        self.notes = self.home = ""
        self.listener: socket.socket | None = None

        self._require = frozenset(require)
        self._needs_listener = listen
        self._shown_paths = tuple(show)
        self._image = image
        self._user = user
        self._start_directory = directory or (image.directory if image else "")

        self._run_lock = asyncio.Lock()
        self._closed = False
        self.losses = self._reported_losses = 0
        self._emptied = False  # since the last report
        self._fallback_home = ""  # the directory of a sandbox without a new root

        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._passage: socket.socket  # brings descriptors

    @property
    def pid(self) -> int | None:
        """Return the pid of the guard, the ancestor of all processes inside; None: the sandbox is not
        open."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Jail:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the sandbox within START_SECONDS; `run` also starts it. SandboxError: the sandbox does not
        start, or lacks a required isolation."""
        self._closed = False
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._connect_guard()
                await self._read_hello()
        except (OSError, EOFError) as error:
            await self._end_process()
            raise SandboxError(f"the sandbox did not start: {one_line(error)}") from error
        except BaseException:
            await self._end_process()
            raise

    async def run(self, kind: RunKind, source: str, seconds: float, stdin: str = "") -> RunResult:
        """Run code; whatever the code does is a result. Cancelling a run ends the sandbox; the next run
        starts the sandbox again, and reports the losses. ValueError: the source is too long."""
        encoded_texts = (text.encode(errors="replace") for text in (source, stdin))
        return await self._ask_and_report(frames.RunRequest(kind[0].encode(), seconds, *encoded_texts))

    async def prepare(self, source: str, seconds: float) -> RunResult:
        """Run a cell without reporting losses: the next run reports them."""
        return await self._ask_warden(frames.RunRequest(b"c", seconds, source.encode(errors="replace")))

    async def execute(
        self, program: Program, streams: tuple[int, int, int], seconds: float = math.inf
    ) -> RunResult:
        """Run a program without a time limit by default. `streams`: descriptors (of pipes, say) for the
        standard streams, which are closed here once passed on: readers see the output live, and its end when
        all processes of the program have closed the stream; `output` of the result is empty. The program
        finds and leaves files, but no processes. Exit status 127 and a line on standard error: the program
        cannot be run. ValueError: a text has a NUL, or the texts have more than 1 MiB."""
        passed_streams = list(streams)
        try:
            for fd in passed_streams:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                    os.fchmod(fd, 0o666)  # another user opens /dev/stdin by that name
            source = frames.exec_source(program.words, program.environment, program.directory)
            return await self._ask_and_report(frames.RunRequest(b"e", seconds, source), passed_streams)
        finally:
            _close_all(passed_streams)

    def stop(self) -> None:
        """End the program of a running `execute`, if there is one; the status is that of a kill."""
        with contextlib.suppress(OSError):
            if self._process and self._run_lock.locked():
                self._passage.send(b"s")

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file with the rights of the code. `path`: absolute, or relative to the code's directory.
        SandboxError: the file cannot be written."""
        await self._move_files(f"file {path!r}", frames.WRITE, os.fsencode(path), sent_data=data)

    async def read_file(self, path: str) -> bytes:
        """Read a file with the rights of the code. SandboxError: the file cannot be read, or is larger than
        the limit of an output."""
        max_bytes = self.limits.output
        source = json.dumps((max_bytes, path)).encode()
        return await self._move_files(f"file {path!r}", frames.READ, source, max_bytes=max_bytes)

    async def collect_changes(
        self, roots: Sequence[str] = (), skip_globs: Sequence[str] = (), max_bytes: int = MAX_CHANGE_BYTES
    ) -> bytes:
        """Collect changed, new and deleted files, all or only below `roots`: an archive in the format of
        changes.py. Names that match a glob of `skip_globs` are left out. SandboxError: more than `max_bytes`
        changed, a root is a link, or the sandbox has ended. ValueError: a root lies outside."""
        top_directory = self.home or "/"
        sandbox_files = tuple[str, ...]()
        if self._image:
            top_directory = "/"
            sandbox_files = (*SANDBOX_FILES, *self._shown_paths)

        source = changes.encode_request(max_bytes, top_directory, roots, (*skip_globs, *sandbox_files))
        return await self._move_files("the changes", frames.COLLECT, source, max_bytes=max_bytes)

    async def apply_changes(self, archive: bytes, keep_globs: Sequence[str] = ()) -> None:
        """Apply the changes of another sandbox with the same image. Names that match a glob of `keep_globs`
        stay as they are here. SandboxError: the archive cannot be applied."""
        source = changes.encode_request(len(archive), "/", (), keep_globs)
        await self._move_files("the changes", frames.APPLY, source, sent_data=archive)

    async def close(self) -> None:
        """End every process of the sandbox. Raises only when cancelled, and may be called twice."""
        self._closed = True
        await self._end_process()

    async def _ask_and_report(
        self, request: frames.RunRequest, streams: list[int] | None = None
    ) -> RunResult:
        started_at = time.monotonic()
        result = await self._ask_warden(request, streams)
        seconds = time.monotonic() - started_at
        lost = self.losses > self._reported_losses
        result = replace(result, lost=lost, emptied=self._emptied, seconds=seconds)

        self._reported_losses = self.losses
        self._emptied = False
        return result

    async def _move_files(
        self, subject: str, kind: bytes, source: bytes, *, sent_data: bytes | None = None, max_bytes: int = 0
    ) -> bytes:
        """Move files over a pipe, whose other end the sandbox gets: send `sent_data`; or, if that is None,
        receive and return at most `max_bytes` and an END. `subject`: the moved files, for errors.
        SandboxError."""
        read_end, write_end = os.pipe()
        received_data = bytearray()

        def send() -> None:
            # The sandbox may give up before it has read everything.
            with contextlib.suppress(BrokenPipeError), open(write_end, "wb", 0) as pipe:
                frames.write_all(pipe.fileno(), sent_data or b"")

        def receive() -> None:
            limit = max_bytes + changes.ENTRY_HEADER.size  # the END of an archive is one header
            with open(read_end, "rb", 0) as pipe:
                while len(received_data) <= limit and (chunk := pipe.read(changes.CHUNK_BYTES)):
                    received_data.extend(chunk)

        their_streams = [write_end if sent_data is None else read_end]
        serve_our_end = receive if sent_data is None else send
        serving_task = asyncio.ensure_future(in_thread(serve_our_end, "sandbox"))
        try:
            result = await self._ask_warden(frames.RunRequest(kind, MOVE_SECONDS, source), their_streams)
        finally:
            _close_all(their_streams)

        await serving_task
        if result.ending is not RunEnding.DONE:
            failure = result.output.strip() or result.ending
            raise SandboxError(f"{subject} in the sandbox: {failure}")
        return bytes(received_data)

    async def _ask_warden(self, request: frames.RunRequest, streams: list[int] | None = None) -> RunResult:
        if len(request.source) > (max_bytes := frames.MAX_SOURCE_BYTES[request.kind]):
            raise ValueError(
                f"the code is {len(request.source)} bytes long, but at most {max_bytes} bytes can be run"
            )

        async with self._run_lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._process is None:
                if self._needs_listener:
                    raise SandboxError("the sandbox exited, so its listener is closed")
                if request.kind == frames.COLLECT:
                    raise SandboxError("the sandbox exited, so the changed files are lost")
                await self.start()

            try:
                async with asyncio.timeout(request.seconds + LATE_SECONDS):
                    result = await self._send_request(request, streams)
            except BaseException as error:
                self.losses += 1
                self._emptied = True
                await self._end_process()
                if isinstance(error, OSError | EOFError | SandboxError):
                    return RunResult(RunEnding.DIED, "")
                raise  # cancelled: the reply would answer the next request

            self.losses += result.lost
            return result

    async def _end_process(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return

        if self._writer is not None:
            self._writer.close()  # the warden reads the end of the stream, and exits
        self._passage.close()

        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            process.send_signal(signal_number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await in_thread(process.wait, "sandbox")
                    break

        if os.path.lexists(self._fallback_home):  # noqa: ASYNC240 (a killed guard has not removed the directory)
            with contextlib.suppress(TimeoutError):  # the thread goes on by itself
                async with asyncio.timeout(CLEAN_SECONDS):
                    await in_thread(partial(emptying.remove_directory, self._fallback_home), "sandbox")

    async def _connect_guard(self) -> None:
        our_socket, their_socket = socket.socketpair()
        self._passage, their_passage = socket.socketpair()
        self._fallback_home = f"{tempfile.gettempdir()}/asyncrl-sandbox-{secrets.token_hex(8)}"

        with their_socket, their_passage:
            try:
                self._process = self._spawn_guard(their_socket.fileno(), their_passage.fileno())
            except OSError:
                our_socket.close()
                self._passage.close()
                raise

        self._reader, self._writer = await asyncio.open_unix_connection(sock=our_socket)

    def _spawn_guard(self, link_fd: int, passage_fd: int) -> subprocess.Popen[bytes]:
        """Start a Python without our environment variables. The arguments: see guard.main."""
        image = self._image
        system_paths = () if image else (*SYSTEM_DIRECTORIES, *SYSTEM_SETTINGS, sys.base_prefix, sys.prefix)
        arguments = (
            tuple(self.limits),
            sysconfig.get_path("purelib"),
            _existing_paths((*system_paths, *self._shown_paths)),
            image.layers if image else (),
            image.environment if image else {},
            *(self._fallback_home, self._needs_listener, self._user, self._start_directory),
        )

        library_root = str(Path(__file__).resolve().parents[3])

        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD_PROGRAM.format(root=library_root, arguments=arguments)],
            stdin=link_fd,
            stdout=passage_fd,
            stderr=subprocess.DEVNULL,
            env=CODE_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    async def _read_hello(self) -> None:
        bits, notes_size = frames.HELLO.unpack(await self._reader.readexactly(frames.HELLO.size))
        if notes_size > MAX_OUTPUT_BYTES:
            raise SandboxError("the sandbox broke the protocol")
        self.notes = (await self._reader.readexactly(notes_size)).decode("utf-8", "replace")

        guarantees = frozenset(name for bit, name in enumerate(frames.GUARANTEES) if bits >> bit & 1)
        self.enforced = guarantees & frozenset(ISOLATION)
        self.home = SANDBOX_HOME if "root" in guarantees else self._fallback_home
        required = set(self._require)
        if self.limits.resident:
            required.add("resident")
        if self._needs_listener:
            required.add("listener")

        if self._image and "root" not in guarantees:
            raise SandboxError(
                f"sandboxes on this machine cannot use images: {self.notes} (docs/guides/tasks.md)"
            )
        if missing := sorted(required - guarantees):
            lacking_texts = ", ".join(MISSING_TEXTS.get(name, f"no {name} isolation") for name in missing)
            raise SandboxError(
                f"this machine gives the sandbox {lacking_texts} ({self.notes}); allow namespaces "
                f"(docs/guides/tasks.md), or require less"
            )

        if self._needs_listener:
            _, (listener_fd,), *_ = socket.recv_fds(self._passage, 1, 1, socket.MSG_CMSG_CLOEXEC)
            self.listener = socket.socket(fileno=listener_fd)

    async def _send_request(self, request: frames.RunRequest, streams: list[int] | None) -> RunResult:
        assert self._writer is not None
        if streams:
            socket.send_fds(self._passage, [request.kind], streams)
            _close_all(streams)

        self._writer.write(request.frame())
        await self._writer.drain()

        header = await self._reader.readexactly(frames.REPLY_HEADER.size)
        ending, status, lost, omitted, output_size = frames.REPLY_HEADER.unpack(header)
        if ending >= len(frames.ENDINGS) or output_size > MAX_OUTPUT_BYTES:
            raise SandboxError("the sandbox broke the protocol")

        output = (await self._reader.readexactly(output_size)).decode("utf-8", "replace")
        return RunResult(frames.ENDINGS[ending], output, status, lost, omitted=omitted)


def _close_all(descriptors: list[int]) -> None:
    for fd in set(descriptors):  # two streams may be the same descriptor
        os.close(fd)
    descriptors.clear()


def _existing_paths(paths: Iterable[str]) -> list[str]:
    """Return paths that exist, and their targets without links; a directory before its contents."""
    existing_paths = [path for path in paths if os.path.exists(path)]
    named_paths = dict.fromkeys(
        (*map(os.path.abspath, existing_paths), *map(os.path.realpath, existing_paths))
    )
    return sorted(named_paths, key=len)
