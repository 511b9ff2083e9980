"""Measures what the processes of a sandbox hold in memory, also in the kernel on their behalf.

Most objects that the kernel makes for a process are in no figure of /proc. Those that can be many are counted
here, each at its size: sockets, open files and what waits for them, locks of files, mappings. system_calls.py
refuses the others. Where a memory cgroup can be made (cgroup.py), the kernel counts every object itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress

SOCKET = 1 << 19  # bytes that a socket may hold: two buffers as below, and its options (optmem_max: 128 KiB)
BUFFER = 212_992  # bytes of a socket's buffer, unless the machine's administrator has set another default
OPEN_FILE = 5 << 10  # bytes of half a pipe of two pages, which is the largest open file but a socket
WATCHED_FILES = 50  # bytes, times the square of open files: half of them epolls, which watch the other half
MOST_LOCKS = 10_000  # locks of ranges of files: to read many takes the kernel the square of their number
MAPPING = 256  # bytes of a part of an address space
LOW_MEMORY = 64, 256 << 20, 1 << 30  # a machine is short of memory with 1/64 left: at least, at most, bytes

_READ = 1 << 16


def held_by_processes(most: int) -> float:
    """Measure the bytes of memory of every process in /proc: what is in no file, swapped or not, page tables,
    and what the kernel holds for them. Pages that two processes share after a fork count twice, and so do
    their open files. Returns the sum of the first ones where that is above `most`, and infinity for more than
    MOST_LOCKS locks."""
    if _count_lines("/proc/locks", MOST_LOCKS) >= MOST_LOCKS:  # those of this process namespace
        return math.inf
    with open("/proc/net/sockstat", "rb") as file:
        held = int(file.readline().split()[2]) * SOCKET
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if held > most:
            break
        held += _held_by_process(pid, most)
    return held


def _held_by_process(pid: str, most: int) -> int:
    with suppress(OSError):  # it ended meanwhile
        open_files = os.stat(f"/proc/{pid}/fd").st_size  # 0 before Linux 6.2
        in_kernel = open_files * OPEN_FILE + open_files**2 * WATCHED_FILES
        mappings = _count_lines(f"/proc/{pid}/maps", most // MAPPING)
        return _pages(pid) + in_kernel + mappings * MAPPING
    return 0


def _pages(pid: str) -> int:
    """Measure the pages of one process. Its first thread may have ended before the others; then it shows
    nothing."""
    for _, status in thread_statuses(pid):
        sizes = [line for line in status.splitlines() if line.startswith((b"RssAnon", b"VmPTE", b"VmSwap"))]
        if sizes:
            return sum(int(line.split()[1]) for line in sizes) << 10
    return 0


def thread_statuses(pid: str) -> Iterator[tuple[str, bytes]]:
    """Read what /proc has on each thread of a process."""
    with suppress(OSError):  # it ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/status", "rb") as file:
                yield task, file.read()


def _count_lines(path: str, most: int) -> int:
    """Count the lines of a file of /proc, up to `most` and some. 0 where it may not be read, as of a process
    that allows no look into itself."""
    count = 0
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        while count < most and (part := file.read(_READ)):
            count += part.count(b"\n")
    return count


def machine_is_short() -> bool:
    """True when the machine itself has hardly any memory left, whoever took it."""
    with open("/proc/meminfo", "rb") as file:
        words = [line.split() for line in file]
    sizes = {name: int(size) << 10 for name, size, *_ in words}
    divisor, least, most = LOW_MEMORY
    floor = min(max(sizes[b"MemTotal:"] // divisor, least), most)
    return sizes[b"MemAvailable:"] < floor
