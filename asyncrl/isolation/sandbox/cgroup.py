"""A memory cgroup for the code of one sandbox, where this process may make one.

In it the kernel counts all memory of the code's processes, also objects of its own that nothing else shows.
Above the limit it kills one of them; the warden sees that and ends the rest.

A group can be made as root under cgroup v1, or where the memory controller is given to children of this
process's group or, if that has no limit itself, to its siblings (cgroup v2: a group that was delegated).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

PREFIX = "asyncrl-sandbox-"  # the rest: the guard's process id and namespace, and what makes it unique
BEYOND = 256 << 20  # bytes above `resident`, as caches of files count here, too

# types of the file systems
V1 = "cgroup"
V2 = "cgroup2"
LIMIT = {V1: "memory.limit_in_bytes", V2: "memory.max"}
EVENTS = {V1: "memory.oom_control", V2: "memory.events"}  # both have a line "oom_kill COUNT"
HITS = {V1: "memory.failcnt", V2: "memory.events"}  # a number; a line "oom COUNT"
UNLIMITED = ("memory.max", "memory.high", "cpu.max")


class MemoryGroup:
    """`path`: the group's directory, outside of the sandbox. Its control files are opened before the root
    changes."""

    def __init__(self, path: str, version: str, limit: int) -> None:
        self.path = path
        os.mkdir(path)
        try:
            with open(f"{path}/{LIMIT[version]}", "w") as file:
                file.write(str(limit + BEYOND))
            self._processes = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            self._events = os.open(f"{path}/{EVENTS[version]}", os.O_RDONLY | os.O_CLOEXEC)
            self._hits = os.open(f"{path}/{HITS[version]}", os.O_RDONLY | os.O_CLOEXEC)
            self._before = self._counts()
        except (OSError, ValueError):
            os.rmdir(path)
            raise

    def join(self) -> None:
        """Put this process, and those that it will start, into the group."""
        with suppress(OSError):  # somebody has removed it: the other bounds hold
            os.write(self._processes, b"0")

    def start(self) -> None:
        """Forget the processes that were killed before."""
        with suppress(OSError):  # somebody has removed it
            self._before = self._counts()

    def has_killed(self) -> bool:
        """True when the kernel has killed a process of the group for its limit since `start`, and not as the
        machine had no memory left."""
        with suppress(OSError):
            kills, hits = self._counts()
            return kills > self._before[0] and hits > self._before[1]
        return False

    def remove(self) -> None:
        """Remove the group, in which no process is left."""
        with suppress(OSError):
            os.rmdir(self.path)

    def _counts(self) -> tuple[int, int]:
        """Read how often a process was killed, and how often the limit was reached. ValueError where the
        kernel does not say."""
        return _number(self._events, b"oom_kill"), _number(self._hits, b"oom")


def _number(file: int, name: bytes) -> int:
    """Read the number behind a name, or the only one, of an open file."""
    words = os.pread(file, 4096, 0).split()
    return int(words[0] if len(words) == 1 else words[words.index(name) + 1])


def make_group(limit: int) -> MemoryGroup | None:
    """Make a group whose processes may hold `limit` bytes. None where this process may not."""
    with suppress(OSError, ValueError):
        for directory, version in _possible_parents():
            _remove_old(directory)
            name = f"{PREFIX}{os.getpid()}-{_process_namespace()}-{os.urandom(4).hex()}"
            return MemoryGroup(f"{directory}/{name}", version, limit)
    return None


def _process_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _possible_parents() -> Iterator[tuple[str, str]]:
    """Find the directory in which a group can be made, if there is one, and the version of its cgroups."""
    with open("/proc/self/cgroup") as file:
        own_groups = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, group in own_groups:
        if "memory" in controllers.split(","):
            yield from ((directory, V1) for directory in _directories(V1, group))

    for _, controllers, group in own_groups:
        for own_group in [] if controllers else _directories(V2, group):
            parent = os.path.dirname(own_group)
            if _passes_memory(own_group):
                yield own_group, V2
            elif _is_unlimited(own_group) and _passes_memory(parent):
                yield parent, V2


def _directories(version: str, group: str) -> Iterator[str]:
    """Find a group below the mounts of its file system. A line of mountinfo has ids, device, root, place,
    options … - type, source, options."""
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]
    for mount in mounts:
        kind, _, options = mount[mount.index("-") + 1 :]
        if kind == version and (version == V2 or "memory" in options.split(",")):
            path = os.path.relpath(group, mount[3])
            if not path.startswith(".."):
                yield os.path.normpath(f"{mount[4]}/{path}")


def _is_unlimited(group: str) -> bool:
    """Return whether the group has no limit: a sibling would not be under it."""
    for name in UNLIMITED:
        with suppress(FileNotFoundError), open(f"{group}/{name}") as file:
            if not file.read().startswith("max"):
                return False
    return True


def _passes_memory(directory: str) -> bool:
    with open(f"{directory}/cgroup.subtree_control") as file:
        return "memory" in file.read().split()


def _remove_old(directory: str) -> None:
    """Remove groups of guards that were killed, of this process namespace."""
    for name in os.listdir(directory):
        pid, _, namespace_and_nonce = name.removeprefix(PREFIX).partition("-")
        is_ours = name.startswith(PREFIX) and namespace_and_nonce.startswith(f"{_process_namespace()}-")
        if is_ours and not os.path.exists(f"/proc/{pid}"):
            with suppress(OSError):  # another one has removed it
                os.rmdir(f"{directory}/{name}")
