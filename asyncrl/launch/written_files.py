"""Logs and timelines that processes on other machines write, brought into the run directory.

There they write into a directory of this launch's own, in the run directory's place, so that files of other
runs or launches are never taken for theirs:

    RUN_DIR/NAME/elsewhere/LAUNCH/NAME/logs/rollout-1.log  ──►  RUN_DIR/NAME/logs/rollout-1.log

It is removed at the end of the launch; after a launcher that was killed, by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.launch.run_directory import run_directory
from asyncrl.weights.disk import weights_directory

PATTERNS = ("logs/*.log", "timeline/*.jsonl", "ratios/*.jsonl")
PIECE = 1 << 20  # bytes of a file, at once


def parent_elsewhere(config: RunConfig, cwd: str, launch: str) -> Path:
    """The `run_dir` of a launch's processes on another machine; `cwd`: the launcher's directory."""
    return Path(cwd) / run_directory(config) / "elsewhere" / launch


def claim(parent: Path, name: str) -> None:
    """Make the directory of a launch, and lock it for as long as this process lives; remove those beside it
    that no process has locked. Raises OSError."""
    parent.mkdir(parents=True, exist_ok=True)
    fcntl.flock(os.open(parent, os.O_RDONLY), fcntl.LOCK_SH)
    for other in parent.parent.iterdir():
        with suppress(OSError):  # it is locked, or another process has just removed it
            descriptor = os.open(other, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(other, name)
            finally:
                os.close(descriptor)


def remove(parent: Path, name: str) -> None:
    """Remove all that a launch has written on this machine, and what its keepers had in shared memory."""
    caches = weights_directory("shm", parent / name, name, needed_bytes=0)
    for directory in (parent, caches):
        shutil.rmtree(directory, ignore_errors=True)


class WrittenFiles:
    """Reads what a launch has written on this machine, below `parent_elsewhere`."""

    def __init__(self, parent: Path, name: str) -> None:
        claim(parent, name)
        self._parent, self._run_dir = parent, parent / name

    def after(self, read: Mapping[str, int]) -> dict[str, bytes]:
        """Return, by name, at most PIECE bytes of each file, after those that were read of it."""
        found = {}
        for path in (path for pattern in PATTERNS for path in self._run_dir.glob(pattern)):
            name = str(path.relative_to(self._run_dir))
            with suppress(FileNotFoundError), path.open("rb") as file:  # old ratios are deleted
                file.seek(read.get(name, 0))
                found[name] = file.read(PIECE)
        return found

    def remove(self) -> None:
        """Remove all of it, once it was read."""
        remove(self._parent, self._run_dir.name)


class FetchedFiles:
    """Appends what was fetched of one machine to the files of the run directory here. `read`: bytes of each
    file that is there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.read: dict[str, int] = {}

    def add(self, found: Mapping[str, bytes]) -> None:
        """Add the bytes of all files; names that are no files of processes are left out. Raises OSError."""
        for name, new in found.items():
            if len(Path(name).parts) != 2 or not any(Path(name).match(pattern) for pattern in PATTERNS):
                continue
            if new:
                path = self._run_dir / name
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as file:
                    file.write(new)
                self.read[name] = self.read.get(name, 0) + len(new)
        for gone in self.read.keys() - found.keys():  # every step has ratios of its own, later deleted
            del self.read[gone]
