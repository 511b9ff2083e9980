"""Calls the kernel where Python does not: signals to all processes of a sandbox, namespaces, mounts and
Landlock. The sandbox imports this, so it must load fast."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

from asyncrl.isolation.sandbox.memory import thread_statuses
from asyncrl.isolation.wrapper import descendants

MACHINE = os.uname().machine
SIGKILL = 9
SIGSTOP = 19
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

STOP_SECONDS = 2.0
STOP_LOOKS = 10

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
    looks = 0
    until = time.monotonic() + STOP_SECONDS
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
    return {task: text for pid in descendants(os.getpid()) for task, text in thread_statuses(f"{pid}")}


def _is_still(status: bytes) -> bool:
    """True for a thread that has stopped or ended, or sleeps in the kernel and will stop when it wakes."""
    state, pending = (status.partition(b"\n%s:\t" % name)[2].split()[0] for name in (b"State", b"ShdPnd"))
    return state in b"TtZX" or (state == b"D" and int(pending, 16) >> SIGSTOP - 1 & 1 == 1)


def kill(pid: int, number: int) -> None:
    """Signal a process, or as `os.kill` has it a group (negative) or all (-1), if it is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def go_first_without_memory() -> None:
    """Let the kernel end this process and its children before all others when the machine has no memory
    left. Where root sets this, a process without root's rights cannot lower it again."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


# -- directories

SYS_OPENAT2 = 437
PATH_MAX = 4096
# RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH
NO_LINKS = 0x04
BENEATH_ONLY = 0x08
OPEN_HOW = struct.Struct("=QQQ")  # flags, mode, how to resolve


def open_beneath(top: int, path: str) -> int:
    """Open a directory below `top` in one call, however deep it lies. OSError, also for a path of PATH_MAX
    bytes or more; NotADirectoryError where the path leads through a link."""
    how = OPEN_HOW.pack(os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, NO_LINKS | BENEATH_ONLY)
    try:
        return syscall(path, SYS_OPENAT2, top, os.fsencode(path), how, OPEN_HOW.size)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
        raise


# -- namespaces and mounts -----------------------------------------------------------------------------------

NEWNS = 1 << 17
NEWUTS = 1 << 26
NEWIPC = 1 << 27
NEWUSER = 1 << 28
NEWPID = 1 << 29
NEWNET = 1 << 30
# nosuid, and nodev or noexec
MS_SAFE = 2 | 4
MS_TERMINALS = 2 | 8
MS_BIND = 1 << 12
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
# of mount_setattr
READ_ONLY = 1
ID_MAP = 1 << 20
SAFE_READ_ONLY = READ_ONLY | 2 | 4  # nosuid and nodev, too
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_OPEN_TREE = 428
SYS_MOVE_MOUNT = 429
SYS_MOUNT_SETATTR = 442
OPEN_TREE_CLONE = 1
MOVE_MOUNT_EMPTY_PATH = 4


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

CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
VERSION_QUERY = 1
PATH_BENEATH = 1
EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_DIR = 8
TRUNCATE = 1 << 14
IOCTL = 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # first version: rights
FILES_SINCE = 3  # older versions cannot block truncation
# abstract sockets and signals stay inside
SCOPES_SINCE = 6
SCOPES = 3


# files, net, scoped; allowed, parent
RULESET = struct.Struct("=QQQ")
BENEATH = struct.Struct("=Qi")


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
