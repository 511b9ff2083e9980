"""A power cut: of a directory only what had been fsynced is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class DurableFiles:
    """Notes each fsync in a directory, `recorded()`. A file comes back as it was at its last one, if its
    directory was fsynced after it was made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[Path, set[str]] = {}
        self.data: dict[Path, bytes] = {}
        for path in [root, *root.rglob("*")]:  # what is there already is old
            self._note(path)

    def _note(self, path: Path) -> None:
        if path.is_dir():
            self.names[path] = {child.name for child in path.iterdir()}
        elif path.is_file():
            self.data[path] = path.read_bytes()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        fsync = os.fsync

        def noting(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_relative_to(self.root):
                self._note(path)
                self._note(path.with_name(path.name.removesuffix("-wal")))  # SQLite fsyncs it by itself

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", noting)
            yield

    def keep(self, pattern: str) -> None:
        """The data of these files happens to reach the disk now."""
        for path in self.root.glob(pattern):
            self._note(path)
            self.names[path.parent].add(path.name)

    def cut_power(self) -> None:
        """Put the directory into the state that is found afterwards."""
        shutil.rmtree(self.root)
        self._restore(self.root)

    def _restore(self, directory: Path) -> None:
        directory.mkdir()
        for name in self.names.get(directory, set()):
            path = directory / name
            if path in self.names:
                self._restore(path)
            elif not path.name.endswith("-shm"):
                path.write_bytes(self.data.get(path, b""))
