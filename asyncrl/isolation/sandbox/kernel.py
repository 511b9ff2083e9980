"""Calls the kernel for functions that Python lacks: signals to all processes of a sandbox, namespaces,
mounts and Landlock. The sandbox imports this module, which must load fast."""

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


def raise_errno(result: int, call_name: str) -> int:
    """Return the result of a call; raise OSError with the call's errno if the result is negative."""
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), call_name)
    return result


def syscall(call_name: str, call_number: int, *arguments: object) -> int:
    """Make a system call by its number. `call_name`: the call's name in an OSError."""
    return raise_errno(int(libc.syscall(call_number, *arguments)), call_name)


def prctl(option: int, value: object, argument: object = 0) -> None:
    raise_errno(libc.prctl(option, value, argument, 0, 0), f"prctl({option})")


def end_all(signals_are_contained: bool) -> dict[int, int]:
    """Kill every process below this process and wait until none is left; return exit statuses by process id.

    `signals_are_contained`: kill(-1) reaches no other processes. Orphans must be adopted by this process,
    which must be the first process of its namespace, or a subreaper."""
    exit_statuses: dict[int, int] = {}
    while True:
        signal_all(SIGKILL, signals_are_contained)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return exit_statuses
        exit_statuses[pid] = os.waitstatus_to_exitcode(status)


def signal_all(signal_number: int, signals_are_contained: bool) -> None:
    """Signal every process below this process."""
    for pid in (-1,) if signals_are_contained else descendants(os.getpid()):
        kill(pid, signal_number)


def stop_all(signals_are_contained: bool) -> bool:
    """Stop every process below this process. False: a process still runs after STOP_SECONDS and STOP_LOOKS
    (the machine may stand still), as processes may continue each other. If each thread is still in two looks
    and has not run between the looks, no thread runs or can run again."""
    look_count = 0
    deadline = time.monotonic() + STOP_SECONDS

    while look_count < STOP_LOOKS or time.monotonic() < deadline:
        look_count += 1
        signal_all(SIGSTOP, signals_are_contained)
        statuses_before = _thread_statuses()

        if all(map(_is_still, statuses_before.values())) and statuses_before == _thread_statuses():
            return True
        time.sleep(0.001)
    return False


def _thread_statuses() -> dict[str, bytes]:
    """Read the status of each thread below this process; a status counts how often the thread ran."""
    return {task: text for pid in descendants(os.getpid()) for task, text in thread_statuses(f"{pid}")}


def _is_still(status: bytes) -> bool:
    """Return whether a thread has stopped or ended, or sleeps in the kernel and will stop at waking."""
    state, pending = (status.partition(b"\n%s:\t" % name)[2].split()[0] for name in (b"State", b"ShdPnd"))
    return state in b"TtZX" or (state == b"D" and int(pending, 16) >> SIGSTOP - 1 & 1 == 1)


def kill(pid: int, signal_number: int) -> None:
    """Signal a process, or, as `os.kill` does, a group (negative) or all processes (-1), if present."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def go_first_without_memory() -> None:
    """Let the kernel end this process and its children before all other processes when the machine has no
    memory left. If root sets the value, a process without root's rights cannot lower it again."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


# -- directories

SYS_OPENAT2 = 437
PATH_MAX = 4096
# RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH
NO_LINKS = 0x04
BENEATH_ONLY = 0x08
OPEN_HOW = struct.Struct("=QQQ")  # flags, mode, how to resolve


def open_beneath(top_fd: int, path: str) -> int:
    """Open a directory below `top_fd` in one call, at any depth. OSError, also for a path of PATH_MAX bytes
    or more; NotADirectoryError: the path leads through a link."""
    open_how = OPEN_HOW.pack(os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, NO_LINKS | BENEATH_ONLY)
    try:
        return syscall(path, SYS_OPENAT2, top_fd, os.fsencode(path), open_how, OPEN_HOW.size)
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
# Flags of mounts: nosuid, and nodev or noexec.
MS_SAFE = 2 | 4
MS_TERMINALS = 2 | 8
MS_BIND = 1 << 12
MS_REC = 1 << 14
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
# Attributes of mount_setattr.
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
    raise_errno(libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, file_system: str, flags: int, data: str = "") -> None:
    encoded_texts = [os.fsencode(text) for text in (source, target, file_system)]
    raise_errno(libc.mount(*encoded_texts, ctypes.c_ulong(flags), os.fsencode(data)), f"mount at {target}")


def copy_mount(path: str) -> int:
    """Return a descriptor of a new mount of the tree at `path`, which is mounted nowhere yet."""
    tree_flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE
    return syscall(f"open_tree of {path}", SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), tree_flags)


def place_mount(mount_fd: int, path: str) -> None:
    """Mount a copy made by `copy_mount` at `path`, and close the descriptor."""
    move_flags = MOVE_MOUNT_EMPTY_PATH
    syscall(f"move_mount to {path}", SYS_MOVE_MOUNT, mount_fd, b"", AT_FDCWD, os.fsencode(path), move_flags)
    os.close(mount_fd)


def set_attributes(mount_fd: int, path: str, attributes: int, user_namespace: int = 0) -> None:
    """Change a mount and all mounts below: the mount at `path` (with AT_FDCWD), or `mount_fd` (`path` is "").
    `user_namespace`: for ID_MAP, the namespace that maps ids."""
    attribute_words = (ctypes.c_uint64 * 4)(attributes, 0, 0, user_namespace)
    path_flags = AT_RECURSIVE | AT_EMPTY_PATH
    syscall(
        "mount_setattr",
        SYS_MOUNT_SETATTR,
        mount_fd,
        os.fsencode(path),
        path_flags,
        attribute_words,
        ctypes.sizeof(attribute_words),
    )


def enter_root(root: str) -> None:
    """Make the mount at `root` the root of this mount namespace. The old root is gone."""
    os.chdir(root)
    syscall("pivot_root", SYS_PIVOT_ROOT[MACHINE], b".", b".")
    raise_errno(libc.umount2(b".", MNT_DETACH), "umount of the old root")
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
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
# All rights of a version of Landlock, by the first version that has them.
RIGHTS_BY_VERSION = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
FILES_SINCE = 3  # older versions cannot block truncation
# Abstract sockets and signals stay inside.
SCOPES_SINCE = 6
SCOPES = 3


# Fields of a ruleset: files, net, scoped; fields of a rule: allowed rights, descriptor of the path.
RULESET = struct.Struct("=QQQ")
BENEATH = struct.Struct("=Qi")


def landlock_version() -> int:
    """Return the version of Landlock; 0 if the kernel lacks or forbids Landlock."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, 0, VERSION_QUERY)))


def landlock_ruleset(readable_paths: Iterable[str], writable_paths: Iterable[str]) -> int:
    """Return a descriptor for `restrict_files`: files below `readable_paths` may be read and run, below
    `writable_paths` everything is allowed."""
    version = landlock_version()
    known_rights = max(
        (
            version_rights
            for first_version, version_rights in RIGHTS_BY_VERSION.items()
            if first_version <= version
        ),
        default=0,
    )
    scoped = SCOPES if version >= SCOPES_SINCE else 0
    ruleset = RULESET.pack(known_rights, 0, scoped)
    ruleset_fd = syscall("landlock_create_ruleset", CREATE_RULESET, ruleset, RULESET.size if scoped else 8, 0)

    for paths, allowed_rights in (
        (readable_paths, EXECUTE | READ_FILE | READ_DIR),
        (writable_paths, known_rights),
    ):
        for path in paths:
            _allow_path(ruleset_fd, path, allowed_rights & known_rights)
    return ruleset_fd


def restrict_files(ruleset_fd: int) -> None:
    """Apply a ruleset to this process and its children. Needs PR_SET_NO_NEW_PRIVS."""
    syscall("landlock_restrict_self", RESTRICT_SELF, ruleset_fd, 0)


def _allow_path(ruleset_fd: int, path: str, rights: int) -> None:
    path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        path_rights = rights if os.path.isdir(path) else rights & FILE_RIGHTS
        syscall(
            "landlock_add_rule", ADD_RULE, ruleset_fd, PATH_BENEATH, BENEATH.pack(path_rights, path_fd), 0
        )
    finally:
        os.close(path_fd)
