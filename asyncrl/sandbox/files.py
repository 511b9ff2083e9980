"""Delete what somebody else left in a directory, whatever shape it has."""

from __future__ import annotations

import os


def empty(directory: str) -> None:
    """Nothing of it can be in use. What lies deeper is moved up first, each thing once: no path grows long,
    and nothing recurs, however deep the tree is."""
    os.chmod(directory, 0o700)
    unique, moved = os.urandom(8).hex(), 0
    while entries := list(os.scandir(directory)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):
                    os.chmod(below.path, 0o700)  # it is written to when it moves: its parent changes
                    os.rename(below.path, f"{directory}/{unique}{moved}")
                    moved += 1
                else:
                    os.unlink(below.path)
            os.rmdir(entry.path)
