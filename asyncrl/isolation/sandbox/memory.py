"""Measures the memory of a sandbox's processes, and the memory that the kernel holds for the processes.

Most objects that the kernel makes for a process are in no figure of /proc. Kinds of objects that can be
numerous are counted by size: sockets, open files, epolls, inotifies, locks of files, mappings.
system_calls.py refuses further kinds. With a memory cgroup (cgroup.py), the kernel counts every object
itself."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress

SOCKET_BYTES = 1 << 19  # two buffers as below, and options (optmem_max: 128 KiB)
BUFFER_BYTES = 212_992  # a socket's buffer, unless the machine's administrator has set another default
OPEN_FILE_BYTES = 5 << 10  # half a pipe of two pages, the largest kind of open file that is not listed here
INOTIFY_BYTES = 8 << 20  # 16,384 unread events
MAX_INOTIFIES = 16  # assumed for a process that cannot be inspected
EPOLL_WATCH_BYTES = 256  # the kernel's record of one watched file
MAPPING_BYTES = 256  # the kernel's record of one mapping
MAX_MAPPINGS = 65_530  # the kernel's limit for a process (vm.max_map_count)
MAX_LOCKS = 10_000  # locks of ranges of files: the kernel's time to list them grows with the square
LOOK_CPU_SECONDS = 0.5  # limit of one measurement, which usually takes some milliseconds
LOW_MEMORY = 64, 256 << 20, 1 << 30  # a machine is short of memory with 1/64 left: at least, at most, bytes

_READ_BYTES = 1 << 16


class TooMuchToMeasure(Exception):
    """The processes hold so much that a measurement takes too long."""


def measure_processes(max_bytes: int) -> float:
    """Measure the bytes of memory of every process in /proc: anonymous pages, swapped or not, page tables,
    and memory that the kernel holds for the process. Pages and open files that two processes share after a
    fork count twice. Return early, with the sum so far, once the sum exceeds `max_bytes`; return infinity
    with MAX_LOCKS locks of files, and if the measurement takes too long."""
    line_counter = _LineCounter()
    try:
        with suppress(OSError):  # a kernel without locks
            # /proc/locks lists the locks of this process namespace
            if line_counter.count_lines("/proc/locks", MAX_LOCKS) >= MAX_LOCKS:
                return math.inf
        with open("/proc/net/sockstat", "rb") as file:
            used_bytes = int(file.readline().split()[2]) * SOCKET_BYTES

        for pid in filter(str.isdigit, os.listdir("/proc")):
            if used_bytes > max_bytes:
                break
            used_bytes += (
                _measure_pages(pid)
                + _measure_open_files(pid, line_counter)
                + _measure_mappings(pid, line_counter)
            )
        return used_bytes
    except TooMuchToMeasure:
        return math.inf


class _LineCounter:
    """Count the lines of files in /proc, and stop after LOOK_CPU_SECONDS: the files may be of any length,
    and the warden must go on."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + LOOK_CPU_SECONDS  # CPU time, as the machine may be busy

    def count_lines(self, path: str, max_lines: float = math.inf, start: bytes = b"") -> int:
        """Count lines that begin with `start`, at least up to `max_lines`. OSError; TooMuchToMeasure."""
        line_count = 0
        line_start = b"\n" + start

        with open(path, "rb", buffering=0) as file:
            while line_count < max_lines and (chunk := file.read(_READ_BYTES)):
                line_count += chunk.count(line_start)
                self.check_time()
        return line_count

    def check_time(self) -> None:
        """Raise TooMuchToMeasure if the measurement has taken too long."""
        if time.thread_time() > self._deadline:
            raise TooMuchToMeasure


def _measure_mappings(pid: str, line_counter: _LineCounter) -> int:
    """Measure the mappings of a process. A process that cannot be inspected counts with the most mappings."""
    try:
        return line_counter.count_lines(f"/proc/{pid}/maps") * MAPPING_BYTES
    except PermissionError:
        return MAX_MAPPINGS * MAPPING_BYTES
    except OSError:  # the process ended meanwhile
        return 0


def _measure_open_files(pid: str, line_counter: _LineCounter) -> int:
    """Measure the open files of a process, with the memory of epolls and inotifies. If the files cannot be
    listed (a program may be executable and not readable), any file may be an epoll or inotify."""
    file_count = 0
    watch_bytes = 0
    with suppress(OSError):  # the process ended meanwhile
        file_count = os.stat(f"/proc/{pid}/fd").st_size  # 0 before Linux 6.2
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            return (
                file_count * OPEN_FILE_BYTES
                + file_count**2 * EPOLL_WATCH_BYTES // 4
                + min(file_count, MAX_INOTIFIES) * INOTIFY_BYTES
            )

        for descriptor in descriptors:
            line_counter.check_time()
            with suppress(OSError):  # the file was closed meanwhile
                link_target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if link_target == "anon_inode:[eventpoll]":
                    watch_bytes += (
                        line_counter.count_lines(f"/proc/{pid}/fdinfo/{descriptor}", start=b"tfd:")
                        * EPOLL_WATCH_BYTES
                    )
                elif link_target == "anon_inode:inotify":
                    watch_bytes += INOTIFY_BYTES
    return file_count * OPEN_FILE_BYTES + watch_bytes


def _measure_pages(pid: str) -> int:
    """Measure the pages of one process. A first thread that ended before other threads shows nothing."""
    for _, status in thread_statuses(pid):
        size_lines = [
            line for line in status.splitlines() if line.startswith((b"RssAnon", b"VmPTE", b"VmSwap"))
        ]
        if size_lines:
            return sum(int(line.split()[1]) for line in size_lines) << 10
    return 0


def thread_statuses(pid: str) -> Iterator[tuple[str, bytes]]:
    """Read the status of each thread of a process in /proc."""
    with suppress(OSError):  # the process ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/status", "rb") as file:
                yield task, file.read()


def machine_is_short() -> bool:
    """Return whether the machine itself has hardly any memory left, for whatever reason."""
    with open("/proc/meminfo", "rb") as file:
        line_words = [line.split() for line in file]
    memory_sizes = {name: int(size) << 10 for name, size, *_ in line_words}

    divisor, smallest, largest = LOW_MEMORY
    threshold = min(max(memory_sizes[b"MemTotal:"] // divisor, smallest), largest)
    return memory_sizes[b"MemAvailable:"] < threshold
