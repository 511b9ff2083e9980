"""System calls that a sandbox refuses its code, by seccomp: ways to memory that no limit counts, to another
user's rights, and where there is no network namespace to sockets.

It needs no right but to give up gaining any (PR_SET_NO_NEW_PRIVS). Filters add up, and are inherited.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

libc = ctypes.CDLL(None, use_errno=True)

NUMBERS = {  # on x86_64, on aarch64
    "socket": (41, 198),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # outlives its processes, as the next two
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),  # a pipe that holds pages after they were unmapped
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),  # memory of its own, and calls that no filter sees
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),  # a user namespace has all rights in its own, and mounts what it likes
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fspick": (433, 433),
}
SOCKETS = ("socket",)
MEMFD = ("memfd_create",)
UNCOUNTED = tuple(name for name in NUMBERS if name not in SOCKETS + MEMFD)

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit's number
CLONE, CLONE3, MMAP, SOCKETPAIR = (56, 220), (435, 435), (9, 222), (53, 199)
NEW_SPACES = 0x7E020000  # CLONE_NEW*
SHARED_NAMELESS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: what is left of a cut mapping keeps all its pages

UNIX, STREAM, KIND = 1, 1, 0xF  # one of a pair of datagram sockets can send to any other

PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_OF, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, MACHINE = 0, 4  # where they lie
FIRST, SECOND, FOURTH = 16, 24, 40  # the low halves of arguments
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # REFUSE | errno
EACCES, ENOSYS = 13, 38
X32 = 0x40000000

Line = tuple[int, int, int, int]  # code, lines to skip if true, if not, operand
NO: Line = (RETURN, 0, 0, REFUSE | EACCES)
YES: Line = (RETURN, 0, 0, ALLOW)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(names: Iterable[str]) -> None:
    """From now on, and for all children, beside `names`: namespaces by clone, shared memory without a name,
    pairs of sockets but streams, and calls by another machine's numbers. OSError, or KeyError for a
    machine that is not known."""
    column, audit = MACHINES[os.uname().machine]
    lines: list[Line] = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, audit), NO]
    lines += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), NO]
    for name in names:
        lines += [(EQUAL, 0, 1, NUMBERS[name][column]), NO]
    # its flags lie in memory that a filter cannot read; told that there is none, libc takes clone
    lines += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    lines += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, FIRST), (ANY_OF, 0, 1, NEW_SPACES), NO, YES]
    pair = [(LOAD, 0, 0, FIRST), (EQUAL, 0, 3, UNIX), (LOAD, 0, 0, SECOND), (AND, 0, 0, KIND)]
    lines += [(EQUAL, 0, 7, SOCKETPAIR[column]), *pair, (EQUAL, 1, 0, STREAM), NO, YES]
    shared = [(LOAD, 0, 0, FOURTH), (AND, 0, 0, SHARED_NAMELESS), (EQUAL, 0, 1, SHARED_NAMELESS)]
    lines += [(EQUAL, 0, 5, MMAP[column]), *shared, NO, YES, YES]
    _install(lines)


def _install(lines: list[Line]) -> None:
    packed = b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + k.to_bytes(4, "little") for code, yes, no, k in lines
    )
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(lines), ctypes.cast(buffer, ctypes.c_void_p))
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
