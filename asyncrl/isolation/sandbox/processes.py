"""Signals to all that runs in a sandbox, with a process namespace and without."""

from __future__ import annotations

import os
from collections.abc import Callable

SIGKILL = 9


def end_all(alone: bool) -> dict[int, int]:
    """Kill every process below this one and wait until none is left: their exit statuses by process id.

    `alone`: a signal to all reaches no others. Orphans must have become children of this process, as they do
    of the first of a namespace and of a subreaper.
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
    for pid in (-1,) if alone else descendants():
        kill(pid, number)


def descendants() -> list[int]:
    """Process ids of all below this one."""
    children = _told if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else _searched()
    found, ahead = [], [os.getpid()]
    while ahead:
        below = children(ahead.pop())
        found += below
        ahead += below
    return found


def _told(pid: int) -> list[int]:
    """Children, as the kernel lists them for each thread."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:
        return found  # it ended meanwhile
    return found


def _searched() -> Callable[[int], list[int]]:
    """The same from every process's parent, for kernels without such lists: slow on a large machine."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, [])


def kill(pid: int, number: int) -> None:
    """Signal a process, or as `os.kill` has it a group (negative) or all (-1); nobody there is no error."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
