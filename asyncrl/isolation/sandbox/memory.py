"""Measures what the processes of a sandbox hold in memory, also in the kernel on their behalf.

Most objects that the kernel makes for a process are in no figure of /proc. Those that can be many are counted
by their size: sockets, open files, epolls, inotifies, locks of files, mappings. system_calls.py
refuses others. Where a memory cgroup can be made (cgroup.py), the kernel counts every object itself.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress

SOCKET = 1 << 19  # bytes that a socket may hold: two buffers as below, and its options (optmem_max: 128 KiB)
BUFFER = 212_992  # bytes of a socket's buffer, unless the machine's administrator has set another default
OPEN_FILE = 5 << 10  # bytes of half a pipe of two pages, which is the largest open file of those not listed
INOTIFY = 8 << 20  # bytes of 16,384 events that nobody has read
MOST_INOTIFIES = 16  # of a process that cannot be looked at
EPOLL_WATCH = 256  # bytes
MAPPING = 256  # bytes of a part of an address space
MOST_MAPPINGS = 65_530  # of a process (vm.max_map_count)
MOST_LOCKS = 10_000  # locks of ranges of files: to read many takes the kernel the square of their number
LOOK_CPU_SECONDS = 0.5  # of a measurement: some milliseconds where nobody makes it long
LOW_MEMORY = 64, 256 << 20, 1 << 30  # a machine is short of memory with 1/64 left: at least, at most, bytes

_READ = 1 << 16


class TooMuch(Exception):
    """There is so much that it cannot be measured."""


def held_by_processes(most_bytes: int) -> float:
    """Measure the bytes of memory of every process in /proc: what is in no file, swapped or not, page tables,
    and what the kernel holds for them. Pages that two processes share after a fork count twice, and so do
    their open files. Returns early, with the sum so far, once it exceeds `most_bytes`; infinity for
    what takes too long to measure."""
    lines = _LineCounter()
    try:
        with suppress(OSError):  # a kernel without locks
            if lines.count("/proc/locks", MOST_LOCKS) >= MOST_LOCKS:  # those of this process namespace
                return math.inf
        with open("/proc/net/sockstat", "rb") as file:
            held_bytes = int(file.readline().split()[2]) * SOCKET
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if held_bytes > most_bytes:
                break
            held_bytes += _pages(pid) + _open_files(pid, lines) + _mappings(pid, lines)
        return held_bytes
    except TooMuch:
        return math.inf


class _LineCounter:
    """Counts the lines of files of /proc, and stops where that takes too long: their texts may be of any
    length, and the warden may not be kept from its next look."""

    def __init__(self) -> None:
        self._until = time.thread_time() + LOOK_CPU_SECONDS  # not of the clock: the machine may be busy

    def count(self, path: str, most: float = math.inf, start: bytes = b"") -> int:
        """Count lines that begin with `start`, up to `most` and some. OSError; TooMuch."""
        count = 0
        mark = b"\n" + start
        with open(path, "rb", buffering=0) as file:
            while count < most and (part := file.read(_READ)):
                count += part.count(mark)
                self.check()
        return count

    def check(self) -> None:
        """TooMuch where the measurement has taken too long."""
        if time.thread_time() > self._until:
            raise TooMuch


def _mappings(pid: str, lines: _LineCounter) -> int:
    """Measure the parts of an address space. A process that allows no look into itself counts as having as
    many as it may."""
    try:
        return lines.count(f"/proc/{pid}/maps") * MAPPING
    except PermissionError:
        return MOST_MAPPINGS * MAPPING
    except OSError:  # it ended meanwhile
        return 0


def _open_files(pid: str, lines: _LineCounter) -> int:
    """Measure the open files of a process, and what epolls and inotifies among them hold. Where they cannot
    be listed (its program may be executed, and not be read), any of them may be one."""
    count = 0
    watch_bytes = 0
    with suppress(OSError):  # it ended meanwhile
        count = os.stat(f"/proc/{pid}/fd").st_size  # 0 before Linux 6.2
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            return count * OPEN_FILE + count**2 * EPOLL_WATCH // 4 + min(count, MOST_INOTIFIES) * INOTIFY

        for number in numbers:
            lines.check()
            with suppress(OSError):  # it was closed meanwhile
                kind = os.readlink(f"/proc/{pid}/fd/{number}")
                if kind == "anon_inode:[eventpoll]":
                    watch_bytes += lines.count(f"/proc/{pid}/fdinfo/{number}", start=b"tfd:") * EPOLL_WATCH
                elif kind == "anon_inode:inotify":
                    watch_bytes += INOTIFY
    return count * OPEN_FILE + watch_bytes


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


def machine_is_short() -> bool:
    """True when the machine itself has hardly any memory left, whoever took it."""
    with open("/proc/meminfo", "rb") as file:
        words = [line.split() for line in file]
    sizes = {name: int(size) << 10 for name, size, *_ in words}
    divisor, smallest, largest = LOW_MEMORY
    threshold = min(max(sizes[b"MemTotal:"] // divisor, smallest), largest)
    return sizes[b"MemAvailable:"] < threshold
