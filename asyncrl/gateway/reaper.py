"""Kills the process groups that a worker leaves behind when it dies by kill -9.

    worker ── "+group", "-group" ──► reaper ── at end-of-file: SIGKILL ──► groups that are left

A process of its own, one per worker, started with the first group: the kernel's own signal
(PR_SET_PDEATHSIG) reaches a child, but not the child's children. This file is its program, too, which needs
nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


class Reaper:
    """Owner of the process. May be used from several threads."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def watching(self, group: int) -> Iterator[None]:
        """If this process dies in the body, the group is killed."""
        with self._lock:
            self._groups.add(group)
            try:
                self._tell(f"+{group}\n")
            except BaseException:  # the body never begins
                self._groups.discard(group)
                raise
        try:
            yield
        finally:
            with self._lock:
                self._groups.discard(group)
                self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._write(self._process, line)
                return
            self._process.wait()  # somebody killed it
        self._process = _start()
        self._write(self._process, "".join(f"+{group}\n" for group in self._groups))

    @staticmethod
    def _write(process: subprocess.Popen[bytes], lines: str) -> None:
        assert process.stdin is not None
        process.stdin.write(lines.encode())


def _start() -> subprocess.Popen[bytes]:
    """In a session of its own: what is sent to our group is not meant for it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def reap(lines: Iterable[str]) -> None:
    """The program."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    reap(sys.stdin)
