"""Calls the kernel where Python does not: signals to all processes of a sandbox, namespaces, mounts, Landlock
and seccomp. The sandbox imports this, so it must load fast."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from asyncrl.isolation.wrapper import descendants

MACHINE = os.uname().machine
SIGKILL, SIGSTOP = 9, 19
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

STOP_SECONDS, STOP_LOOKS = 2.0, 10
SOCKET = 1 << 19  # bytes that it may hold: two buffers as below, and its options (optmem_max: 128 KiB)
BUFFER = 212_992  # bytes of a socket's buffer, unless the machine's administrator has set another default

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


def stop_all(alone: bool) -> bool:
    """Stop every process below this one. False if after STOP_SECONDS and STOP_LOOKS (the machine may stand
    still) one runs: they may continue each other. Between two looks in which each thread is still and has
    not run, none does, or can run again."""
    looks, until = 0, time.monotonic() + STOP_SECONDS
    while looks < STOP_LOOKS or time.monotonic() < until:
        looks += 1
        signal_all(SIGSTOP, alone)
        found = _threads()
        if all(map(_is_still, found.values())) and found == _threads():
            return True
        time.sleep(0.001)
    return False


def _threads() -> dict[str, bytes]:
    """Read the status of each thread below this process, which counts how often it ran."""
    return {task: text for pid in descendants(os.getpid()) for task, text in _statuses(f"{pid}")}


def _is_still(status: bytes) -> bool:
    """True for a thread that has stopped or ended, or sleeps in the kernel and will stop when it wakes."""
    state, pending = (status.partition(b"\n%s:\t" % name)[2].split()[0] for name in (b"State", b"ShdPnd"))
    return state in b"TtZX" or (state == b"D" and int(pending, 16) >> SIGSTOP - 1 & 1 == 1)


def kill(pid: int, number: int) -> None:
    """Signal a process, or as `os.kill` has it a group (negative) or all (-1), if it is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def resident() -> int:
    """Measure the bytes of memory of every process in /proc: what is in no file, swapped or not, and page
    tables; and count SOCKET for each socket of the network namespace. Pages that two processes share after a
    fork count twice."""
    with open("/proc/net/sockstat", "rb") as file:
        sockets = int(file.readline().split()[2])
    processes = filter(str.isdigit, os.listdir("/proc"))
    return sockets * SOCKET + sum(map(_held, processes))


def _held(pid: str) -> int:
    """Measure one process. Its first thread may have ended before the others; then it shows nothing."""
    for _, status in _statuses(pid):
        found = [line for line in status.splitlines() if line.startswith((b"RssAnon", b"VmPTE", b"VmSwap"))]
        if found:
            return sum(int(line.split()[1]) for line in found) << 10
    return 0


def _statuses(pid: str) -> Iterator[tuple[str, bytes]]:
    """Read what /proc has on each thread of a process."""
    with suppress(OSError):  # it ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/status", "rb") as file:
                yield task, file.read()


# -- namespaces and mounts -----------------------------------------------------------------------------------

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_SAFE, MS_TERMINALS = 2 | 4, 2 | 8  # nosuid, and nodev or noexec
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
READ_ONLY, ID_MAP = 1, 1 << 20  # of mount_setattr
SAFE_READ_ONLY = READ_ONLY | 2 | 4  # nosuid and nodev, too
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_EMPTY_PATH = 1, 4


def unshare(flags: int) -> None:
    check(libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    check(libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data)), f"mount at {target}")


def copy_mount(path: str) -> int:
    """Return a descriptor of a mount of its own of the tree at `path`, which is mounted nowhere yet."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE
    return syscall(f"open_tree of {path}", SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def place_mount(tree: int, path: str) -> None:
    """Mount what `copy_mount` returned at `path`, and close it."""
    flags = MOVE_MOUNT_EMPTY_PATH
    syscall(f"move_mount to {path}", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(path), flags)
    os.close(tree)


def set_attributes(tree: int, path: str, attributes: int, users: int = 0) -> None:
    """Change a mount and all below it: the one at `path` (`tree`: AT_FDCWD), or `tree` (`path` is "").
    `users`: for ID_MAP, the user namespace that maps its ids."""
    given = (ctypes.c_uint64 * 4)(attributes, 0, 0, users)
    flags = AT_RECURSIVE | AT_EMPTY_PATH
    syscall("mount_setattr", SYS_MOUNT_SETATTR, tree, os.fsencode(path), flags, given, ctypes.sizeof(given))


def enter_root(root: str) -> None:
    """Make the mount at `root` the root of this mount namespace. The old root is gone."""
    os.chdir(root)
    syscall("pivot_root", SYS_PIVOT_ROOT[MACHINE], b".", b".")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


# -- Landlock: which files may be opened and which processes signalled, where namespaces are forbidden, as in
# -- most containers. Needs PR_SET_NO_NEW_PRIVS and Linux 5.13; 6.2 to block truncation, 6.12 for signals.

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_QUERY, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # first version: rights
FILES_SINCE = 3  # older versions cannot block truncation
SCOPES_SINCE, SCOPES = 6, 3  # abstract sockets and signals stay inside


RULESET, BENEATH = struct.Struct("=QQQ"), struct.Struct("=Qi")  # files, net, scoped; allowed, parent


def landlock_version() -> int:
    """0 when the kernel lacks Landlock or forbids it."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, 0, VERSION_QUERY)))


def landlock_ruleset(read: Iterable[str], write: Iterable[str]) -> int:
    """Return a descriptor for `restrict_files`: what is below `read` may be read and run, below `write` all
    is allowed."""
    version = landlock_version()
    rights = max((number for since, number in RIGHTS.items() if since <= version), default=0)
    scoped = SCOPES if version >= SCOPES_SINCE else 0
    given = RULESET.pack(rights, 0, scoped)
    fd = syscall("landlock_create_ruleset", CREATE_RULESET, given, RULESET.size if scoped else 8, 0)
    for paths, allowed in ((read, EXECUTE | READ_FILE | READ_DIR), (write, rights)):
        for path in paths:
            _allow(fd, path, allowed & rights)
    return fd


def restrict_files(fd: int) -> None:
    """Apply a ruleset to this process and its children. Needs PR_SET_NO_NEW_PRIVS."""
    syscall("landlock_restrict_self", RESTRICT_SELF, fd, 0)


def _allow(fd: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = rights if os.path.isdir(path) else rights & OF_FILES
        syscall("landlock_add_rule", ADD_RULE, fd, PATH_BENEATH, BENEATH.pack(allowed, parent), 0)
    finally:
        os.close(parent)


# -- seccomp: a filter of system calls. It blocks memory that no limit counts, ways to gain another user's
# -- rights and, when there is no network namespace, sockets. A process may install it without any rights once
# -- it has set PR_SET_NO_NEW_PRIVS. Several filters add up, and children inherit them.

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
OF_OTHERS = ((302, 261), (144, 119), (142, 118), (314, 274))  # prlimit64, sched_setscheduler, -param, -attr
SET_PRIORITY = (141, 140)
SETSOCKOPT, SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = (54, 208), 1, 7, 8
NEW_SPACES = 0x7E020000  # CLONE_NEW*
TIMER_CREATE, FCNTL, SET_SIGNAL = (222, 107), (72, 25), 10  # by these the kernel sends any signal
SHARED_NAMELESS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: unmapping a part does not free its pages
UNIX, STREAM, KIND = 1, 1, 0xF  # AF_UNIX; datagram pairs could send to any socket
INET, INET6 = 2, 10  # other families reach the kernel, or past a network namespace to the machine (AF_VSOCK)

MODE_FILTER = 2
LOAD, EQUAL, AT_LEAST, ANY_OF, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
FIRST, SECOND, THIRD, FOURTH = 16, 24, 32, 40  # offsets of the low halves of arguments
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # REFUSE | errno
EACCES, ENOSYS, EAFNOSUPPORT = 13, 38, 97
X32 = 0x40000000

BpfLine = tuple[int, int, int, int]  # code, lines to skip if true, lines to skip if false, operand
NO: BpfLine = (RETURN, 0, 0, REFUSE | EACCES)
YES: BpfLine = (RETURN, 0, 0, ALLOW)


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_calls(calls: Iterable[tuple[int, int]]) -> None:
    """Install a filter for this process and its children. It blocks `calls` (values of the tables above), and
    always: limits and priorities of other processes, as the warden is one, new namespaces by clone, shared
    anonymous memory, sockets but AF_UNIX and the internet's, socket pairs other than streams, timers and
    files that send any signal, as SIGCONT would continue a stopped process, and system calls by numbers of
    another architecture. To change the size of a socket's buffers has no effect. OSError; KeyError for an
    unknown architecture."""
    column, audit = MACHINES[MACHINE]
    lines: list[BpfLine] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), NO]
    lines += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), NO]
    for numbers in calls:
        lines += [(EQUAL, 0, 1, numbers[column]), NO]
    # clone3's flags lie in memory, which a filter cannot read; without clone3 libc takes clone
    for numbers in (CLONE3, TIMER_CREATE):  # and programs take alarm for timers
        lines += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    for numbers in OF_OTHERS:
        lines += [(EQUAL, 0, 4, numbers[column]), (LOAD, 0, 0, FIRST), (EQUAL, 1, 0, 0), NO, YES]
    mine = [(LOAD, 0, 0, FIRST), (EQUAL, 0, 2, 0), (LOAD, 0, 0, SECOND), (EQUAL, 1, 0, 0), NO, YES]
    lines += [(EQUAL, 0, 6, SET_PRIORITY[column]), *mine]
    lines += [(EQUAL, 0, 4, FCNTL[column]), (LOAD, 0, 0, SECOND), (EQUAL, 0, 1, SET_SIGNAL), NO, YES]
    lines += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, FIRST), (ANY_OF, 0, 1, NEW_SPACES), NO, YES]
    families = [(LOAD, 0, 0, FIRST), (EQUAL, 3, 0, UNIX), (EQUAL, 2, 0, INET), (EQUAL, 1, 0, INET6)]
    lines += [(EQUAL, 0, 6, SOCKETS["socket"][column]), *families, (RETURN, 0, 0, REFUSE | EAFNOSUPPORT), YES]
    pair = [(LOAD, 0, 0, FIRST), (EQUAL, 0, 3, UNIX), (LOAD, 0, 0, SECOND), (AND, 0, 0, KIND)]
    lines += [(EQUAL, 0, 7, SOCKETPAIR[column]), *pair, (EQUAL, 1, 0, STREAM), NO, YES]
    size = [(LOAD, 0, 0, SECOND), (EQUAL, 0, 4, SOL_SOCKET), (LOAD, 0, 0, THIRD), (EQUAL, 1, 0, SO_SNDBUF)]
    # without an errno: the kernel cuts sizes silently, too
    size += [(EQUAL, 0, 1, SO_RCVBUF), (RETURN, 0, 0, REFUSE), YES]
    lines += [(EQUAL, 0, 7, SETSOCKOPT[column]), *size]
    shared = [(LOAD, 0, 0, FOURTH), (AND, 0, 0, SHARED_NAMELESS), (EQUAL, 0, 1, SHARED_NAMELESS)]
    lines += [(EQUAL, 0, 5, MMAP[column]), *shared, NO, YES, YES]
    program = _BpfProgram(len(lines), b"".join(struct.pack("=HBBI", *line) for line in lines))
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program))
