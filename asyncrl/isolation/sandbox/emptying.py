"""Delete what somebody else left in a directory, whatever shape it has."""

from __future__ import annotations

import math
import os
import time


def remove(directory: str, seconds: float = math.inf) -> None:
    """With all that is in it, as far as that goes: what cannot be deleted, or not in time, stays."""
    try:
        empty(directory, time.monotonic() + seconds)
        os.rmdir(directory)
    except OSError:
        return


def empty(directory: str, until: float = math.inf) -> None:
    """Directories below are moved to the top and deleted there: neither paths nor the stack nor the number of
    open files grow with the depth of the tree, and no step leads up, where others' files may lie. OSError
    when it is in use, or on the clock's `until`."""
    os.chmod(directory, 0o700)
    top = os.open(directory, os.O_DIRECTORY)
    prefix, count, ahead = os.urandom(16).hex(), 0, [""]  # names that nobody has planted
    try:
        while ahead:
            name = ahead.pop()
            here = os.open(name or ".", os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for inner in _delete_files(here, until):
                    count += 1
                    ahead.append(f"{prefix}-{count}")
                    os.rename(inner, ahead[-1], src_dir_fd=here, dst_dir_fd=top)
            finally:
                os.close(here)
            if name:
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _delete_files(here: int, until: float) -> list[str]:
    """All but the directories, whose names are returned."""
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
