"""Directories that end with their process, or are deleted after the process was killed, whatever files
untrusted code left inside."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def remove_directory(directory: str) -> None:
    """Delete a directory with its contents. Files that cannot be deleted stay."""
    try:
        empty_directory(directory)
        os.rmdir(directory)
    except OSError:
        return


def empty_directory(directory: str) -> None:
    """Delete the contents of a directory. Directories inside are first moved to the top, so that no path,
    recursion or number of open files grows with the depth of the tree, and no step goes up (`..`).
    OSError: something cannot be deleted, or the directory is a link, perhaps placed by another user."""
    if not os.path.islink(directory):
        os.chmod(directory, 0o700)
    top_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
    # A prefix of names that the code cannot have used
    name_prefix = os.urandom(16).hex()
    moved_count = 0

    pending_names = [""]

    try:
        while pending_names:
            name = pending_names.pop()
            directory_fd = os.open(name or ".", os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top_fd)

            try:
                for inner_name in _delete_files(directory_fd):
                    moved_count += 1
                    pending_names.append(f"{name_prefix}-{moved_count}")
                    os.rename(inner_name, pending_names[-1], src_dir_fd=directory_fd, dst_dir_fd=top_fd)
            finally:
                os.close(directory_fd)

            if name:
                os.rmdir(name, dir_fd=top_fd)
    finally:
        os.close(top_fd)


def _delete_files(directory_fd: int) -> list[str]:
    """Delete the files of a directory; return the names of the directories inside."""
    with os.scandir(directory_fd) as entries:
        is_directory_by_name = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}

    for name, is_directory in is_directory_by_name.items():
        if is_directory:
            os.chmod(name, 0o700, dir_fd=directory_fd)
        else:
            os.unlink(name, dir_fd=directory_fd)

    return [name for name, is_directory in is_directory_by_name.items() if is_directory]


def make_private_directory(directory: str) -> None:
    """Make a directory that only this user can open. PermissionError: the path is no directory, or belongs to
    another user, or is open to others."""
    os.makedirs(directory, 0o700, exist_ok=True)
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is open to other users; remove it")


@contextmanager
def locked_directory(parent: str, prefix: str) -> Iterator[str]:
    """Make a directory with a unique name, which stays locked and is deleted in the end."""
    lock_fd = None
    while lock_fd is None:  # another process may have swept the directory before it was locked
        path = f"{parent}/{prefix}{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        lock_fd = lock_directory(path)

    try:
        yield path
    finally:
        remove_directory(path)
        os.close(lock_fd)


def delete_abandoned(parent: str, prefix: str) -> None:
    """Delete the directories left by killed processes. Running processes need not wait for that."""
    for name in os.listdir(parent):
        if name.startswith(prefix) and (lock_fd := lock_directory(f"{parent}/{name}")) is not None:
            remove_directory(f"{parent}/{name}")
            os.close(lock_fd)


def lock_directory(directory: str) -> int | None:
    """Lock a directory; return the descriptor. None: another process has locked or deleted the directory."""
    with suppress(FileNotFoundError, NotADirectoryError):
        lock_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(directory)
            return lock_fd
        except (BlockingIOError, FileNotFoundError):
            os.close(lock_fd)
    return None
