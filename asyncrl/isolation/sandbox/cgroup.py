"""A memory cgroup for the code of one sandbox, where this process may make one.

In a group the kernel counts all memory of the code's processes, also kernel objects that nothing else shows.
Above the limit the kernel kills a process; the warden sees that and ends the other processes.

A group can be made as root under cgroup v1, or where the memory controller is given to children of this
process's group or, if that has no limit itself, to its siblings (cgroup v2: a group that was delegated).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

GROUP_PREFIX = "asyncrl-sandbox-"  # followed by the guard's process id, its namespace, and a random part
CACHE_BYTES = 256 << 20  # bytes above `resident`, as caches of files also count here

# Types of the file systems of the two versions, and the names of their control files.
CGROUP_V1 = "cgroup"
CGROUP_V2 = "cgroup2"
LIMIT_FILES = {CGROUP_V1: "memory.limit_in_bytes", CGROUP_V2: "memory.max"}
# Both event files have a line "oom_kill COUNT".
EVENT_FILES = {CGROUP_V1: "memory.oom_control", CGROUP_V2: "memory.events"}
HIT_FILES = {CGROUP_V1: "memory.failcnt", CGROUP_V2: "memory.events"}  # a number; a line "oom COUNT"
UNLIMITED_FILES = ("memory.max", "memory.high", "cpu.max")


class MemoryGroup:
    """Control one memory group. `path`: the group's directory, outside of the sandbox. The control files are
    opened before the root changes."""

    def __init__(self, path: str, version: str, limit_bytes: int) -> None:
        self.path = path
        os.mkdir(path)
        try:
            with open(f"{path}/{LIMIT_FILES[version]}", "w") as file:
                file.write(str(limit_bytes + CACHE_BYTES))
            self._processes_fd = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            self._events_fd = os.open(f"{path}/{EVENT_FILES[version]}", os.O_RDONLY | os.O_CLOEXEC)
            self._hits_fd = os.open(f"{path}/{HIT_FILES[version]}", os.O_RDONLY | os.O_CLOEXEC)
            self._counts_before = self._read_counts()
        except (OSError, ValueError):
            os.rmdir(path)
            raise

    def add_this_process(self) -> None:
        """Put this process, and all processes that it will start, into the group."""
        with suppress(OSError):  # the group was removed: the other limits hold
            os.write(self._processes_fd, b"0")

    def reset_counts(self) -> None:
        """Forget the processes that were killed before."""
        with suppress(OSError):  # the group was removed
            self._counts_before = self._read_counts()

    def has_killed(self) -> bool:
        """Return whether the kernel has killed a process because of the group's limit since `reset_counts`,
        and not because the machine had no memory left."""
        with suppress(OSError):
            kills, hits = self._read_counts()
            return kills > self._counts_before[0] and hits > self._counts_before[1]
        return False

    def remove_group(self) -> None:
        """Remove the group, which must have no process left."""
        with suppress(OSError):
            os.rmdir(self.path)

    def _read_counts(self) -> tuple[int, int]:
        """Read how often a process was killed, and how often the limit was reached. ValueError: this kernel
        does not count."""
        return _read_number(self._events_fd, b"oom_kill"), _read_number(self._hits_fd, b"oom")


def _read_number(fd: int, name: bytes) -> int:
    """Read the number behind a name, or the only number, of an open file."""
    words = os.pread(fd, 4096, 0).split()
    return int(words[0] if len(words) == 1 else words[words.index(name) + 1])


def make_group(limit_bytes: int) -> MemoryGroup | None:
    """Make a group whose processes may hold `limit_bytes`. None: this process may make no group."""
    with suppress(OSError, ValueError):
        for directory, version in _possible_parents():
            _remove_old(directory)
            group_name = f"{GROUP_PREFIX}{os.getpid()}-{_process_namespace()}-{os.urandom(4).hex()}"
            return MemoryGroup(f"{directory}/{group_name}", version, limit_bytes)
    return None


def _process_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _possible_parents() -> Iterator[tuple[str, str]]:
    """Find directories in which a group can be made, with the version of their cgroups."""
    with open("/proc/self/cgroup") as file:
        process_groups = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, group in process_groups:
        if "memory" in controllers.split(","):
            for directory in _group_directories(CGROUP_V1, group):
                yield directory, CGROUP_V1

    for _, controllers, group in process_groups:
        for process_group in [] if controllers else _group_directories(CGROUP_V2, group):
            parent = os.path.dirname(process_group)
            if _passes_memory(process_group):
                yield process_group, CGROUP_V2
            elif _is_unlimited(process_group) and _passes_memory(parent):
                yield parent, CGROUP_V2


def _group_directories(version: str, group: str) -> Iterator[str]:
    """Find a group below the mounts of its file system. A line of mountinfo has ids, device, root, mount
    point, options … - type, source, options."""
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]

    for mount in mounts:
        file_system, _, options = mount[mount.index("-") + 1 :]
        if file_system == version and (version == CGROUP_V2 or "memory" in options.split(",")):
            relative_path = os.path.relpath(group, mount[3])
            if not relative_path.startswith(".."):
                yield os.path.normpath(f"{mount[4]}/{relative_path}")


def _is_unlimited(group: str) -> bool:
    """Return whether the group has no limit, which a sibling would escape."""
    for limit_file in UNLIMITED_FILES:
        with suppress(FileNotFoundError), open(f"{group}/{limit_file}") as file:
            if not file.read().startswith("max"):
                return False
    return True


def _passes_memory(directory: str) -> bool:
    with open(f"{directory}/cgroup.subtree_control") as file:
        return "memory" in file.read().split()


def _remove_old(directory: str) -> None:
    """Remove groups of guards that were killed, of this process namespace."""
    for name in os.listdir(directory):
        pid, _, namespace_and_nonce = name.removeprefix(GROUP_PREFIX).partition("-")
        is_ours = name.startswith(GROUP_PREFIX) and namespace_and_nonce.startswith(f"{_process_namespace()}-")

        if is_ours and not os.path.exists(f"/proc/{pid}"):
            with suppress(OSError):  # another guard has removed the group
                os.rmdir(f"{directory}/{name}")
