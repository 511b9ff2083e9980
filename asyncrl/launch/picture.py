"""run.png while the run goes on: drawn by a process of its own, of low priority, as a drawing takes a second
of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EVERY = 30.0  # seconds between two drawings, at least
END = 20.0  # seconds for one that was killed to be gone


class LivePicture:
    """Keeps a picture of the run in its directory. One drawing at a time; what fails is tried again with a
    later step, and the launcher draws the last one itself."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = float("-inf")

    def update(self) -> None:
        """After a row of metrics: start a drawing, unless there was one a short time ago."""
        now = time.monotonic()
        if now - self._begun < EVERY or (self._process and self._process.poll() is None):
            return
        self._begun = now
        with suppress(OSError):  # no more processes, or no memory for one: the run is worth more
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.observe.plot", str(self._run_dir.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the launcher
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The newest drawing, over or under way."""
        return self._process

    def close(self) -> None:
        """End the one under way."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # of low priority, on a busy machine
                self._process.wait(END)


@contextmanager
def open_picture(run_dir: Path) -> Iterator[LivePicture]:
    picture = LivePicture(run_dir)
    try:
        yield picture
    finally:
        picture.close()
