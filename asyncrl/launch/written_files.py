"""Logs and timelines that processes on other machines write, brought into the run directory.

There they write into a directory of this launch's own, in the run directory's place, so that files of other
runs or launches are never taken for theirs:

    RUN_DIR/NAME/elsewhere/LAUNCH/NAME/logs/rollout-1.log  ──►  RUN_DIR/NAME/logs/rollout-1.log
"""

from __future__ import annotations

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


class WrittenFiles:
    """What a launch has written on this machine, below `parent_elsewhere`."""

    def __init__(self, parent: Path, name: str) -> None:
        self._parent, self._run_dir = parent, parent / name

    def after(self, read: Mapping[str, int]) -> dict[str, bytes]:
        """By name at most PIECE bytes of each file, from where so many bytes of it were read."""
        found = {}
        for path in (path for pattern in PATTERNS for path in self._run_dir.glob(pattern)):
            name = str(path.relative_to(self._run_dir))
            with suppress(FileNotFoundError), path.open("rb") as file:  # old ratios are deleted
                file.seek(read.get(name, 0))
                if new := file.read(PIECE):
                    found[name] = new
        return found

    def remove(self) -> None:
        """All of it, once it was read, and what keepers had in shared memory."""
        caches = weights_directory("shm", self._run_dir, self._run_dir.name, needed_bytes=0)
        for directory in (self._parent, caches):
            shutil.rmtree(directory, ignore_errors=True)


class FetchedFiles:
    """Appends what was fetched of one machine to the files of the run directory here."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.read: dict[str, int] = {}

    def add(self, found: Mapping[str, bytes]) -> None:
        """Names that are no files of processes are left out. Raises OSError."""
        for name, new in found.items():
            if len(Path(name).parts) != 2 or not any(Path(name).match(pattern) for pattern in PATTERNS):
                continue
            path = self._run_dir / name
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(new)
            self.read[name] = self.read.get(name, 0) + len(new)
