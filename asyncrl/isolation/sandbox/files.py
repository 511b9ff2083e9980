"""Delete what somebody else left in a directory, whatever shape it has."""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple


class Level(NamedTuple):
    """A directory on the way down. `number`: its device and inode; `ahead`: what of it is still to delete."""

    name: str
    number: tuple[int, int]
    ahead: list[str]


def remove(directory: str, seconds: float = math.inf) -> None:
    """With all that is in it, as far as that goes: what cannot be deleted, or not in time, stays."""
    try:
        empty(directory, time.monotonic() + seconds)
        os.rmdir(directory)
    except OSError:
        return


def empty(directory: str, until: float = math.inf) -> None:
    """One step down or up at a time: neither paths nor the stack grow with the depth of the tree, nor does
    the number of open files. OSError when it is in use, or on the clock's `until`."""
    os.chmod(directory, 0o700)
    here = os.open(directory, os.O_DIRECTORY)
    try:
        way = [Level("", _number(here), _strip(here, until))]
        while way[-1].ahead or len(way) > 1:
            if way[-1].ahead:
                name = way[-1].ahead.pop()
                here = _step(here, name)
                way.append(Level(name, _number(here), _strip(here, until)))
            else:
                done = way.pop()
                here = _step(here, "..")
                if _number(here) != way[-1].number:  # above it may lie what is not ours
                    raise OSError(f"{done.name!r} was moved while it was deleted")
                os.rmdir(done.name, dir_fd=here)
    finally:
        os.close(here)


def _strip(here: int, until: float) -> list[str]:
    """Delete all but the directories, whose names are returned."""
    with os.scandir(here) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name, is_directory in kinds.items():
        if time.monotonic() > until:
            raise TimeoutError
        if is_directory:
            os.chmod(name, 0o700, dir_fd=here)
        else:
            os.unlink(name, dir_fd=here)
    return [name for name, is_directory in kinds.items() if is_directory]


def _step(here: int, name: str) -> int:
    there = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there


def _number(here: int) -> tuple[int, int]:
    status = os.fstat(here)
    return status.st_dev, status.st_ino
