"""The first process inside a sandbox starts the processes that run the code, and answers the owner.

    owner ◄── fd 0: requests, replies ──► warden ◄── cells, over a socket ──► interpreter, started when needed
                                                 └─ fork, exec ──► a program or a shell, for one request

Code never runs in a copy of this process: /proc/self/exe of one leads past the read-only mounts.
Between two requests only the warden runs; all other processes are stopped. During a request it waits for
output, the end of the process, the time limit and its owner. The owner sends nothing during a request, so
a readable connection means that the owner has closed it. The streams of an exec are the owner's, as is the
pipe by which files are moved: their descriptors come over fd 1, and a word that ends an exec.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import struct
import time
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, SCM_RIGHTS, SOL_SOCKET, socket, socketpair
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from asyncrl.isolation.sandbox import changes, confine, emptying, frames, kernel, memory, system_calls
from asyncrl.isolation.sandbox.cgroup import MemoryGroup
from asyncrl.isolation.sandbox.confine import Confinement, ConfinementPlan
from asyncrl.isolation.sandbox.frames import RunEnding, RunReply, RunRequest, SandboxLimits
from asyncrl.isolation.sandbox.kernel import PR_SET_PDEATHSIG, prctl
from asyncrl.isolation.sandbox.watched import LINK, BoundedOutput, WatchedProcess
from asyncrl.isolation.wrapper import CANNOT_RUN

PASSAGE = 1  # the one that brings the streams of an exec, and takes the listener to the owner
INODE = 1024  # bytes that the kernel holds for a file or directory in memory
LOOK_SECONDS = 0.25  # between two measurements of the memory
SURE_SECONDS = 0.02  # until the second one: a process that is starting another counts twice for a moment
CHANCE = 32  # of 256: the chance to end at a measurement at which the machine is short of memory
GRACE = 1.0  # seconds between the interrupt of a cell and its end
SIGNALS = 1024  # that may wait
MAX_FILES = 256  # descriptors that this process may have open


class Warden:
    def __init__(
        self,
        plan: ConfinementPlan,
        confinement: Confinement,
        python: Sequence[str],
        group: MemoryGroup | None,
    ) -> None:
        """`python`: a command, and as its last word what it is to run before a call of interpreter.py.
        `group`: of the code's processes."""
        self._limits = plan.limits
        self._directory = plan.directory
        self._has_image = bool(plan.layers)
        self._python = python
        self._confinement = confinement
        self._group = group
        self._short_looks = 0  # in a row, in which the machine was short of memory
        self._passage = socket(fileno=PASSAGE)
        self._interpreter: WatchedProcess | None = None
        self._cells = 0  # cells run so far
        self._status: dict[int, int] = {}  # exit statuses of processes that ended during this request

    def serve(self) -> None:
        """Answer requests until the owner closes the connection, then end every process."""
        bits = sum(1 << bit for bit, name in enumerate(frames.GIVEN) if name in self._confinement.holds)
        notes = self._confinement.notes.encode()[:2000]
        answers = {b"c": self._cell, b"e": self._execute, **dict.fromkeys(changes.STEPS, self._move)}
        try:
            if listener := self._confinement.listener:
                number = struct.pack("i", listener.fileno())
                self._passage.sendmsg([b"l"], [(SOL_SOCKET, SCM_RIGHTS, number)])
                listener.close()
            frames.write_all(LINK, frames.HELLO.pack(bits, len(notes)) + notes)
            while True:
                request = frames.read_request(LINK)
                if request.kind not in changes.STEPS:
                    self._signal_all(signal.SIGCONT)
                reply = answers.get(request.kind, self._program)(request)
                if not kernel.stop_all(self._confinement.alone):  # no process runs between two requests
                    self._kill_all()
                if self._interpreter_ended():
                    reply = reply._replace(lost=True)
                self._status.clear()
                frames.write_all(LINK, reply.frame())
        except (EOFError, ConnectionError):
            self._kill_all()

    def _cell(self, request: RunRequest) -> RunReply:
        process = self._interpreter = self._interpreter or self._start_interpreter()
        self._cells += 1
        kept = BoundedOutput(self._limits.output)
        if not process.send_cell(self._cells, request.source):
            return self._lose(process, kept, RunEnding.DIED)
        in_time = process.watch(kept, request.seconds)
        if not in_time:
            kernel.kill(-process.pid, signal.SIGINT)
            if not process.watch(kept, GRACE):
                return self._lose(process, kept, RunEnding.LATE)
        raised = process.cell_raised(self._cells)
        if raised is None:
            return self._lose(process, kept, RunEnding.DIED)
        self._signal_all(signal.SIGSTOP)
        process.drain(kept)
        ending = RunEnding.LATE if not in_time else RunEnding.FAILED if raised else RunEnding.DONE
        return RunReply(ending, 0, False, *kept.join())

    def _lose(self, process: WatchedProcess, kept: BoundedOutput, ending: RunEnding) -> RunReply:
        """The interpreter ended or broke the protocol: end every process. The next cell starts a new one."""
        self._kill_all()
        process.drain(kept)
        self._forget_interpreter()
        return RunReply(ending, self._status.pop(process.pid, 0), True, *kept.join())

    def _program(self, request: RunRequest) -> RunReply:
        """Run a program or a shell command to its end. What a shell started in the background may live on, if
        the command itself ended in time."""
        shell = request.kind == b"s"
        lost = False
        keep = -1
        body = partial(_run_shell, request.source)
        if not shell:  # a program finds no processes and no files of earlier requests
            lost = self._kill_all_and_forget()
            keep = _file(request.source)
            body = partial(self._exec_python, keep, f"run_program(open({keep}, 'rb').read())")
            if not self._has_image:  # where all files stay: it has more than the home
                emptying.empty(self._confinement.home)
        process = self._fork(body, _file(request.stdin), theirs=keep)
        kept = BoundedOutput(self._limits.output)
        in_time = process.watch(kept, request.seconds)
        if in_time and shell:
            self._signal_all(signal.SIGSTOP)
        else:
            lost |= self._kill_all_and_forget()
        lost |= self._interpreter_ended()
        return self._ended(process, kept, in_time, lost)

    def _ended(self, process: WatchedProcess, kept: BoundedOutput, in_time: bool, lost: bool) -> RunReply:
        process.drain(kept)
        process.close()
        status = self._status.pop(process.pid, 0)
        ending = RunEnding.LATE if not in_time else RunEnding.FAILED if status else RunEnding.DONE
        return RunReply(ending, status, lost, *kept.join())

    def _execute(self, request: RunRequest) -> RunReply:
        """Run a program with the owner's streams to its end. It finds and leaves no process."""
        lost = self._kill_all_and_forget()
        if self._group:
            self._group.start()
        pid = self._start(lambda: _run_exec(request.source), self._passed("3i"))
        stop = os.dup(PASSAGE)  # readable, when the owner stops the program
        process = WatchedProcess(pid, -1, stop)
        no_output = BoundedOutput(0)
        overrun: RunEnding | None = None
        until = time.monotonic() + request.seconds
        while not (ended := process.watch(no_output, min(LOOK_SECONDS, until - time.monotonic()))):
            self._interpreter_ended()  # orphans that have ended would count as processes
            if (overrun := self._overrun()) or time.monotonic() >= until:
                break
        self._kill_all()
        process.close()

        status = self._status.pop(pid, 0)
        if self._group and self._group.has_killed():  # the kernel may have ended it between two looks
            overrun = RunEnding.OVER
        finished = RunEnding.FAILED if status else RunEnding.DONE
        return RunReply(overrun or (finished if ended else RunEnding.LATE), status, lost, 0, b"")

    def _move(self, request: RunRequest) -> RunReply:
        """Move files over the owner's pipe. No other process runs meanwhile."""
        (pipe,), changed = self._passed("i"), os.dup(self._confinement.upper)
        top = "/" if self._has_image else self._confinement.home
        step = partial(changes.run, request.kind, top, changed, request.source)
        process = self._fork(step, pipe, theirs=changed)
        kept = BoundedOutput(self._limits.output)
        in_time = process.watch(kept, request.seconds)
        kernel.kill(process.pid, signal.SIGKILL)
        self._status[process.pid] = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        return self._ended(process, kept, in_time, lost=False)

    def _passed(self, form: str) -> tuple[int, ...]:
        """Take descriptors that the owner has sent, perhaps after a word to stop what had ended."""
        ancillary = list[tuple[int, int, bytes]]()
        while not ancillary:
            word, ancillary, *_ = self._passage.recvmsg(1, CMSG_SPACE(12), MSG_CMSG_CLOEXEC)
            if not word:
                raise EOFError
        return struct.unpack(form, ancillary[0][2])

    def _overrun(self) -> RunEnding | None:
        """OVER when all processes and files hold more than `resident`; STARVED when the machine has no
        memory left and this sandbox is to end for it."""
        if not self._limits.resident:
            return None
        if (self._group and self._group.has_killed()) or self._holds_more():
            return RunEnding.OVER
        # every sandbox sees the same, and the end of a few may be enough
        short = memory.machine_is_short()
        self._short_looks = self._short_looks + 1 if short else 0
        return RunEnding.STARVED if self._short_looks > 1 and os.urandom(1)[0] < CHANCE else None

    def _holds_more(self) -> bool:
        """True when more than `resident` is held, by two measurements."""
        most_bytes = self._limits.resident << 20
        for pause in (SURE_SECONDS, 0):
            files = os.fstatvfs(self._confinement.upper)
            in_files = (files.f_blocks - files.f_bfree) * files.f_frsize
            in_files += (files.f_files - files.f_ffree) * INODE
            if in_files + memory.held_by_processes(most_bytes) <= most_bytes:
                return False
            time.sleep(pause)
        return True

    def _start_interpreter(self) -> WatchedProcess:
        ours, theirs = (end.detach() for end in socketpair())
        os.set_blocking(ours, False)
        nothing = os.open("/dev/null", os.O_RDONLY)
        return self._fork(lambda: self._serve_cells(theirs), nothing, ours, theirs)

    def _serve_cells(self, control: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a first cell that is late before this Python is up
        return self._exec_python(control, f"serve_cells({control})")

    def _exec_python(self, keep: int, call: str) -> int:
        """Become the Python inside, which runs a call of interpreter.py."""
        os.set_inheritable(keep, True)
        *words, source = self._python
        return _exec([*words, f"{source}\n{call}"], os.environ)

    def _fork(
        self, body: Callable[[], object], stdin: int, control: int = -1, theirs: int = -1
    ) -> WatchedProcess:
        """Start a process that runs `body`. `control`, `theirs`: its socket, the warden's end first."""
        output_read, output_write = os.pipe()
        os.set_blocking(output_read, False)
        pid = self._start(body, (stdin, output_write, output_write), theirs)
        return WatchedProcess(pid, output_read, control)

    def _start(self, body: Callable[[], object], streams: Sequence[int], keep: int = -1) -> int:
        """Return its pid. The streams and the descriptor `keep` are left to it alone."""
        pid = os.fork()
        if pid == 0:
            self._become(body, streams, keep)
        for fd in {*streams, keep} - {-1}:
            os.close(fd)
        return pid

    def _become(self, body: Callable[[], object], streams: Sequence[int], keep: int) -> None:
        """Become the program, in the child: close other descriptors, set the limits, run `body`, and exit. No
        process of the code can look into it until `body` allows that, or becomes another program. It handles
        signals as by default, whatever the owner or Python ignores."""
        status = CANNOT_RUN
        try:
            os.setsid()
            if self._group:
                self._group.join()
            if self._confinement.files >= 0:
                kernel.restrict_files(self._confinement.files)
            if self._confinement.filtered:
                system_calls.filter_code()
            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            os.closerange(3, keep)
            os.closerange(max(keep + 1, 3), MAX_FILES)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in range(1, signal.NSIG):
                if signal.getsignal(number) is signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            set_limits(self._limits, self._confinement.processes)
            _enter(self._directory)
            status = int(body() or 0)  # type: ignore[call-overload]
        except (OSError, ValueError) as error:  # a path or a text that no program can be given
            os.write(2, f"{error}\n".encode(errors="replace"))
        finally:
            os._exit(status)

    def _signal_all(self, number: int) -> None:
        """Signal every process of the sandbox but this one."""
        kernel.signal_all(number, self._confinement.alone)

    def _kill_all(self) -> None:
        """Kill every process of the sandbox but this one."""
        self._status |= kernel.end_all(self._confinement.alone)

    def _kill_all_and_forget(self) -> bool:
        """Kill all processes; true if there was an interpreter."""
        there = self._interpreter is not None
        self._kill_all()
        self._forget_interpreter()
        return there

    def _interpreter_ended(self) -> bool:
        """Collect exit statuses. True when the interpreter is among the processes that ended."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._status[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            pass
        if self._interpreter is None or self._interpreter.pid not in self._status:
            return False
        self._forget_interpreter()
        return True

    def _forget_interpreter(self) -> None:
        if self._interpreter:
            self._interpreter.close()
        self._interpreter = None


def set_limits(limits: SandboxLimits, count: int) -> None:
    """Limit the code. `count`: RLIMIT_NPROC."""
    if limits.memory:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory << 20, limits.memory << 20))
    for kind, value in (
        (resource.RLIMIT_FSIZE, limits.file << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, count),
        (resource.RLIMIT_SIGPENDING, _most_signals()),
    ):
        resource.setrlimit(kind, (value, value))


def _most_signals() -> int:
    """Return how many signals may wait: the user has a number of them for all of his programs."""
    hard = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
    return SIGNALS if hard == resource.RLIM_INFINITY else min(SIGNALS, hard)


def _enter(directory: str) -> None:
    """Enter a directory, which is made if it is missing. Where that fails, the program starts in its home."""
    try:
        os.makedirs(directory or ".", exist_ok=True)
        os.chdir(directory or ".")
    except OSError as error:
        os.write(2, f"{error}\n".encode())


def _exec(words: list[str], environment: Mapping[str, str], directory: str = ".") -> int:
    """Become the program. Where it cannot be run, its standard error says so."""
    try:
        os.makedirs(directory, exist_ok=True)
        os.chdir(directory)
        os.execvpe(words[0], words, environment)
    except OSError as error:
        os.write(2, f"{words[0]} cannot be run: {error.strerror}\n".encode())
    return CANNOT_RUN


def _run_shell(command: bytes) -> int:
    return _exec([confine.shell(), "-c", command.decode("utf-8", "replace")], os.environ)


def _run_exec(source: bytes) -> int:
    words, environment, directory = json.loads(source)
    return _exec(words, environment, directory)


def _file(data: bytes) -> int:
    """A descriptor from which `data` can be read: a memory file, sealed so that it cannot grow."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    frames.write_all(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
