"""The process between us and a program that we start: it ends the whole process tree of the program.

    we ──start──► wrapper ──fork, exec──► program ──► its children, also those in sessions of their own
    we ──signal─►    │   ──signal───────►
                     └──── SIGKILL to all of them, when the program has ended, on KILL, or when we are dead

    python -I -S wrapper.py PARENT GRACE FILES program arguments

PARENT is the pid of who starts it, FILES how many descriptors the program may have. SIGTERM, SIGINT and
SIGHUP are passed on to the program, and GRACE seconds later everything is killed (`inf`: never). The exit
code, or the signal, is the program's. Orphans become children of the wrapper (PR_SET_CHILD_SUBREAPER), so
none is missed.
It needs only the standard library.
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

KILL = signal.SIGUSR1  # ends the program and all of its descendants at once
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HANDLED = (*PASSED_ON, KILL, signal.SIGCHLD)
DEFAULT_IN_PROGRAM = (*HANDLED, signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores the last two
KILL_SECONDS = 5.0  # for everything to be gone; a process that hangs in the kernel is left to it
CANNOT_RUN = 127  # exit code when there is no such program
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None)


def main(parent: int, grace: float, files: int, program: list[str]) -> None:
    """Start the program, watch it and its parent, kill what is left, end as the program did."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    for number in HANDLED:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # the program may have stopped it
    try:
        alive = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(CANNOT_RUN)
    if os.getppid() != parent:  # the parent died before this check
        os._exit(CANNOT_RUN)
    own = os.getpid()
    if (pid := os.fork()) == 0:
        _run(program, own, mask)
    _close_pipes(keep={woken, wake, alive})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # even if they were blocked from the start
    _end(_kill_all(pid, _watch(pid, woken, alive, grace), woken))


def _run(program: list[str], parent: int, mask: set[int]) -> None:
    """Become the program, in the child: leader of a session of its own, killed should the wrapper be."""
    try:
        os.setsid()
        for number in DEFAULT_IN_PROGRAM:
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]} cannot be run: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_RUN)


def _close_pipes(keep: set[int]) -> None:
    """Close the program's pipes here, so that they end when the program closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep:
            with suppress(OSError):  # the listing's own
                os.close(fd)


def _watch(program: int, woken: int, alive: int, grace: float) -> int | None:
    """Wait until the program has ended (its wait status), or everything is to be killed (None)."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(alive, select.POLLIN)  # readable when the process is dead
    limit = math.inf
    while (left := limit - time.monotonic()) > 0:
        ready = dict(poll.poll(None if math.isinf(left) else left * 1000))
        if alive in ready:
            return None
        for number in os.read(woken, 64) if woken in ready else b"":
            if number == KILL:
                return None
            if number in PASSED_ON:
                os.kill(program, number)
                limit = min(limit, time.monotonic() + grace)
            elif (status := _reap(program)) is not None:
                return status
    return None


def _reap(program: int) -> int | None:
    """Reap all ended children; returns the program's wait status if it is one of them. ChildProcessError:
    there are no children."""
    status = None
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == program:
            status = ended[1]
            break
    return status


def _kill_all(program: int, status: int | None, woken: int) -> int:
    """SIGKILL to all descendants until there are none; the program's wait status."""
    limit = time.monotonic() + KILL_SECONDS
    while time.monotonic() < limit:
        try:
            found = _reap(program)
        except ChildProcessError:
            break
        status = found if status is None else status
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if select.select([woken], [], [], 0.01)[0]:
            os.read(woken, 64)
    return signal.SIGKILL if status is None else status


def kill(pid: int, last: bool = False) -> None:
    """Let a wrapper kill everything, also if the program has stopped it. `last`: without its help, where that
    has not ended it."""
    by_us = [(one, signal.SIGKILL) for one in (*descendants(pid), pid)] if last else []
    for one, number in by_us or [(pid, KILL), (pid, signal.SIGCONT)]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one, number)


def descendants(pid: int) -> list[int]:
    """Return pids of the children of a process, of their children, and so on."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            parent = int(stat.read().rpartition(b")")[2].split()[1])
            children[parent].append(int(name))
    found = [pid]
    for one in found:  # grows as it goes
        found += children[one]
    return found[1:]


def _end(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _libc.prctl(PR_SET_DUMPABLE, 0)  # only the program's core dump is useful
        with suppress(OSError):  # of SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
