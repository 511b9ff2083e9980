"""A filter of system calls for the code in a sandbox. It blocks memory that no limit counts, ways to gain
another user's rights and, when there is no network namespace, sockets.

A process may install a seccomp filter without any rights once it has set PR_SET_NO_NEW_PRIVS. Several filters
add up, and children inherit them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from asyncrl.isolation.sandbox.kernel import MACHINE, PR_SET_SECCOMP, prctl

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables below, AUDIT_ARCH
SOCKETS = {"socket": (41, 198)}
MEMFD = {"memfd_create": (319, 279)}
UNCOUNTED = {
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # these segments outlive their processes, as with the next two
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),  # keeps pages alive in a pipe after they were unmapped
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),  # has memory of its own, and makes system calls that no filter sees
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),  # in a new user namespace the code could mount file systems
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fspick": (433, 433),
}
CLONE, CLONE3, MMAP, SOCKETPAIR = (56, 220), (435, 435), (9, 222), (53, 199)
NEW_SPACES = 0x7E020000  # CLONE_NEW*
SHARED_NAMELESS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: unmapping a part does not free its pages
UNIX, STREAM, KIND = 1, 1, 0xF  # AF_UNIX; datagram pairs could send to any socket
INET, INET6 = 2, 10  # other families reach the kernel, or past a network namespace to the machine (AF_VSOCK)

MODE_FILTER = 2
LOAD, EQUAL, AT_LEAST, ANY_OF, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
FIRST, SECOND, FOURTH = 16, 24, 40  # offsets of the low halves of arguments
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # REFUSE | errno
EACCES, ENOSYS, EAFNOSUPPORT = 13, 38, 97
X32 = 0x40000000

BpfLine = tuple[int, int, int, int]  # code, lines to skip if true, lines to skip if false, operand
NO: BpfLine = (RETURN, 0, 0, REFUSE | EACCES)
YES: BpfLine = (RETURN, 0, 0, ALLOW)


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse(calls: Iterable[tuple[int, int]]) -> None:
    """Install a filter for this process and its children. It blocks `calls` (values of the tables above), and
    always: new namespaces by clone, shared anonymous memory, sockets but AF_UNIX and the internet's, socket
    pairs other than streams, and system calls by the numbers of another architecture. OSError; KeyError for
    an unknown architecture."""
    column, audit = MACHINES[MACHINE]
    lines: list[BpfLine] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), NO]
    lines += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), NO]
    for numbers in calls:
        lines += [(EQUAL, 0, 1, numbers[column]), NO]
    # clone3's flags lie in memory, which a filter cannot read; without clone3 libc takes clone
    lines += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    lines += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, FIRST), (ANY_OF, 0, 1, NEW_SPACES), NO, YES]
    families = [(LOAD, 0, 0, FIRST), (EQUAL, 3, 0, UNIX), (EQUAL, 2, 0, INET), (EQUAL, 1, 0, INET6)]
    lines += [(EQUAL, 0, 6, SOCKETS["socket"][column]), *families, (RETURN, 0, 0, REFUSE | EAFNOSUPPORT), YES]
    pair = [(LOAD, 0, 0, FIRST), (EQUAL, 0, 3, UNIX), (LOAD, 0, 0, SECOND), (AND, 0, 0, KIND)]
    lines += [(EQUAL, 0, 7, SOCKETPAIR[column]), *pair, (EQUAL, 1, 0, STREAM), NO, YES]
    shared = [(LOAD, 0, 0, FOURTH), (AND, 0, 0, SHARED_NAMELESS), (EQUAL, 0, 1, SHARED_NAMELESS)]
    lines += [(EQUAL, 0, 5, MMAP[column]), *shared, NO, YES, YES]
    packed = b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + k.to_bytes(4, "little") for code, yes, no, k in lines
    )
    program = _BpfProgram(len(lines), packed)
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program))
