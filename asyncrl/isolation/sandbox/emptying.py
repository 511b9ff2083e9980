"""Delete what untrusted code left in a directory, whatever shape it has."""

from __future__ import annotations

import os
import stat


def remove(directory: str) -> None:
    """Delete a directory with its contents. What cannot be deleted stays."""
    try:
        empty(directory)
        os.rmdir(directory)
    except OSError:
        return


def empty(directory: str) -> None:
    """Delete the contents of a directory. Directories inside are first moved to the top, so no path,
    recursion or number of open files grows with the depth of the tree, and no step goes up (`..`) out of it.
    OSError when something cannot be deleted, and for a link, which another user may have put there."""
    if not os.path.islink(directory):
        os.chmod(directory, 0o700)
    top = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
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
    """Delete the files of a directory; returns the names of its directories."""
    with os.scandir(here) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name, is_directory in kinds.items():
        if is_directory:
            os.chmod(name, 0o700, dir_fd=here)
        else:
            os.unlink(name, dir_fd=here)
    return [name for name, is_directory in kinds.items() if is_directory]


def make_private(directory: str) -> None:
    """Make a directory that only this user can open. PermissionError if another one is there."""
    os.makedirs(directory, 0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is open to other users; remove it")
