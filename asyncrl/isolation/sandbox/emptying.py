"""Directories that end with their process, or are deleted when it was killed, whatever untrusted code left in
them."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
    # of names that the code cannot have used
    prefix = os.urandom(16).hex()
    count = 0
    ahead = [""]
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


@contextmanager
def own_directory(parent: str, prefix: str) -> Iterator[str]:
    """Make a directory with a name of its own, which is deleted in the end. It is locked meanwhile."""
    held = None
    while held is None:  # another process may have found it before it was locked
        path = f"{parent}/{prefix}{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        held = lock(path)
    try:
        yield path
    finally:
        remove(path)
        os.close(held)


def sweep(parent: str, prefix: str) -> None:
    """Delete the directories that processes which were killed have left. Others need not wait for that."""
    for name in os.listdir(parent):
        if name.startswith(prefix) and (held := lock(f"{parent}/{name}")) is not None:
            remove(f"{parent}/{name}")
            os.close(held)


def lock(directory: str) -> int | None:
    """Lock a directory; returns its descriptor. None if another process has locked or deleted it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        held = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(directory)
            return held
        except (BlockingIOError, FileNotFoundError):
            os.close(held)
    return None
