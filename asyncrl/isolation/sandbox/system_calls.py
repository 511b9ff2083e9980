"""The filter of system calls (seccomp) of a sandbox.

It blocks memory that no limit counts, resources of which the machine has one supply for all, ways to gain
another user's rights and, when there is no network namespace, sockets. A process may install it without any
rights once it has set PR_SET_NO_NEW_PRIVS. Several filters add up, and children inherit them.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from asyncrl.isolation.sandbox.kernel import MACHINE, PR_SET_DUMPABLE, PR_SET_SECCOMP, prctl

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables below, AUDIT_ARCH
Numbers = tuple[int, int]  # of a system call, by column

FORBIDDEN: dict[str, Numbers] = {
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
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),  # in a new user namespace the code could mount file systems
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "open_tree_attr": (467, 467),
}
"""Refused with EACCES."""

ABSENT: dict[str, Numbers] = {
    "clone3": (435, 435),  # its flags lie in memory, which a filter cannot read; libc takes clone instead
    "timer_create": (222, 107),  # sends any signal; programs take alarm instead
    "io_setup": (206, 0),  # the machine has 65,536 contexts for all
    "fanotify_init": (300, 262),
    "mbind": (237, 235),  # policies of memory are kept for files, and nothing counts them
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "landlock_create_ruleset": (444, 444),  # a ruleset may have any number of rules
    "landlock_add_rule": (445, 445),
}
"""Refused as by a kernel that does not have them: programs then do without."""

PIPED: dict[str, Numbers] = {
    "splice": (275, 76),  # a byte of a page keeps the page, whatever becomes of its file
    "tee": (276, 77),
}
"""Refused as for files that cannot do it: programs then read and write."""

ATTRIBUTES: dict[str, Numbers] = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}
"""Refused as by a file system without attributes: tmpfs does not count its access control lists."""

REFUSED = (
    (FORBIDDEN, errno.EACCES),
    (ABSENT, errno.ENOSYS),
    (PIPED, errno.EINVAL),
    (ATTRIBUTES, errno.EOPNOTSUPP),
)

OF_WARDEN: dict[str, Numbers] = {
    "memfd_create": (319, 279),
    "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),  # a process may hold megabytes of filters
}
"""Refused to the code, not to the warden, who needs them to start it."""

SOCKET: Numbers = (41, 198)
SOCKETPAIR: Numbers = (53, 199)
SETSOCKOPT: Numbers = (54, 208)
CLONE: Numbers = (56, 220)
MMAP: Numbers = (9, 222)
FCNTL: Numbers = (72, 25)
PRCTL: Numbers = (157, 167)
SET_PRIORITY: Numbers = (141, 140)
SETRLIMIT: Numbers = (160, 164)
PRLIMIT: Numbers = (302, 261)
OF_OTHERS: tuple[Numbers, ...] = (
    (144, 119),  # sched_setscheduler
    (142, 118),  # sched_setparam
    (314, 274),  # sched_setattr
)

NEW_SPACES = 0x7E020000  # CLONE_NEW*
# CLONE_THREAD, CLONE_FILES
THREAD = 0x10000
OPEN_FILES = 0x400
CORE = 4  # RLIMIT_CORE
SHARED_NAMELESS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: unmapping a part does not free its pages
HUGE_PAGES = 0x40000  # MAP_HUGETLB: the machine has one pool of them
SET_SIGNAL = 10  # F_SETSIG: by it the kernel sends any signal
OPEN_FILE_LOCKS = 36, 37, 38  # F_OFD_GETLK, _SETLK, _SETLKW: /proc/locks does not tell whose they are
FUTEX_HASH = 78  # PR_FUTEX_HASH: a table of any size
SOL_SOCKET = 1
SOL_IPV6 = 41
FLOW_LABELS = 32  # IPV6_FLOWLABEL_MGR: the machine has 4,096 for all
BUFFER_SIZES = 7, 8  # SO_SNDBUF, SO_RCVBUF
SOCKET_FILTERS = 26, 50, 51, 52  # SO_ATTACH_*: the machine has one supply of memory for compiled filters
# AF_UNIX; datagram pairs could send to any socket
UNIX = 1
STREAM = 1
KIND = 0xF
# other families reach the kernel, or past a network namespace to the machine (AF_VSOCK)
INET = 2
INET6 = 10

MODE_FILTER = 2
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_OF = 0x45
AND = 0x54
RETURN = 0x06
# offsets in struct seccomp_data
NUMBER = 0
ARCHITECTURE = 4
# offsets of the low halves of arguments
FIRST = 16
SECOND = 24
THIRD = 32
FOURTH = 40
X32 = 0x40000000

BpfLine = tuple[int, int, int, int]  # code, lines to skip if true, lines to skip if false, operand
ALLOW: BpfLine = (RETURN, 0, 0, 0x7FFF0000)


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_calls() -> None:
    """Install the filter of this process and its children. It refuses what REFUSED names; limits and
    priorities of other processes, as the warden is one; processes that share open files; new namespaces by
    clone; shared anonymous memory and huge pages; sockets but AF_UNIX and the internet's; socket pairs other
    than streams; files that send any signal, as SIGCONT would continue a stopped process; locks of open
    files; filters of sockets and labels of flows; and system calls by numbers of another architecture. To
    change the size of a socket's buffers or the limit of core files has no effect. OSError; KeyError for an
    unknown architecture."""
    column, _ = MACHINES[MACHINE]
    rules: list[BpfLine] = []
    for calls, code in REFUSED:
        for numbers in calls.values():
            rules += _when_called(numbers[column], _refuse(code))

    for numbers in OF_OTHERS:
        rules += _when_called(numbers[column], *_refuse_unless(FIRST, 0), ALLOW)
    # gpg and ssh-agent end where they may not forbid core files: it has no effect
    change = [*_refuse_unless(THIRD, 0, 0), *_refuse_unless(THIRD + 4, 0, 0)]  # a pointer to new limits
    other_limit = [(LOAD, 0, 0, SECOND), (EQUAL, 0, len(change), CORE)]
    rules += _when_called(PRLIMIT[column], *_refuse_unless(FIRST, 0), *other_limit, *change, ALLOW)
    rules += _when_called(SETRLIMIT[column], *_refuse_if(FIRST, EQUAL, CORE, 0), ALLOW)
    of_itself = [*_refuse_unless(FIRST, 0), *_refuse_unless(SECOND, 0)]
    rules += _when_called(SET_PRIORITY[column], *of_itself, ALLOW)

    locks = [line for command in OPEN_FILE_LOCKS for line in _refuse_if(SECOND, EQUAL, command, errno.EINVAL)]
    rules += _when_called(FCNTL[column], *_refuse_if(SECOND, EQUAL, SET_SIGNAL), *locks, ALLOW)
    # a process that shares open files leaves its locks when it ends, and they are nobody's then
    sharing = [(LOAD, 0, 0, FIRST), (AND, 0, 0, THREAD | OPEN_FILES), (EQUAL, 0, 1, OPEN_FILES)]
    spaces = _refuse_if(FIRST, ANY_OF, NEW_SPACES)
    rules += _when_called(CLONE[column], *spaces, *sharing, _refuse(errno.EINVAL), ALLOW)
    rules += _when_called(PRCTL[column], *_refuse_if(FIRST, EQUAL, FUTEX_HASH, errno.EINVAL), ALLOW)

    shared = [(LOAD, 0, 0, FOURTH), (AND, 0, 0, SHARED_NAMELESS), (EQUAL, 0, 1, SHARED_NAMELESS)]
    huge = _refuse_if(FOURTH, ANY_OF, HUGE_PAGES, errno.ENOMEM)
    rules += _when_called(MMAP[column], *huge, *shared, _refuse(), ALLOW)

    families = [(EQUAL, 3, 0, UNIX), (EQUAL, 2, 0, INET), (EQUAL, 1, 0, INET6)]
    other_family = _refuse(errno.EAFNOSUPPORT)
    rules += _when_called(SOCKET[column], (LOAD, 0, 0, FIRST), *families, other_family, ALLOW)
    stream = [(LOAD, 0, 0, SECOND), (AND, 0, 0, KIND), (EQUAL, 1, 0, STREAM), _refuse()]
    not_unix = [(LOAD, 0, 0, FIRST), (EQUAL, 0, len(stream), UNIX)]
    rules += _when_called(SOCKETPAIR[column], *not_unix, *stream, ALLOW)

    options: list[BpfLine] = []
    for option in BUFFER_SIZES:
        options += _refuse_if(THIRD, EQUAL, option, 0)  # no error, as the kernel cuts sizes silently, too
    for option in SOCKET_FILTERS:
        options += _refuse_if(THIRD, EQUAL, option)
    options.append(ALLOW)
    labels = [(EQUAL, 0, 3, SOL_IPV6), *_refuse_if(THIRD, EQUAL, FLOW_LABELS)]
    level = [(LOAD, 0, 0, SECOND), (EQUAL, 0, len(options), SOL_SOCKET)]
    rules += _when_called(SETSOCKOPT[column], *level, *options, *labels, ALLOW)
    _install(rules)


def filter_code() -> None:
    """Install the second filter, of the code's processes alone: they start no filters or sandboxes, make no
    files without a name, and cannot forbid to be looked at (to try that has no effect)."""
    column, _ = MACHINES[MACHINE]
    rules: list[BpfLine] = []
    for numbers in OF_WARDEN.values():
        rules += _when_called(numbers[column], _refuse())
    no_filter = _refuse_if(FIRST, EQUAL, PR_SET_SECCOMP, errno.EINVAL)
    look = _refuse_if(SECOND, EQUAL, 0, 0)
    other_option = [(LOAD, 0, 0, FIRST), (EQUAL, 0, len(look), PR_SET_DUMPABLE)]
    rules += _when_called(PRCTL[column], *no_filter, *other_option, *look, ALLOW)
    _install(rules)


def refuse_sockets() -> None:
    """Install a filter that refuses all sockets but pairs."""
    column, _ = MACHINES[MACHINE]
    _install(_when_called(SOCKET[column], _refuse()))


def _refuse(code: int = errno.EACCES) -> BpfLine:
    """Refuse a call. With 0 it returns 0, and has no effect."""
    return (RETURN, 0, 0, 0x00050000 | code)


def _refuse_if(argument: int, comparison: int, value: int, code: int = errno.EACCES) -> list[BpfLine]:
    """Refuse a call of which an argument compares; the lines that follow judge the others."""
    return [(LOAD, 0, 0, argument), (comparison, 0, 1, value), _refuse(code)]


def _refuse_unless(argument: int, value: int, code: int = errno.EACCES) -> list[BpfLine]:
    return [(LOAD, 0, 0, argument), (EQUAL, 1, 0, value), _refuse(code)]


def _when_called(number: int, *lines: BpfLine) -> list[BpfLine]:
    """Judge the calls of a number by `lines`, which end with a verdict if they load an argument."""
    return [(EQUAL, 0, len(lines), number), *lines]


def _install(rules: list[BpfLine]) -> None:
    _, audit = MACHINES[MACHINE]
    same_machine = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), _refuse()]
    same_numbers = [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), _refuse()]
    lines = [*same_machine, *same_numbers, *rules, ALLOW]
    program = _BpfProgram(len(lines), b"".join(struct.pack("=HBBI", *line) for line in lines))
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program))
