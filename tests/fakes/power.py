"""A power cut: of a directory is left what had been fsynced, and perhaps some of what was written since."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import DATABASE

SECTOR = 512  # bytes that a disk writes whole or not at all
HEADER = 24  # bytes that are other ones when SQLite begins a log anew, and the same in a database for ever


class DurableFiles:
    """Records each fsync in a directory.

    A file comes back as of its last fsync, if its directory was fsynced after the file was made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[Path, set[str]] = {}
        self.data: dict[Path, bytes] = {}
        for path in [root, *root.rglob("*")]:  # present files are old
            self._note(path)

    def _note(self, path: Path) -> None:
        if path.is_dir():
            self.names[path] = {child.name for child in path.iterdir()}
            for child in path.iterdir():
                if child.is_dir():  # new ones are there, empty
                    self.names.setdefault(child, set())
        elif path.is_file():
            self.data[path] = path.read_bytes()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """SQLite fsyncs the database by itself: at the latest with our fsync of its log, and before it
        cuts the log off."""
        fsync = os.fsync
        compact = RunStore._shorten_log
        rename = os.rename

        def noting(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_relative_to(self.root):
                self._note(path)
                self._note(path.with_name(path.name.removesuffix("-wal")))

        def renaming(old: Path, new: Path) -> None:
            """Rename a directory of copies, whose files were fsynced before."""
            rename(old, new)
            for path in new.iterdir():
                self._note(path)
            self._note(new)

        def compacting(store: RunStore) -> None:
            compact(store)
            self._note(store._run_dir / DATABASE)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", noting)
            patch.setattr(os, "rename", renaming)
            patch.setattr(RunStore, "_shorten_log", compacting)
            yield

    def keep(self, pattern: str) -> None:
        """Let the data of these files reach the disk now."""
        for path in self.root.glob(pattern):
            self._note(path)
            self.names[path.parent].add(path.name)

    def cut_power(self, dice: random.Random | None = None) -> None:
        """Put the directory into a state that may be found afterwards: with `dice` some of what was not
        fsynced is there, too, of each file and directory other parts; else none."""
        if dice is not None:
            self._written_since(dice, self.root)
        shutil.rmtree(self.root)
        self._restore(self.root)

    def _written_since(self, dice: random.Random, directory: Path) -> None:
        now = {path.name for path in directory.iterdir()}
        known_names = self.names.get(directory, set())
        self.names[directory] = (now & known_names) | {
            name for name in sorted(now ^ known_names) if dice.random() < 0.5
        }

        for path in sorted(directory.iterdir()):
            if path.is_dir():
                self._written_since(dice, path)
            else:
                self.data[path] = _mixed(dice, self.data.get(path, b""), path.read_bytes())

    def _restore(self, directory: Path) -> None:
        directory.mkdir()
        for name in sorted(self.names.get(directory, set())):
            path = directory / name
            if path in self.names:
                self._restore(path)
            elif not path.name.endswith("-shm"):
                path.write_bytes(self.data.get(path, b""))


def _mixed(dice: random.Random, before: bytes, now: bytes) -> bytes:
    """Return a file between two states: nothing of the new state, all of it, its beginning, or any of its
    sectors."""
    way = dice.choice(["before", "now", "beginning", "sectors"])
    if way in ("before", "now"):
        return before if way == "before" else now
    # A file is cut off at once. One that was begun anew has nothing left of the old one, as SQLite supposes:
    # it fsyncs the new header of a log before it goes on.
    before = before[: len(now)] if before[:HEADER] == now[:HEADER] else b""
    size = dice.choice([len(now), dice.randint(*sorted((len(before), len(now))))])
    old = before[:size].ljust(size, b"\0")
    new = now[:size].ljust(size, b"\0")
    until = dice.randint(0, size)
    sector_starts = range(0, size, SECTOR)
    chosen = [at < until if way == "beginning" else dice.random() < 0.5 for at in sector_starts]
    return b"".join(
        (new if new_one else old)[at : at + SECTOR] for at, new_one in zip(sector_starts, chosen, strict=True)
    )
