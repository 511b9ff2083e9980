"""Main memory that this process may use: the machine's, or less in a cgroup (a container, a Slurm job)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil


class MainMemory(NamedTuple):
    """Bytes."""

    total: int
    available: int


class Files(NamedTuple):
    """Where a version of cgroups says what a group may use and uses. `cache`: what of it the kernel frees on
    demand, a line of memory.stat."""

    mount: str
    limit: str
    used: str
    cache: str


VERSIONS = {
    "": Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": Files(
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def main_memory(root: Path = Path("/")) -> MainMemory:
    """Now. `root`: of the file system."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return MainMemory(total, available)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """What each group of this process, and each around it, may use and uses. Inside a container a path may be
    that outside of it: the container's own group is the mount then."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if files := VERSIONS.get(controllers):
                inside = Path(path.lstrip("/"))
                for group in (inside, *inside.parents):
                    with suppress(OSError, ValueError, KeyError):  # no such group, no limit
                        yield _limit(root / files.mount / group, files)


def _limit(group: Path, files: Files) -> tuple[int, int]:
    limit, used = (int((group / name).read_text()) for name in (files.limit, files.used))
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit, used - int(stat[files.cache])
