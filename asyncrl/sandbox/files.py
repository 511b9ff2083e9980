"""Delete what somebody else left in a directory, whatever shape it has."""

from __future__ import annotations

import os


def empty(directory: str) -> None:
    """Nothing of it can be in use. One step down or up at a time: neither paths nor the stack grow with the
    depth of the tree, nor does the number of open files."""
    os.chmod(directory, 0o700)
    here = os.open(directory, os.O_DIRECTORY)
    ahead, way = [_strip(here)], [""]  # of each level above: directories still to delete, its own name
    while True:
        if ahead[-1]:
            way.append(ahead[-1].pop())
            here = _step(here, way[-1])
            ahead.append(_strip(here))
        elif len(way) > 1:
            ahead.pop()
            here = _step(here, "..")
            os.rmdir(way.pop(), dir_fd=here)
        else:
            os.close(here)
            return


def _strip(here: int) -> list[str]:
    """Delete all but the directories, whose names are returned."""
    with os.scandir(here) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name, is_directory in kinds.items():
        if is_directory:
            os.chmod(name, 0o700, dir_fd=here)
        else:
            os.unlink(name, dir_fd=here)
    return [name for name, is_directory in kinds.items() if is_directory]


def _step(here: int, name: str) -> int:
    there = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there
