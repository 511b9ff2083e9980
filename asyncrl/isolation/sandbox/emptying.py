"""Delete what untrusted code left in a directory, whatever shape it has."""

from __future__ import annotations

import os


def remove(directory: str) -> None:
    """With all that is in it, as far as that goes: what cannot be deleted stays."""
    try:
        empty(directory)
        os.rmdir(directory)
    except OSError:
        return


def empty(directory: str) -> None:
    """Directories below are moved to the top and deleted there: neither paths nor the stack nor the number of
    open files grow with the depth of the tree, and no step leads up, where others' files may lie. OSError
    when it is in use."""
    os.chmod(directory, 0o700)
    top = os.open(directory, os.O_DIRECTORY)
    prefix, count, ahead = os.urandom(16).hex(), 0, [""]  # of names that the code cannot have used
    try:
        while ahead:
            name = ahead.pop()
            here = os.open(name or ".", os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for inner in _delete_files(here):
                    count += 1
                    ahead.append(f"{prefix}-{count}")
                    os.rename(inner, ahead[-1], src_dir_fd=here, dst_dir_fd=top)
            finally:
                os.close(here)
            if name:
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _delete_files(here: int) -> list[str]:
    """All but the directories, whose names are returned."""
    with os.scandir(here) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name, is_directory in kinds.items():
        if is_directory:
            os.chmod(name, 0o700, dir_fd=here)
        else:
            os.unlink(name, dir_fd=here)
    return [name for name, is_directory in kinds.items() if is_directory]
