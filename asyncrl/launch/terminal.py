"""The terminal of a run under way. A launcher that waits for it would restart no process any more."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TextIO

from rich.console import Console as Terminal
from rich.live import Live

from asyncrl.observe.background import Background
from asyncrl.observe.table import PipeSafeTerminal

MOST = 1000  # texts that may wait for a terminal; what is printed beyond them is lost
PATIENCE = 2.0  # seconds, at the end


class BackgroundFile:
    """What rich writes to, in place of `file`: a thread of its own writes on, so that nothing waits while
    nobody reads (Ctrl-S, a full pipe, a connection that has stalled). OSError where `file` is none of the
    operating system's. Of a terminal that is closed nothing is said."""

    def __init__(self, file: TextIO) -> None:
        self._fd, self.encoding = file.fileno(), file.encoding
        file.flush()
        self._held: list[str] = []
        self.writer = Background("terminal", MOST)

    def write(self, text: str) -> int:
        self._held.append(text)
        return len(text)

    def flush(self) -> None:
        data = "".join(self._held).encode(self.encoding, "replace")
        self._held.clear()
        if data:
            self.writer.call(partial(self._put, data))

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def _put(self, data: bytes) -> None:
        with suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # another program has set the terminal so
                    select.select([], [self._fd], [])


@contextmanager
def open_terminal() -> Iterator[Terminal]:
    """Standard output. At the end what waits is written, for PATIENCE seconds."""
    try:
        file = BackgroundFile(sys.stdout)
    except (OSError, ValueError, AttributeError):  # closed, none, or a test's
        yield PipeSafeTerminal()
        return
    try:
        yield PipeSafeTerminal(file=file)  # type: ignore[arg-type]
    finally:
        file.writer.close(PATIENCE)


class LiveView(Live):
    """It leaves out pictures while the terminal has not taken the one before."""

    def refresh(self) -> None:
        file = self.console.file
        if not isinstance(file, BackgroundFile) or file.writer.idle:
            super().refresh()
