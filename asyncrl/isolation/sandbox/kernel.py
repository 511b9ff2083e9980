"""Calls of libc that Python does not offer. The sandbox imports this, so it must load fast."""

from __future__ import annotations

import ctypes
import os

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
