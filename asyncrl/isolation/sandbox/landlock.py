"""Landlock: limits which files may be opened and which processes may be signalled. Used where namespaces are
forbidden, as in most containers.

Any process may use it after PR_SET_NO_NEW_PRIVS. Needs Linux 5.13; 6.2 to block truncation, 6.12 for signals.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from asyncrl.isolation.sandbox.kernel import libc, syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_QUERY, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # first version: rights
FILES_SINCE = 3  # older versions cannot block truncation
SCOPES_SINCE, SCOPES = 6, 3  # abstract sockets and signals stay inside


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """0 when the kernel lacks Landlock or forbids it."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, 0, VERSION_QUERY)))


def ruleset(read: Iterable[str], write: Iterable[str]) -> int:
    """A descriptor for `restrict`: what is below `read` may be read and run, below `write` all is allowed."""
    version = landlock_version()
    rights = max((number for since, number in RIGHTS.items() if since <= version), default=0)
    scoped = SCOPES if version >= SCOPES_SINCE else 0
    given = ctypes.byref(_Ruleset(rights, 0, scoped))
    fd = syscall("landlock_create_ruleset", CREATE_RULESET, given, 24 if scoped else 8, 0)
    for paths, allowed in ((read, EXECUTE | READ_FILE | READ_DIR), (write, rights)):
        for path in paths:
            _allow(fd, path, allowed & rights)
    return fd


def restrict(fd: int) -> None:
    """Apply a ruleset to this process and its children. Needs PR_SET_NO_NEW_PRIVS."""
    syscall("landlock_restrict_self", RESTRICT_SELF, fd, 0)


def _allow(fd: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = rights if os.path.isdir(path) else rights & OF_FILES
        rule = ctypes.byref(_Beneath(allowed, parent))
        syscall("landlock_add_rule", ADD_RULE, fd, PATH_BENEATH, rule, 0)
    finally:
        os.close(parent)
