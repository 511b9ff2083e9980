"""The process between us and a program that we start: ends the entire process tree of the program.

    we ──start──► wrapper ──fork, exec──► program ──► its children, also those in sessions of their own
    we ──signal─►    │   ──signal───────►
                     └──── SIGKILL to all of them: the program has ended, KILL_SIGNAL came, or we are dead

    python -I -S wrapper.py PARENT GRACE FILES program arguments

PARENT is the pid of the starting process, FILES the number of descriptors that the program may have. SIGTERM,
SIGINT and SIGHUP are passed on to the program, and GRACE seconds later everything is killed (`inf`: never).
The wrapper ends with the program's exit code or signal. Orphans become children of the wrapper
(PR_SET_CHILD_SUBREAPER), so that none is missed. The wrapper needs only the standard library.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import select
import signal
import sys
import time
from collections import defaultdict
from contextlib import suppress

KILL_SIGNAL = signal.SIGUSR1  # ends the program and all of its descendants at once
PASSED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HANDLED_SIGNALS = (*PASSED_SIGNALS, KILL_SIGNAL, signal.SIGCHLD)
DEFAULT_IN_PROGRAM = (*HANDLED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores the last two
KILL_SECONDS = 5.0  # after so long the wrapper ends, and leaves a process that hangs in the kernel
CANNOT_RUN = 127  # exit code when there is no such program
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None)


def main(parent_pid: int, grace_seconds: float, file_limit: int, program: list[str]) -> None:
    """Start the program, watch the program and our parent, kill remaining processes, end as the program
    did."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(file_limit, hard_limit), hard_limit))

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)

    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    for signal_number in HANDLED_SIGNALS:
        signal.signal(signal_number, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # the program may have stopped the wrapper

    try:
        parent_fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(CANNOT_RUN)
    if os.getppid() != parent_pid:  # the parent died before this check
        os._exit(CANNOT_RUN)

    wrapper_pid = os.getpid()
    if (program_pid := os.fork()) == 0:
        _become_program(program, wrapper_pid, signal_mask)

    _close_pipes(kept_fds={wake_read, wake_write, parent_fd})
    # The signals may have been blocked from the start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    _end_as_program(
        _kill_all(program_pid, _watch_program(program_pid, wake_read, parent_fd, grace_seconds), wake_read)
    )


def _become_program(program: list[str], wrapper_pid: int, signal_mask: set[int]) -> None:
    """Become the program, in the child: leader of a new session, killed if the wrapper is killed."""
    try:
        os.setsid()
        for signal_number in DEFAULT_IN_PROGRAM:
            signal.signal(signal_number, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == wrapper_pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
            os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]} cannot be run: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_RUN)


def _close_pipes(kept_fds: set[int]) -> None:
    """Close the program's pipes here, so that they end when the program closes them."""
    null_fd = os.open(os.devnull, os.O_RDWR)
    for standard_fd in range(3):
        os.dup2(null_fd, standard_fd)

    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept_fds:
            with suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(fd)


def _watch_program(program_pid: int, wake_read: int, parent_fd: int, grace_seconds: float) -> int | None:
    """Wait until the program has ended: its wait status; None if everything is to be killed."""
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(parent_fd, select.POLLIN)  # readable when the process is dead
    deadline = math.inf

    while (remaining := deadline - time.monotonic()) > 0:
        ready_fds = dict(poll.poll(None if math.isinf(remaining) else remaining * 1000))
        if parent_fd in ready_fds:
            return None

        for signal_number in os.read(wake_read, 64) if wake_read in ready_fds else b"":
            if signal_number == KILL_SIGNAL:
                return None
            if signal_number in PASSED_SIGNALS:
                os.kill(program_pid, signal_number)
                deadline = min(deadline, time.monotonic() + grace_seconds)
            elif (status := _reap_children(program_pid)) is not None:
                return status
    return None


def _reap_children(program_pid: int) -> int | None:
    """Reap ended children, up to the program, and return its wait status; None: the program has not ended.
    ChildProcessError: there are no children."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program_pid:
            return status
        if pid == 0:  # no further child has ended
            return None


def _kill_all(program_pid: int, status: int | None, wake_read: int) -> int:
    """Send SIGKILL to all descendants until none is left; return the program's wait status."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        try:
            reaped_status = _reap_children(program_pid)
        except ChildProcessError:
            break

        status = reaped_status if status is None else status
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

        if select.select([wake_read], [], [], 0.01)[0]:
            os.read(wake_read, 64)
    return signal.SIGKILL if status is None else status


def kill(pid: int, without_wrapper: bool = False) -> None:
    """Let the wrapper of this pid kill everything, also if the program has stopped the wrapper.
    `without_wrapper`: kill all descendants and the wrapper directly, as the wrapper has not ended in time."""
    sent_signals = [(pid, KILL_SIGNAL), (pid, signal.SIGCONT)]
    if without_wrapper:
        sent_signals = [(target_pid, signal.SIGKILL) for target_pid in (*descendants(pid), pid)]

    for target_pid, signal_number in sent_signals:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(target_pid, signal_number)


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            parent_pid = int(stat.read().rpartition(b")")[2].split()[1])
            children[parent_pid].append(int(name))

    family_pids = [pid]
    for ancestor in family_pids:  # grows during the loop
        family_pids += children[ancestor]
    return family_pids[1:]


def _end_as_program(status: int) -> None:
    if os.WIFSIGNALED(status):
        signal_number = os.WTERMSIG(status)
        _libc.prctl(PR_SET_DUMPABLE, 0)  # only the program's core dump is useful
        with suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
