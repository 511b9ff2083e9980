"""Signals to all processes of a sandbox, with or without a process namespace."""

from __future__ import annotations

import os
from contextlib import suppress

from asyncrl.isolation.sandbox.kernel import SIGKILL
from asyncrl.isolation.wrapper import descendants


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


def kill(pid: int, number: int) -> None:
    """Signal a process, or as `os.kill` has it a group (negative) or all (-1), if it is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
