"""Calls libc where Python does not, and signals all processes of a sandbox, with or without a namespace.
The sandbox imports this, so it must load fast."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from asyncrl.isolation.wrapper import descendants

MACHINE = os.uname().machine
SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """The result of a call; OSError with its errno where it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """A system call by its number. OSError names it `what`."""
    return check(int(libc.syscall(number, *arguments)), what)


def prctl(option: int, value: object, argument: object = 0) -> None:
    check(libc.prctl(option, value, argument, 0, 0), f"prctl({option})")


def end_all(alone: bool) -> dict[int, int]:
    """Kill every process below this one and wait until none is left: their exit statuses by process id.

    `alone`: kill(-1) reaches no processes but these. Orphans must be adopted by this process: it is the
    first process of its namespace, or a subreaper.
    """
    ended: dict[int, int] = {}
    while True:
        signal_all(SIGKILL, alone)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def signal_all(number: int, alone: bool) -> None:
    """Signal every process below this one."""
    for pid in (-1,) if alone else descendants(os.getpid()):
        kill(pid, number)


def kill(pid: int, number: int) -> None:
    """Signal a process, or as `os.kill` has it a group (negative) or all (-1), if it is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
