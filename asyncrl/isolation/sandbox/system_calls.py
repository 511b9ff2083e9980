"""The filter of system calls (seccomp) of a sandbox.

The filter blocks memory that no limit counts, resources of which the machine has one supply for all, ways to
gain another user's rights and, without a network namespace, sockets. A process may install a filter without
any rights after setting PR_SET_NO_NEW_PRIVS. Several filters add up, and children inherit filters."""

from __future__ import annotations

import ctypes
import errno
import struct

from asyncrl.isolation.sandbox.kernel import MACHINE, PR_SET_DUMPABLE, PR_SET_SECCOMP, prctl

# By machine: the column in the tables below, and AUDIT_ARCH.
MACHINE_COLUMNS = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}
Numbers = tuple[int, int]  # numbers of a system call, by column

FORBIDDEN_CALLS: dict[str, Numbers] = {
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # segments of these three calls outlive their processes
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),  # keeps pages alive in a pipe after unmapping
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),  # has uncounted memory, and makes system calls that no filter sees
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),  # the code could mount file systems in a new user namespace
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "open_tree_attr": (467, 467),
}
"""System calls that are refused with EACCES, and their numbers."""

ABSENT_CALLS: dict[str, Numbers] = {
    "clone3": (435, 435),  # its flags lie in memory, which a filter cannot read; libc then uses clone
    "timer_create": (222, 107),  # sends any signal; programs then use alarm
    "io_setup": (206, 0),  # the machine has 65,536 contexts for all
    "fanotify_init": (300, 262),
    "mbind": (237, 235),  # the kernel keeps memory policies of files without counting
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "landlock_create_ruleset": (444, 444),  # a ruleset may have any number of rules
    "landlock_add_rule": (445, 445),
}
"""System calls that fail as if this kernel lacked them; programs then work without these calls."""

PIPE_CALLS: dict[str, Numbers] = {
    "splice": (275, 76),  # a byte in a pipe keeps the page of a file alive
    "tee": (276, 77),
}
"""System calls that fail as if the file did not support them; programs then use read and write instead."""

ATTRIBUTE_CALLS: dict[str, Numbers] = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}
"""System calls that fail as if the file system had no extended attributes, because tmpfs does not count
access control lists."""

REFUSED_CALLS = (
    (FORBIDDEN_CALLS, errno.EACCES),
    (ABSENT_CALLS, errno.ENOSYS),
    (PIPE_CALLS, errno.EINVAL),
    (ATTRIBUTE_CALLS, errno.EOPNOTSUPP),
)

WARDEN_ONLY_CALLS: dict[str, Numbers] = {
    "memfd_create": (319, 279),
    "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),  # a process may hold megabytes of filters
}
"""System calls that are forbidden to the code, but not to the warden, which needs them to start the code."""

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
OTHER_PROCESS_CALLS: tuple[Numbers, ...] = (
    (144, 119),  # sched_setscheduler
    (142, 118),  # sched_setparam
    (314, 274),  # sched_setattr
)

NEW_SPACES = 0x7E020000  # CLONE_NEW*
# CLONE_THREAD, CLONE_FILES
SHARED_THREAD = 0x10000
SHARED_FILES = 0x400
CORE_LIMIT = 4  # RLIMIT_CORE
SHARED_NAMELESS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: unmapping a part does not free its pages
HUGE_PAGES = 0x40000  # MAP_HUGETLB: the machine has one pool of huge pages
SET_SIGNAL = 10  # F_SETSIG: makes the kernel send any signal
OPEN_FILE_LOCKS = 36, 37, 38  # F_OFD_GETLK, _SETLK, _SETLKW: /proc/locks does not name the process
FUTEX_HASH = 78  # PR_FUTEX_HASH: a table of any size
SOL_SOCKET = 1
SOL_IPV6 = 41
FLOW_LABELS = 32  # IPV6_FLOWLABEL_MGR: the machine has 4,096 for all
BUFFER_SIZES = 7, 8  # SO_SNDBUF, SO_RCVBUF
SOCKET_FILTERS = 26, 50, 51, 52  # SO_ATTACH_*: the machine has one supply of memory for compiled filters
# AF_UNIX, SOCK_STREAM and the mask of a socket's type; datagram pairs could send to any socket.
UNIX_FAMILY = 1
STREAM_TYPE = 1
TYPE_MASK = 0xF
# Other families reach the kernel, or past a network namespace to the machine (AF_VSOCK).
INET_FAMILY = 2
INET6_FAMILY = 10

MODE_FILTER = 2
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_OF = 0x45
BIT_AND = 0x54
RETURN = 0x06
# Offsets in struct seccomp_data.
NUMBER_OFFSET = 0
ARCHITECTURE_OFFSET = 4
# Offsets of the low halves of arguments.
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24
THIRD_ARGUMENT = 32
FOURTH_ARGUMENT = 40
FIRST_X32_NUMBER = 0x40000000

BpfLine = tuple[int, int, int, int]  # code, lines to skip if true, lines to skip if false, operand
ALLOW: BpfLine = (RETURN, 0, 0, 0x7FFF0000)


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_calls() -> None:
    """Install the filter of this process and its children. The filter refuses the calls of REFUSED_CALLS;
    limits and priorities of other processes (the warden, for instance); processes that share open files; new
    namespaces by clone; shared anonymous memory and huge pages; sockets except AF_UNIX and the internet's;
    socket pairs except streams; files that send any signal, as SIGCONT would continue a stopped process;
    locks of open files; filters of sockets and labels of flows; and system calls by numbers of another
    architecture. Changing the size of a socket's buffers or the limit of core files has no effect. OSError;
    KeyError: the architecture is unknown."""
    machine_column, _ = MACHINE_COLUMNS[MACHINE]
    rules: list[BpfLine] = []
    for calls, error_number in REFUSED_CALLS:
        for call_numbers in calls.values():
            rules += _when_called(call_numbers[machine_column], _refuse_call(error_number))

    for call_numbers in OTHER_PROCESS_CALLS:
        rules += _when_called(call_numbers[machine_column], *_refuse_unless(FIRST_ARGUMENT, 0), ALLOW)

    # gpg and ssh-agent exit if forbidding core files fails: the call succeeds without effect.
    # The third argument is a pointer to new limits.
    limit_change = [*_refuse_unless(THIRD_ARGUMENT, 0, 0), *_refuse_unless(THIRD_ARGUMENT + 4, 0, 0)]
    other_limit = [(LOAD, 0, 0, SECOND_ARGUMENT), (EQUAL, 0, len(limit_change), CORE_LIMIT)]
    rules += _when_called(
        PRLIMIT[machine_column], *_refuse_unless(FIRST_ARGUMENT, 0), *other_limit, *limit_change, ALLOW
    )
    rules += _when_called(SETRLIMIT[machine_column], *_refuse_if(FIRST_ARGUMENT, EQUAL, CORE_LIMIT, 0), ALLOW)

    for_itself = [*_refuse_unless(FIRST_ARGUMENT, 0), *_refuse_unless(SECOND_ARGUMENT, 0)]
    rules += _when_called(SET_PRIORITY[machine_column], *for_itself, ALLOW)

    file_locks = [
        line
        for command in OPEN_FILE_LOCKS
        for line in _refuse_if(SECOND_ARGUMENT, EQUAL, command, errno.EINVAL)
    ]
    rules += _when_called(
        FCNTL[machine_column], *_refuse_if(SECOND_ARGUMENT, EQUAL, SET_SIGNAL), *file_locks, ALLOW
    )

    # A process that shares open files leaves locks behind that belong to no process
    shares_files = [
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (BIT_AND, 0, 0, SHARED_THREAD | SHARED_FILES),
        (EQUAL, 0, 1, SHARED_FILES),
    ]
    new_namespaces = _refuse_if(FIRST_ARGUMENT, ANY_OF, NEW_SPACES)
    rules += _when_called(
        CLONE[machine_column], *new_namespaces, *shares_files, _refuse_call(errno.EINVAL), ALLOW
    )
    rules += _when_called(
        PRCTL[machine_column], *_refuse_if(FIRST_ARGUMENT, EQUAL, FUTEX_HASH, errno.EINVAL), ALLOW
    )

    shared_memory = [
        (LOAD, 0, 0, FOURTH_ARGUMENT),
        (BIT_AND, 0, 0, SHARED_NAMELESS),
        (EQUAL, 0, 1, SHARED_NAMELESS),
    ]
    huge_pages = _refuse_if(FOURTH_ARGUMENT, ANY_OF, HUGE_PAGES, errno.ENOMEM)
    rules += _when_called(MMAP[machine_column], *huge_pages, *shared_memory, _refuse_call(), ALLOW)

    _install_filter([*rules, *_socket_rules(machine_column)])


def _socket_rules(machine_column: int) -> list[BpfLine]:
    """Return the rules of socket, socketpair and setsockopt."""
    families = [(EQUAL, 3, 0, UNIX_FAMILY), (EQUAL, 2, 0, INET_FAMILY), (EQUAL, 1, 0, INET6_FAMILY)]
    other_family = _refuse_call(errno.EAFNOSUPPORT)
    rules = _when_called(SOCKET[machine_column], (LOAD, 0, 0, FIRST_ARGUMENT), *families, other_family, ALLOW)

    stream_pairs = [
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (BIT_AND, 0, 0, TYPE_MASK),
        (EQUAL, 1, 0, STREAM_TYPE),
        _refuse_call(),
    ]
    not_unix = [(LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 0, len(stream_pairs), UNIX_FAMILY)]
    rules += _when_called(SOCKETPAIR[machine_column], *not_unix, *stream_pairs, ALLOW)

    socket_options: list[BpfLine] = []
    for option in BUFFER_SIZES:
        # No error, as the kernel also reduces sizes silently
        socket_options += _refuse_if(THIRD_ARGUMENT, EQUAL, option, 0)

    for option in SOCKET_FILTERS:
        socket_options += _refuse_if(THIRD_ARGUMENT, EQUAL, option)

    socket_options.append(ALLOW)
    flow_labels = [(EQUAL, 0, 3, SOL_IPV6), *_refuse_if(THIRD_ARGUMENT, EQUAL, FLOW_LABELS)]
    socket_level = [(LOAD, 0, 0, SECOND_ARGUMENT), (EQUAL, 0, len(socket_options), SOL_SOCKET)]
    rules += _when_called(SETSOCKOPT[machine_column], *socket_level, *socket_options, *flow_labels, ALLOW)
    return rules


def filter_code() -> None:
    """Install the second filter, for the code's processes only, which start no filters or sandboxes, make no
    files without a name, and cannot forbid being inspected (trying has no effect)."""
    machine_column, _ = MACHINE_COLUMNS[MACHINE]
    rules: list[BpfLine] = []

    for call_numbers in WARDEN_ONLY_CALLS.values():
        rules += _when_called(call_numbers[machine_column], _refuse_call())

    no_filter = _refuse_if(FIRST_ARGUMENT, EQUAL, PR_SET_SECCOMP, errno.EINVAL)
    forbid_dumping = _refuse_if(SECOND_ARGUMENT, EQUAL, 0, 0)
    other_option = [(LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 0, len(forbid_dumping), PR_SET_DUMPABLE)]
    rules += _when_called(PRCTL[machine_column], *no_filter, *other_option, *forbid_dumping, ALLOW)
    _install_filter(rules)


def refuse_sockets() -> None:
    """Install a filter that refuses all sockets except pairs."""
    machine_column, _ = MACHINE_COLUMNS[MACHINE]
    _install_filter(_when_called(SOCKET[machine_column], _refuse_call()))


def _refuse_call(error_number: int = errno.EACCES) -> BpfLine:
    """Refuse a call. With error number 0 the call returns 0, without effect."""
    return (RETURN, 0, 0, 0x00050000 | error_number)


def _refuse_if(argument: int, comparison: int, value: int, error_number: int = errno.EACCES) -> list[BpfLine]:
    """Refuse a call if the comparison of an argument is true; the following lines judge other calls."""
    return [(LOAD, 0, 0, argument), (comparison, 0, 1, value), _refuse_call(error_number)]


def _refuse_unless(argument: int, value: int, error_number: int = errno.EACCES) -> list[BpfLine]:
    return [(LOAD, 0, 0, argument), (EQUAL, 1, 0, value), _refuse_call(error_number)]


def _when_called(call_number: int, *lines: BpfLine) -> list[BpfLine]:
    """Judge the calls of a number by `lines`, which must end with a verdict if a line loads an argument."""
    return [(EQUAL, 0, len(lines), call_number), *lines]


def _install_filter(rules: list[BpfLine]) -> None:
    _, audit_number = MACHINE_COLUMNS[MACHINE]
    same_machine = [(LOAD, 0, 0, ARCHITECTURE_OFFSET), (EQUAL, 1, 0, audit_number), _refuse_call()]
    same_numbers = [(LOAD, 0, 0, NUMBER_OFFSET), (AT_LEAST, 0, 1, FIRST_X32_NUMBER), _refuse_call()]

    lines = [*same_machine, *same_numbers, *rules, ALLOW]
    program = _BpfProgram(len(lines), b"".join(struct.pack("=HBBI", *line) for line in lines))
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program))
