"""Confine this process step by step. A step that the kernel refuses is noted and skipped.

    guard ── unshare(pid) ── fork ──► warden: unshare(net, ipc, uts, mount), a new root, another user,
    (waits, cleans up)                no capabilities, then warden.py: it forks what runs the code

Root can create these namespaces directly and runs each sandbox as a user of its own. Any other user needs
a user namespace around them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from _socket import AF_INET, SOCK_STREAM, socket  # the module socket is slow to import
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from asyncrl.isolation.sandbox import imaging, kernel, system_calls
from asyncrl.isolation.sandbox.frames import SandboxLimits
from asyncrl.isolation.sandbox.kernel import check, libc, prctl
from asyncrl.isolation.sandbox.memory import BUFFER

CAPABILITY_VERSION = 0x20080522
CAPABILITIES = 64
PR_CAPBSET_DROP = 24
ROOT_CAPABILITIES = 0b11011011  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
BACKLOG = 128
NETWORK_SETTINGS = {  # of its own network namespace
    "net/ipv4/tcp_rmem": f"4096 65536 {BUFFER}",  # least, default and most
    "net/ipv4/tcp_wmem": f"4096 65536 {BUFFER}",
    "net/ipv4/tcp_max_tw_buckets": "4096",  # connections that have ended, which are no sockets any more
}
USER_SETTINGS = {  # of its own user namespace: the user has these once for all of his programs
    "user/max_inotify_instances": "16",
    "user/max_inotify_watches": "16384",
}
MEMORY_FILES = (0x01021994, 0x858458F6)  # tmpfs, ramfs

OWN_USERS = 0x70000000
"""Root's sandboxes run as a user of this number plus the guard's process id, which no other process has."""
OWN_PROCESSES = 3  # the guard, the warden and the interpreter are allowed on top of the code's limit
HOME = "/sandbox"
NEW_ROOT = "/proc"  # the new root is built here: /proc exists everywhere, and no path below it is shown
SHELLS = ("/bin/bash", "/bin/sh")
DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Name inside: device outside. /dev/zero is /dev/full, which reads as zeros too but cannot be mapped: mapped
memory of /dev/zero is not counted against any limit."""
LINKS = {
    "tmp": HOME,
    "dev/shm": HOME,
    "dev/ptmx": "pts/ptmx",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "fd/0",
    "dev/stdout": "fd/1",
    "dev/stderr": "fd/2",
}
TERMINALS = "newinstance,ptmxmode=666,max=32"  # the machine has 3,072 for all sandboxes, and 1,024 for itself


class ConfinementPlan(NamedTuple):
    """`number`: the guard's process id outside all namespaces. `shown`: paths that the code may read, the
    shorter ones first. `layers`: directories of an image, the uppermost first; without any the root is made
    of what is shown. `environment`: variables beside those of every sandbox. `fallback`: the directory to
    create as its home where there can be no new root. `listen`: open a listening socket inside. `user`:
    "root" for its rights inside. `directory`: where programs start."""

    number: int
    limits: SandboxLimits
    shown: Sequence[str]
    layers: Sequence[str]
    environment: Mapping[str, str]
    fallback: str
    listen: bool
    user: str
    directory: str


class Confinement(NamedTuple):
    """The isolation that `confine` achieved. `home`: the code's directory. `upper`: a descriptor of the
    directory with all files that the code makes: an image's upper layer, or `home`. `holds`: the isolation
    in force (words of frames.GIVEN). `alone`: kill(-1) reaches only the sandbox's own processes.
    `processes`: the value for RLIMIT_NPROC, which counts all processes of a user. `files`: descriptor of a
    Landlock ruleset for the code's processes, or -1 for none. `filtered`: seccomp works here. `listener`: a
    socket in the network namespace. `notes`: what the kernel refused."""

    home: str
    upper: int
    holds: frozenset[str]
    alone: bool
    processes: int
    files: int
    filtered: bool
    listener: socket | None
    notes: str


def new_process_namespace(notes: list[str]) -> set[str]:
    """Prepare a process namespace for the next child. Returns those created: `pid`, and `user` if needed."""
    uid = os.geteuid()
    gid = os.getegid()
    if attempt(lambda: kernel.unshare(kernel.NEWPID), notes):
        return {"pid"}
    if attempt(lambda: kernel.unshare(kernel.NEWPID | kernel.NEWUSER), notes):
        _map_ids((uid, uid), (gid, gid))
        return {"pid", "user"}
    return set()


def _map_ids(user: tuple[int, int], group: tuple[int, int], proc: str = "/proc") -> None:
    """Give this process ids in its new user namespace. Each is one inside, and the one it has outside."""
    _write(f"{proc}/self/setgroups", "deny")
    for name, (inside, outside) in (("uid_map", user), ("gid_map", group)):
        _write(f"{proc}/self/{name}", f"{inside} {outside} 1")


def confine(plan: ConfinementPlan, spaces: set[str], notes: list[str]) -> Confinement:
    """All other steps; to be called in the child. `spaces`: what `new_process_namespace` returned."""
    holds = {"orphans"} if "pid" in spaces else set()
    attempt(lambda: kernel.unshare(kernel.NEWIPC | kernel.NEWUTS), notes)
    if attempt(lambda: kernel.unshare(kernel.NEWNET), notes):
        holds.add("network")
        if plan.layers:  # tests of many repositories talk to servers of their own
            attempt(raise_loopback, notes)
    listener = socket(AF_INET, SOCK_STREAM) if plan.listen and "network" in holds else None
    if listener and not attempt(partial(listen, listener), notes):
        listener = None
    uid = _user(plan, spaces)
    home = HOME
    uppers = list[int]()
    writable_proc = -1
    if attempt(lambda: uppers.append(new_root(plan, uid)), notes):
        holds |= {"files", "root"}
        if "network" in holds and os.getpid() == 1 and os.path.exists("/proc/1/task/1"):
            holds.add("resident")
            for path, value in (NETWORK_SETTINGS | (USER_SETTINGS if "user" in spaces else {})).items():
                attempt(partial(_write, f"/proc/sys/{path}", value), notes)
        if plan.user == "root":
            writable_proc = kernel.copy_mount("/proc")
        if os.path.exists("/proc/self"):  # the code may not change what the kernel ends first
            set_attributes = partial(kernel.set_attributes, kernel.AT_FDCWD, "/proc", kernel.READ_ONLY)
            attempt(set_attributes, notes)
    elif plan.layers:
        return without_image(notes)
    else:
        home = plan.fallback
        os.mkdir(home, 0o700)
        if not (_library_is_public() and attempt(lambda: os.chown(home, uid, uid), notes)):
            uid = os.getuid()
        uppers.append(os.open(home, os.O_DIRECTORY | os.O_CLOEXEC))
    own = uid != os.getuid() and attempt(lambda: _become(uid), notes)
    os.chdir(home)
    privileged = os.getuid() == 0
    if plan.user == "root" and not attempt(partial(_become_root, writable_proc), notes):
        return without_image(notes)
    drop_rights(ROOT_CAPABILITIES if plan.user == "root" else 0)
    files = -1 if "files" in holds else _files_by_landlock(plan, home, holds, notes)
    filtered = attempt(system_calls.filter_calls, notes)
    if filtered and "files" in holds and (home == HOME or not _is_memory(home, notes)):
        holds.add("memory")  # without `files` there may be other directories that are memory
    if "network" not in holds and attempt(system_calls.refuse_sockets, notes):
        holds.add("network")
    if own:
        holds.add("orphans")  # the guard runs as another user: the code cannot kill it
    if not privileged:
        holds.add("processes")
    kernel_version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    counted_apart = own or ("user" in spaces and kernel_version >= (5, 14))
    count = plan.limits.processes + OWN_PROCESSES + (0 if counted_apart else _tasks(os.getuid()))
    alone = own or "pid" in spaces
    if listener:
        holds.add("listener")
    return Confinement(
        home, uppers[0], frozenset(holds), alone, count, files, filtered, listener, "; ".join(notes)
    )


def without_image(notes: list[str]) -> Confinement:
    """Describe a sandbox in which nothing is to run: its owner says why. Not `alone`: a signal to all would
    reach the processes of the machine."""
    return Confinement("", -1, frozenset(), False, 0, -1, False, None, "; ".join(notes))


def listen(listener: socket) -> None:
    """Listen on the loopback interface of this network namespace."""
    raise_loopback()
    listener.bind(("127.0.0.1", 0))
    listener.listen(BACKLOG)


def raise_loopback() -> None:
    """Bring up the loopback interface of this network namespace, which has no other."""
    unused = socket(AF_INET, SOCK_STREAM)
    fcntl.ioctl(unused.fileno(), SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    unused.close()


def new_root(plan: ConfinementPlan, uid: int) -> int:
    """Change to a new read-only root with `shown`, and with HOME, a tmpfs that ends with the last process; or
    to an image's root, whose upper layer is on that tmpfs. Returns `upper` of the Confinement."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    layers = imaging.copy_layers(plan.layers, uid)
    inside = 0 if plan.user == "root" else uid
    kernel.mount("tmpfs", NEW_ROOT, "tmpfs", kernel.MS_SAFE, "size=1m,mode=755")
    try:
        _fill(plan.shown, uid)
        sizes = f"size={plan.limits.disk}m,nr_inodes={plan.limits.disk * 256},mode=700"
        sizes += f",uid={uid},gid={uid}" if uid != os.getuid() else ""
        kernel.mount("tmpfs", NEW_ROOT + HOME, "tmpfs", kernel.MS_SAFE, sizes)
        attempt(lambda: kernel.mount("proc", f"{NEW_ROOT}/proc", "proc", kernel.MS_SAFE), [])
        for name, source in DEVICES.items():
            kernel.mount(f"/dev/{source}", f"{NEW_ROOT}/dev/{name}", "", kernel.MS_BIND)
        terminals = f"{NEW_ROOT}/dev/pts"
        attempt(lambda: kernel.mount("devpts", terminals, "devpts", kernel.MS_TERMINALS, TERMINALS), [])
        if layers:
            return imaging.enter_image(layers, NEW_ROOT, HOME, plan.shown, uid, inside)
        upper = os.open(NEW_ROOT + HOME, os.O_DIRECTORY | os.O_CLOEXEC)
        kernel.enter_root(NEW_ROOT)
        return upper
    except (OSError, KeyError):
        libc.umount2(NEW_ROOT.encode(), kernel.MNT_DETACH)
        raise


def _fill(shown: Sequence[str], uid: int) -> None:
    for name in ("proc", "dev/pts", "etc", HOME[1:]):  # first: never the machine's own in their place
        os.makedirs(f"{NEW_ROOT}/{name}")
    for path in shown:
        _show(path, NEW_ROOT + path)
    for name in DEVICES:
        os.close(os.open(f"{NEW_ROOT}/dev/{name}", os.O_CREAT))
    for name, target in LINKS.items():
        if not os.path.lexists(f"{NEW_ROOT}/{name}"):
            os.symlink(target, f"{NEW_ROOT}/{name}")
    names = {
        "passwd": f"sandbox:x:{uid}:{uid}::{HOME}:{shell()}\n",
        "group": f"sandbox:x:{uid}:\n",
    }
    for name, text in (names | imaging.FILES).items():
        _write(f"{NEW_ROOT}/etc/{name}", text)
    kernel.set_attributes(kernel.AT_FDCWD, NEW_ROOT, kernel.SAFE_READ_ONLY)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def shell() -> str:
    return next((path for path in SHELLS if os.path.exists(path)), SHELLS[-1])


def _show(path: str, target: str) -> None:
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)


def drop_rights(kept: int) -> None:
    """Drop all capabilities but the set `kept`, and do not regain them by exec. Children cannot read this
    process's memory; it ends with its parent and adopts orphans."""
    for capability in range(CAPABILITIES if kept else 0):  # a program of root takes them all from this set
        if not kept >> capability & 1:
            attempt(partial(prctl, PR_CAPBSET_DROP, capability), [])  # this kernel may have fewer
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept)), "capset")
    prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    prctl(kernel.PR_SET_DUMPABLE, 0)
    prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)  # last: a change of user clears it


def _files_by_landlock(plan: ConfinementPlan, home: str, holds: set[str], notes: list[str]) -> int:
    """A Landlock ruleset, used when there is no new root. On new kernels it also blocks signals to others."""
    devices = [f"/dev/{name}" for name in DEVICES.values()]
    try:
        fd = kernel.landlock_ruleset(plan.shown, [home, *devices])
    except OSError as error:
        notes.append(str(error))
        return -1
    if kernel.landlock_version() >= kernel.FILES_SINCE:
        holds.add("files")
    if kernel.landlock_version() >= kernel.SCOPES_SINCE:
        holds.add("orphans")  # the code cannot kill the warden, which kills all it leaves behind
    return fd


def _is_memory(directory: str, notes: list[str]) -> bool:
    found = ctypes.create_string_buffer(256)
    check(libc.statfs(os.fsencode(directory), found), "statfs")
    if int.from_bytes(found.raw[:4], "little") not in MEMORY_FILES:
        return False
    notes.append(f"{directory} is memory: set TMPDIR to a directory on a disk")
    return True


def attempt(step: Callable[[], object], notes: list[str]) -> bool:
    """Run `step`. False, with the error added to `notes`, when the kernel refused it."""
    try:
        step()
    except (OSError, KeyError) as error:
        notes.append(str(error))
        return False
    return True


def _user(plan: ConfinementPlan, spaces: set[str]) -> int:
    """The user to run the code: for root one of its own where that id is mapped, else the present one."""
    if os.geteuid() != 0 or "user" in spaces:
        return os.getuid()
    with open("/proc/self/uid_map") as file:
        known = max(int(line.split()[0]) + int(line.split()[2]) for line in file)
    uid = OWN_USERS + plan.number
    return uid if uid < known else os.getuid()


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _become_root(writable_proc: int) -> None:
    """Become root of a user namespace of its own, in which no other user exists. `writable_proc`: a mount of
    /proc, which is closed."""
    user = os.getuid()
    group = os.getgid()
    prctl(kernel.PR_SET_DUMPABLE, 1)  # else the files of /proc/self are not this user's
    kernel.unshare(kernel.NEWUSER)
    _map_ids((0, user), (0, group), f"/proc/self/fd/{writable_proc}")
    os.close(writable_proc)


def _library_is_public() -> bool:
    """True if every user may read this Python's library. If not, root's sandbox cannot change its user."""
    path = ""
    parts = os.path.dirname(os.__file__).split("/")
    for part in parts[1:]:
        path += f"/{part}"
        if not os.stat(path).st_mode & 1:
            return False
    return True


def _tasks(uid: int) -> int:
    """Count the processes and threads of a user: the kernel counts them all against RLIMIT_NPROC."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += os.stat(f"/proc/{name}/task").st_nlink - 2
        except OSError:
            continue  # it ended meanwhile
    return count
