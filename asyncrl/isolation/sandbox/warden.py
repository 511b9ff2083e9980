"""The first process inside a sandbox starts the processes that run the code, and answers the owner.

    owner ◄── fd 0: requests, replies ──► warden ◄── cells, over a socket ──► interpreter, started when needed
                                                 └─ fork, exec ──► a program or a shell, for one request

Code never runs in a copy of this process, as /proc/self/exe of a copy leads past the read-only mounts.
Between two requests only the warden runs; all other processes are stopped. During a request the warden waits
for output, the end of the process, the time limit and the owner. The owner sends nothing during a request,
so that a readable connection means that the owner has closed the connection. The owner makes the streams of
an exec and the pipe for moving files; their descriptors come over fd 1, as does the word that ends an exec.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
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
from asyncrl.isolation.sandbox.watched import LINK_FD, BoundedOutput, WatchedProcess
from asyncrl.isolation.wrapper import CANNOT_RUN

PASSAGE_FD = 1  # the socket that brings the streams of an exec, and takes the listener to the owner
INODE_BYTES = 1024  # bytes that the kernel holds for a file or directory in memory
LOOK_SECONDS = 0.25  # between two measurements of memory
SURE_SECONDS = 0.02  # before a second measurement: a process that starts a process counts twice for a moment
# Out of 256: the chance of ending the run at a look at which the machine is short of memory.
ENDING_CHANCE = 32
GRACE_SECONDS = 1.0  # seconds between the interrupt of a cell and its end
MAX_PENDING_SIGNALS = 1024
MAX_DESCRIPTORS = 256  # descriptors that this process may have open


class Warden:
    def __init__(
        self,
        plan: ConfinementPlan,
        confinement: Confinement,
        python_command: Sequence[str],
        memory_group: MemoryGroup | None,
    ) -> None:
        """Prepare the sandbox's first process. `python_command`: a command whose last word is the code to
        run before a call of interpreter.py. `memory_group`: the group of the code's processes."""
        self._limits = plan.limits
        self._start_directory = plan.start_directory
        self._has_image = bool(plan.layers)
        self._python_command = python_command
        self._confinement = confinement
        self._memory_group = memory_group
        self._short_looks = 0  # consecutive looks at which the machine was short of memory
        self._passage = socket(fileno=PASSAGE_FD)
        self._interpreter: WatchedProcess | None = None
        self._cell_count = 0  # cells run so far
        self._exit_statuses: dict[int, int] = {}  # exit statuses of processes that ended during this request

    def serve_requests(self) -> None:
        """Answer requests until the owner closes the connection, then end every process."""
        bits = sum(
            1 << bit for bit, name in enumerate(frames.GUARANTEES) if name in self._confinement.enforced
        )
        notes = self._confinement.notes.encode()[:2000]
        handlers = {
            b"c": self._run_cell,
            b"e": self._execute_program,
            **dict.fromkeys(changes.STEPS, self._move_files),
        }

        try:
            if listener := self._confinement.listener:
                listener_fd = struct.pack("i", listener.fileno())
                self._passage.sendmsg([b"l"], [(SOL_SOCKET, SCM_RIGHTS, listener_fd)])
                listener.close()
            frames.write_all(LINK_FD, frames.HELLO.pack(bits, len(notes)) + notes)
            while True:
                request = frames.read_request(LINK_FD)
                if request.kind not in changes.STEPS:
                    self._signal_all(signal.SIGCONT)
                reply = handlers.get(request.kind, self._run_program)(request)

                # No process runs between two requests
                if not kernel.stop_all(self._confinement.signals_are_contained):
                    self._kill_all()

                if self._interpreter_ended():
                    reply = reply._replace(lost=True)

                self._exit_statuses.clear()
                frames.write_all(LINK_FD, reply.frame())
        except (EOFError, ConnectionError):
            self._kill_all()

    def _run_cell(self, request: RunRequest) -> RunReply:
        process = self._interpreter = self._interpreter or self._start_interpreter()
        self._cell_count += 1
        output = BoundedOutput(self._limits.output)

        if not process.send_cell(self._cell_count, request.source):
            return self._lose_interpreter(process, output, RunEnding.DIED)

        in_time = process.watch_output(output, request.seconds)
        if not in_time:
            kernel.kill(-process.pid, signal.SIGINT)
            if not process.watch_output(output, GRACE_SECONDS):
                return self._lose_interpreter(process, output, RunEnding.LATE)

        raised = process.cell_raised(self._cell_count)
        if raised is None:
            return self._lose_interpreter(process, output, RunEnding.DIED)

        self._signal_all(signal.SIGSTOP)
        process.drain_output(output)
        ending = _ending_of_run(in_time, failed=raised)
        return RunReply(ending, 0, False, *output.join_ends())

    def _lose_interpreter(
        self, process: WatchedProcess, output: BoundedOutput, ending: RunEnding
    ) -> RunReply:
        """End every process, as the interpreter ended or broke the protocol. The next cell starts a new
        interpreter."""
        self._kill_all()
        process.drain_output(output)
        self._forget_interpreter()
        return RunReply(ending, self._exit_statuses.pop(process.pid, 0), True, *output.join_ends())

    def _run_program(self, request: RunRequest) -> RunReply:
        """Run a program or a shell command to its end. Background processes of a shell command may live on
        if the command itself ended in time."""
        is_shell = request.kind == b"s"
        lost = False
        program_fd = -1
        body = partial(_run_shell, request.source)

        if not is_shell:  # a program finds no processes and no files of earlier requests
            lost = self._kill_all_and_forget()
            program_fd = _memory_file(request.source)
            body = partial(self._exec_python, program_fd, f"run_program(open({program_fd}, 'rb').read())")
            if not self._has_image:  # with an image all files stay, as there are more than the home's
                emptying.empty_directory(self._confinement.home)

        process = self._fork_watched(body, _memory_file(request.stdin), child_fd=program_fd)
        output = BoundedOutput(self._limits.output)
        in_time = process.watch_output(output, request.seconds)

        if in_time and is_shell:
            self._signal_all(signal.SIGSTOP)
        else:
            lost |= self._kill_all_and_forget()

        lost |= self._interpreter_ended()
        return self._reply_to_end(process, output, in_time, lost)

    def _reply_to_end(
        self, process: WatchedProcess, output: BoundedOutput, in_time: bool, lost: bool
    ) -> RunReply:
        process.drain_output(output)
        process.close()
        status = self._exit_statuses.pop(process.pid, 0)
        ending = _ending_of_run(in_time, failed=status != 0)
        return RunReply(ending, status, lost, *output.join_ends())

    def _execute_program(self, request: RunRequest) -> RunReply:
        """Run a program with the owner's streams to its end. The program finds and leaves no process."""
        lost = self._kill_all_and_forget()
        if self._memory_group:
            self._memory_group.reset_counts()

        started_fd, exec_fd = os.pipe()  # `started_fd` is readable from the exec on, which closes `exec_fd`
        pid = self._start_process(
            lambda: _exec_program(*json.loads(request.source)), self._receive_descriptors("3i"), exec_fd
        )
        stop_fd = os.dup(PASSAGE_FD)  # readable when the owner stops the program
        process = WatchedProcess(pid, -1, stop_fd)

        no_output = BoundedOutput(0)
        overrun: RunEnding | None = None
        deadline = time.monotonic() + request.seconds
        while not (
            has_ended := process.watch_output(no_output, min(LOOK_SECONDS, deadline - time.monotonic()))
        ):
            self._interpreter_ended()  # orphans that have ended would count as processes

            # Before the exec the process is a copy of this one, which cannot be inspected and would count
            # with all that such a process may hold. Entering the memory group can take longer than a look.
            if select.select([started_fd], [], [], 0)[0]:
                overrun = self._memory_overrun()
            if overrun or time.monotonic() >= deadline:
                break

        self._kill_all()
        process.close()
        os.close(started_fd)

        status = self._exit_statuses.pop(pid, 0)
        # The kernel may have killed between two looks
        if self._memory_group and self._memory_group.has_killed():
            overrun = RunEnding.OVER
        ending = overrun or _ending_of_run(has_ended, failed=status != 0)
        return RunReply(ending, status, lost, omitted=0, output=b"")

    def _move_files(self, request: RunRequest) -> RunReply:
        """Move files over the owner's pipe. No other process runs meanwhile."""
        (pipe_fd,) = self._receive_descriptors("i")
        changed_fd = os.dup(self._confinement.upper_fd)
        top_directory = "/" if self._has_image else self._confinement.home
        step = partial(changes.run_step, request.kind, top_directory, changed_fd, request.source)

        process = self._fork_watched(step, pipe_fd, child_fd=changed_fd)
        output = BoundedOutput(self._limits.output)
        in_time = process.watch_output(output, request.seconds)

        kernel.kill(process.pid, signal.SIGKILL)
        self._exit_statuses[process.pid] = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        return self._reply_to_end(process, output, in_time, lost=False)

    def _receive_descriptors(self, struct_format: str) -> tuple[int, ...]:
        """Take descriptors that the owner has sent, perhaps after a late word to stop an ended program."""
        ancillary = list[tuple[int, int, bytes]]()
        while not ancillary:
            word, ancillary, *_ = self._passage.recvmsg(1, CMSG_SPACE(12), MSG_CMSG_CLOEXEC)
            if not word:
                raise EOFError
        return struct.unpack(struct_format, ancillary[0][2])

    def _memory_overrun(self) -> RunEnding | None:
        """Return OVER if all processes and files hold more than `resident`; STARVED if the machine has no
        memory left and this sandbox must end for that reason."""
        if not self._limits.resident:
            return None

        if (self._memory_group and self._memory_group.has_killed()) or self._exceeds_resident():
            return RunEnding.OVER

        # Every sandbox sees the shortage, and the end of a few sandboxes may be enough
        is_short = memory.machine_is_short()
        self._short_looks = self._short_looks + 1 if is_short else 0
        return RunEnding.STARVED if self._short_looks > 1 and os.urandom(1)[0] < ENDING_CHANCE else None

    def _exceeds_resident(self) -> bool:
        """Return whether processes and files hold more than `resident` in two measurements."""
        max_bytes = self._limits.resident << 20
        for pause in (SURE_SECONDS, 0):
            file_system = os.fstatvfs(self._confinement.upper_fd)
            file_bytes = (file_system.f_blocks - file_system.f_bfree) * file_system.f_frsize
            file_bytes += (file_system.f_files - file_system.f_ffree) * INODE_BYTES
            if file_bytes + memory.measure_processes(max_bytes) <= max_bytes:
                return False
            time.sleep(pause)
        return True

    def _start_interpreter(self) -> WatchedProcess:
        warden_socket, interpreter_socket = (end.detach() for end in socketpair())
        os.set_blocking(warden_socket, False)
        empty_input = os.open("/dev/null", os.O_RDONLY)

        def serve_cells() -> int:
            # The time of the first cell may be over before this Python is up.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return self._exec_python(interpreter_socket, f"serve_cells({interpreter_socket})")

        return self._fork_watched(serve_cells, empty_input, warden_socket, interpreter_socket)

    def _exec_python(self, kept_fd: int, call: str) -> int:
        """Become the Python inside, and run a call of interpreter.py."""
        os.set_inheritable(kept_fd, True)
        *words, source = self._python_command
        return _exec_program([*words, f"{source}\n{call}"], os.environ)

    def _fork_watched(
        self, body: Callable[[], object], stdin: int, control_fd: int = -1, child_fd: int = -1
    ) -> WatchedProcess:
        """Start a process that runs `body`. `child_fd`: a further descriptor of the process, open only there.
        `control_fd`: the warden's end of a socket pair whose other end is `child_fd`."""
        output_read, output_write = os.pipe()
        os.set_blocking(output_read, False)
        pid = self._start_process(body, (stdin, output_write, output_write), child_fd)
        return WatchedProcess(pid, output_read, control_fd)

    def _start_process(self, body: Callable[[], object], streams: Sequence[int], kept_fd: int = -1) -> int:
        """Start a process that runs `body`; return the pid. The streams and `kept_fd` are closed here, and
        open in the process."""
        pid = os.fork()
        if pid == 0:
            self._become_program(body, streams, kept_fd)
        for fd in {*streams, kept_fd} - {-1}:
            os.close(fd)
        return pid

    def _become_program(self, body: Callable[[], object], streams: Sequence[int], kept_fd: int) -> None:
        """Become the program, in the child: close other descriptors, set the limits, run `body`, and exit.
        No process of the code can inspect the child until `body` allows that, or becomes another program.
        Signals have their default handling, whatever the owner or Python ignores."""
        status = CANNOT_RUN
        try:
            os.setsid()
            if self._memory_group:
                self._memory_group.add_this_process()

            if self._confinement.landlock_fd >= 0:
                kernel.restrict_files(self._confinement.landlock_fd)
            if self._confinement.seccomp_works:
                system_calls.filter_code()

            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            os.closerange(3, kept_fd)
            os.closerange(max(kept_fd + 1, 3), MAX_DESCRIPTORS)

            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

            for signal_number in range(1, signal.NSIG):
                if signal.getsignal(signal_number) is signal.SIG_IGN:
                    signal.signal(signal_number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

            set_limits(self._limits, self._confinement.process_limit)
            _enter_directory(self._start_directory)

            status = int(body() or 0)  # type: ignore[call-overload]
        except (OSError, ValueError) as error:  # a path or a text that no program can receive
            os.write(2, f"{error}\n".encode(errors="replace"))
        finally:
            os._exit(status)

    def _signal_all(self, signal_number: int) -> None:
        """Signal every process of the sandbox except the warden."""
        kernel.signal_all(signal_number, self._confinement.signals_are_contained)

    def _kill_all(self) -> None:
        """Kill every process of the sandbox except the warden."""
        self._exit_statuses |= kernel.end_all(self._confinement.signals_are_contained)

    def _kill_all_and_forget(self) -> bool:
        """Kill all processes; return whether there was an interpreter."""
        had_interpreter = self._interpreter is not None
        self._kill_all()
        self._forget_interpreter()
        return had_interpreter

    def _interpreter_ended(self) -> bool:
        """Collect exit statuses. True: the interpreter is among the ended processes."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:  # no further child has ended
                    break
                self._exit_statuses[pid] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            pass
        if self._interpreter is None or self._interpreter.pid not in self._exit_statuses:
            return False
        self._forget_interpreter()
        return True

    def _forget_interpreter(self) -> None:
        if self._interpreter:
            self._interpreter.close()
        self._interpreter = None


def _ending_of_run(in_time: bool, failed: bool) -> RunEnding:
    if not in_time:
        return RunEnding.LATE
    return RunEnding.FAILED if failed else RunEnding.DONE


def set_limits(limits: SandboxLimits, process_limit: int) -> None:
    """Limit the code. `process_limit`: RLIMIT_NPROC."""
    if limits.memory:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory << 20, limits.memory << 20))

    # The user has one supply of pending signals for all programs.
    pending_signals = MAX_PENDING_SIGNALS
    hard_limit = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
    if hard_limit != resource.RLIM_INFINITY:
        pending_signals = min(MAX_PENDING_SIGNALS, hard_limit)

    values = {
        resource.RLIMIT_FSIZE: limits.file << 20,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: process_limit,
        resource.RLIMIT_SIGPENDING: pending_signals,
    }
    for resource_kind, value in values.items():
        resource.setrlimit(resource_kind, (value, value))


def _enter_directory(directory: str) -> None:
    """Enter a directory, and make the directory if missing. On failure the program starts in the home."""
    try:
        os.makedirs(directory or ".", exist_ok=True)
        os.chdir(directory or ".")
    except OSError as error:
        os.write(2, f"{error}\n".encode())


def _exec_program(words: list[str], environment: Mapping[str, str], directory: str = ".") -> int:
    """Become the program. If the program cannot be run, standard error says so."""
    try:
        os.makedirs(directory, exist_ok=True)
        os.chdir(directory)
        os.execvpe(words[0], words, environment)
    except OSError as error:
        os.write(2, f"{words[0]} cannot be run: {error.strerror}\n".encode())
    return CANNOT_RUN


def _run_shell(command: bytes) -> int:
    return _exec_program([confine.find_shell(), "-c", command.decode("utf-8", "replace")], os.environ)


def _memory_file(data: bytes) -> int:
    """Return a descriptor of a memory file with `data`, sealed against growing."""
    memory_fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    frames.write_all(memory_fd, data)
    fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.lseek(memory_fd, 0, os.SEEK_SET)
    return memory_fd
