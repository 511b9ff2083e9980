"""The first process inside a sandbox: it forks what runs the code, watches it, and answers the owner.

    owner ◄── fd 0: requests, replies ──► warden ── a cell, over a pipe ──► interpreter, forked when needed
                                                 └─ fork ──► a program or a shell, for one request

Nothing but the warden runs between two requests. It waits for: output, the end of what it watches, its owner
(who sends nothing meanwhile, so that anything to read is the end), and the clock.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from asyncrl.isolation.sandbox import calls, cells, confine, files, locks, processes, wire
from asyncrl.isolation.sandbox.confine import Ground, SandboxLimits

LINK = 0
GRACE = 1.0  # seconds between the interrupt of a cell and its end
F_SETPIPE_SZ = 1031
PIPE = 65_536
SHELLS = ("/bin/bash", "/bin/sh")


class Job(NamedTuple):
    """A process under watch. `output`: where it writes; `done`: where the interpreter tells that a cell has
    ended, `cells` where it reads them (-1 for others)."""

    pid: int
    gone: int  # readable when it has ended
    output: int
    done: int = -1
    cells: int = -1

    def close(self) -> None:
        for fd in self[1:]:
            if fd >= 0:
                os.close(fd)


class Kept:
    """The head and the tail of an output, half of `limit` bytes each."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def add(self, data: bytes) -> None:
        self._seen += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half + PIPE:
            del self._tail[: -self._half]

    def cut(self) -> tuple[int, bytes]:
        """How many bytes were left out, and the rest with a note of that in the middle."""
        tail = bytes(self._tail[-self._half :])
        omitted = self._seen - len(self._head) - len(tail)
        note = f"\n[{omitted} bytes left out]\n".encode() if omitted else b""
        return omitted, bytes(self._head) + note + tail


class Warden:
    def __init__(self, limits: SandboxLimits, ground: Ground) -> None:
        self._limits = limits
        self._ground = ground
        self._interpreter: Job | None = None
        self._number = 0  # cells that this interpreter was given
        self._status: dict[int, int] = {}

    def serve(self) -> None:
        """Answer requests until the owner goes, then end all."""
        try:
            self._greet()
            while True:
                self._answer(wire.read_request(LINK))
        except (EOFError, ConnectionError):
            self._end_all()

    def _greet(self) -> None:
        bits = sum(1 << bit for bit, name in enumerate(wire.HOLDS) if name in self._ground.holds)
        notes = self._ground.notes.encode()[:2000]
        wire.write_all(LINK, wire.HELLO.pack(bits, len(notes)) + notes)

    def _answer(self, request: wire.Request) -> None:
        self._freeze(False)
        reply = self._cell(request) if request.kind == wire.CELL else self._program(request)
        self._freeze(True)
        if self._bury():
            reply = reply._replace(lost=True)
        self._status.clear()
        wire.write_all(LINK, reply.frame())

    def _cell(self, request: wire.Request) -> wire.Reply:
        job = self._interpreter = self._interpreter or self._start_interpreter()
        self._number += 1
        kept = Kept(self._limits.output)
        try:
            os.write(job.cells, cells.CELL.pack(len(request.source)) + request.source)
        except OSError:
            return self._lose(job, kept, wire.DIED)
        ending = wire.DONE
        if not self._watch(job, kept, request.seconds):
            ending = wire.LATE
            self._signal_group(job, signal.SIGINT)
            if not self._watch(job, kept, GRACE):
                return self._lose(job, kept, ending)
        raised = self._said(job)
        if raised is None:
            return self._lose(job, kept, wire.DIED)
        self._freeze(True)
        self._drain(job, kept)
        if ending == wire.DONE and raised:
            ending = wire.FAILED
        return wire.Reply(ending, 0, False, *kept.cut())

    def _lose(self, job: Job, kept: Kept, ending: bytes) -> wire.Reply:
        """The interpreter is gone, or makes no sense any more: end everything, start anew next time."""
        self._end_all()
        self._drain(job, kept)
        status = self._status.pop(job.pid, 0)
        job.close()
        self._interpreter = None
        return wire.Reply(ending, status, True, *kept.cut())

    def _program(self, request: wire.Request) -> wire.Reply:
        """Run one process to its end. Only what a shell started may go on, and only if it ended in time."""
        shell = request.kind == wire.SHELL
        lost = not shell and self._clear()
        body = _shell if shell else _python
        cpu = 0 if shell else int(request.seconds) + 2  # what a shell starts may live on, and be idle
        job = self._fork(lambda: body(request.source), _file(request.stdin), cpu=cpu)
        kept = Kept(self._limits.output)
        in_time = self._watch(job, kept, request.seconds)
        if in_time and shell:
            self._freeze(True)
        else:
            lost |= self._end_interpreter()
        lost |= self._bury()
        self._drain(job, kept)
        status = self._status.pop(job.pid, 0)
        job.close()
        ending = wire.LATE if not in_time else wire.FAILED if status else wire.DONE
        return wire.Reply(ending, status, lost, *kept.cut())

    def _clear(self) -> bool:
        """Nothing of earlier calls is left, nor of their files. Whether variables were."""
        lost = self._end_interpreter()
        files.empty(self._ground.home)
        return lost

    def _end_interpreter(self) -> bool:
        """With all that runs. Whether there was one."""
        there = self._interpreter is not None
        self._end_all()
        self._forget_interpreter()
        return there

    def _start_interpreter(self) -> Job:
        self._number = 0
        cells_read, cells_write = os.pipe()
        done_read, done_write = os.pipe()
        fcntl.fcntl(cells_write, fcntl.F_SETFL, os.O_NONBLOCK)
        os.set_blocking(done_read, False)
        job = self._fork(
            lambda: cells.serve_cells(cells_read, done_write, os.dup(1)),
            os.open("/dev/null", os.O_RDONLY),
            keep=(cells_read, done_write),
        )
        os.close(cells_read)
        os.close(done_write)
        return job._replace(done=done_read, cells=cells_write)

    def _fork(self, body: Callable[[], object], stdin: int, keep: tuple[int, ...] = (), cpu: int = 0) -> Job:
        output_read, output_write = os.pipe()
        os.set_blocking(output_read, False)
        pid = os.fork()
        if pid == 0:
            self._become_job(body, stdin, output_write, keep, cpu)
        os.close(stdin)
        os.close(output_write)
        return Job(pid, os.pidfd_open(pid), output_read)

    def _become_job(
        self, body: Callable[[], object], stdin: int, output: int, keep: tuple[int, ...], cpu: int
    ) -> None:
        """In the child: only its own descriptors, its limits, then the code."""
        status = 1
        try:
            os.setsid()
            if self._ground.files >= 0:
                locks.restrict(self._ground.files)
            if self._ground.filtered:
                calls.refuse(calls.MEMFD)  # which this process needs for its children's input
            for fd, target in ((stdin, 0), (output, 1), (output, 2)):
                os.dup2(fd, target)
            for fd in range(3, 256):
                if fd not in keep:
                    _close(fd)
            confine.prctl(confine.PR_SET_DUMPABLE, 1)
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
            set_limits(self._limits, self._ground.processes, cpu)
            status = int(body() or 0)  # type: ignore[call-overload]
        finally:
            os._exit(status)

    def _watch(self, job: Job, kept: Kept, seconds: float) -> bool:
        """Collect output until the job is done (True) or the time is over (False)."""
        until = time.monotonic() + seconds
        poll = select.poll()
        ends = {job.gone, job.done} - {-1}
        for fd in (LINK, job.output, *ends):
            poll.register(fd, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == LINK:
                    raise EOFError
                if fd in ends:
                    return True
                if not self._collect(fd, kept):
                    poll.unregister(fd)  # all who could write have closed it
        return False

    def _drain(self, job: Job, kept: Kept) -> None:
        """What is still in the pipe; those who could go on writing have been stopped, or are few."""
        for _ in range(PIPE // 4096):
            if not self._collect(job.output, kept):
                return

    def _collect(self, fd: int, kept: Kept) -> bool:
        try:
            data = os.read(fd, PIPE)
        except BlockingIOError:
            return False
        kept.add(data)
        return bool(data)

    def _said(self, job: Job) -> bool | None:
        """Whether the cell raised; None when what the interpreter says is not about this cell."""
        try:
            data = os.read(job.done, 16)
        except BlockingIOError:
            return None
        if len(data) != cells.DONE.size:
            return None
        number, raised = cells.DONE.unpack(data)
        return raised if number == self._number else None

    def _freeze(self, stop: bool) -> None:
        """Stop, or wake, every process but this one: nothing computes while its model thinks."""
        number = signal.SIGSTOP if stop else signal.SIGCONT
        processes.signal_all(number, self._ground.alone)

    def _signal_group(self, job: Job, number: int) -> None:
        processes.kill(-job.pid, number)

    def _end_all(self) -> None:
        """Kill every process but this one; what was watched leaves its status."""
        self._status.update(processes.end_all(self._ground.alone))

    def _bury(self) -> bool:
        """Take note of what has ended. Whether the interpreter is among it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._status[pid] = os.waitstatus_to_exitcode(status)
        if self._interpreter is None or self._interpreter.pid not in self._status:
            return False
        self._forget_interpreter()
        return True

    def _forget_interpreter(self) -> None:
        if self._interpreter:
            self._interpreter.close()
        self._interpreter = None


def set_limits(limits: SandboxLimits, count: int, cpu: int) -> None:
    """`cpu`: seconds; 0: the clock that bounds each call is enough, as nothing runs between two."""
    if cpu:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory << 20),
        (resource.RLIMIT_FSIZE, limits.file << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, count),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _python(source: bytes) -> int:
    return cells.run_program(source)


def _shell(command: bytes) -> None:
    shell = next(path for path in SHELLS if os.path.exists(path))
    os.execv(shell, [shell, "-c", command.decode("utf-8", "replace")])


def _file(data: bytes) -> int:
    """A descriptor that reads `data`, then ends. It is memory, and does not grow any more."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    wire.write_all(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return
