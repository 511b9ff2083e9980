"""Moves files into and out of a sandbox: one file, or all changed files, as an archive for another sandbox.

    upper directory of the overlay, or home ── collect ──► archive ── apply ──► the code's files

A child of the warden does the work, with the rights of the code. The child imports nothing, as an image does
not have this library. The owner only reads entries: an archive is untrusted."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import translate
from functools import partial
from typing import BinaryIO, NamedTuple

from asyncrl.isolation.sandbox import frames, kernel

FILE = b"f"
DIRECTORY = b"d"
OPAQUE = b"o"
LINK = b"l"
DELETED = b"x"
END = b"."
"""Kinds of entries. OPAQUE: a directory that hides the contents of the image's directory. END comes last, so
that a truncated archive is noticed."""
ENTRY_HEADER = struct.Struct("!cIqHQ")  # kind, mode, mtime in ns, bytes of the path, bytes of the content
MAX_ENTRIES = 200_000
MAX_PATH_BYTES = kernel.PATH_MAX - 1
CHUNK_BYTES = 1 << 20
PIPE_FD = 0  # the pipe between the child and the owner
OPEN_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
OPEN_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class ChangesError(Exception):
    """The changes cannot be collected, read or applied."""


class Entry(NamedTuple):
    """Describe the file at `path`: below the root of an image, or below the home without an image. `content`:
    the bytes of a file, or the target of a link."""

    kind: bytes
    path: str
    mode: int = 0
    mtime_ns: int = 0
    content: bytes = b""

    def frame(self) -> bytes:
        return _encode_head(self, len(self.content)) + self.content


def _encode_head(entry: Entry, content_size: int) -> bytes:
    path = os.fsencode(entry.path)
    return ENTRY_HEADER.pack(entry.kind, entry.mode, entry.mtime_ns, len(path), content_size) + path


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """Make an archive of entries."""
    return b"".join(entry.frame() for entry in (*entries, Entry(END, "")))


def read_entries(archive: bytes) -> Iterator[Entry]:
    """Read an archive. ChangesError: `collect_changes` cannot have written this archive."""
    return _decode_entries(io.BytesIO(archive).read, len(archive))


def _decode_entries(read_bytes: Callable[[int], bytes], max_bytes: int) -> Iterator[Entry]:
    """Read entries, each of at most `max_bytes`. `read_bytes` returns the next bytes, `b""` at the end."""
    while True:
        kind, mode, mtime_ns, path_size, content_size = ENTRY_HEADER.unpack(
            b"".join(_read_parts(read_bytes, ENTRY_HEADER.size))
        )
        path = os.fsdecode(b"".join(_read_parts(read_bytes, path_size)))

        if kind == END:
            return
        is_known = kind in (FILE, DIRECTORY, OPAQUE, LINK, DELETED)
        if (
            not is_known
            or mode > 0o7777
            or content_size > max_bytes
            or "\0" in path
            or {"", ".", ".."} & {*path.split("/")}
        ):
            raise ChangesError(f"the archive of changes contains an invalid entry: {path[:200]!r}")
        yield Entry(kind, path, mode, mtime_ns, b"".join(_read_parts(read_bytes, content_size)))


def _read_parts(read_bytes: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """Read exactly `size` bytes."""
    while size > 0:
        if not (part := read_bytes(min(size, CHUNK_BYTES))):
            raise ChangesError("the archive of changes, or a file, is incomplete")
        yield part
        size -= len(part)


def match_globs(globs: Iterable[str], include_contents: bool = False) -> Callable[[str], bool]:
    """Make a check of paths: globs that begin with a slash match entire paths, other globs the last name.
    `include_contents`: also match paths inside a matching directory. All globs become one expression, as
    paths may be long and globs many."""
    contents_glob = "/*" * include_contents
    path_globs = (glob if glob.startswith("/") else f"*/{glob}" for glob in globs)
    matches = re.compile(
        "|".join(translate(path_glob + contents_glob) for path_glob in path_globs) or "(?!)"
    ).match
    return lambda path: matches(f"/{path}{contents_glob[:1]}") is not None


def encode_request(max_bytes: int, top_directory: str, roots: Sequence[str], globs: Iterable[str]) -> bytes:
    """Make the source of a request. `roots`: absolute directories below `top_directory`; empty: all changes.
    ValueError: a root lies elsewhere, or contains a NUL."""
    relative_roots = [os.path.relpath(root, top_directory) for root in roots or (top_directory,)]

    if any(path.startswith("../") or "\0" in path for path in relative_roots):
        raise ValueError(
            f"changes are collected only from directories below {top_directory}, not from {roots!r}"
        )
    return json.dumps(
        (max_bytes, ["" if path == "." else path for path in relative_roots], list(globs))
    ).encode()


# -- in the sandbox, in a child of the warden ----------------------------------------------------------------


def run_step(kind: bytes, top_directory: str, changed_fd: int, source: bytes) -> int:
    """Run the step of a request; return the exit status. `top_directory`: the directory that can change, `/`
    in an image. `changed_fd`: the directory that holds the changes: `top_directory`, or the upper
    directory."""
    try:
        STEPS[kind](top_directory, changed_fd, source)
    except (ChangesError, OSError) as error:
        os.write(2, str(error).encode(errors="replace"))
        return 1
    return 0


def read_file(_: str, __: int, source: bytes) -> None:
    """Write a file to the pipe. `source`: the limit of bytes, and the path."""
    max_bytes, path = json.loads(source)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe must not block
        data = file.read(max_bytes + 1) or b""

    if len(data) > max_bytes:
        raise ChangesError(f"the file is larger than {max_bytes} bytes")
    frames.write_all(PIPE_FD, data)


def write_file(_: str, __: int, source: bytes) -> None:
    """Write a file from the pipe, and make its directories. `source`: the path of the file."""
    path = os.fsdecode(source)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        while data := os.read(PIPE_FD, CHUNK_BYTES):
            file.write(data)


def collect_changes(top_directory: str, changed_fd: int, source: bytes) -> None:
    """Write an archive of all changes below some directories to the pipe, without skipped names."""
    max_bytes, roots, skip_globs = json.loads(source)

    with open(PIPE_FD, "wb", CHUNK_BYTES, closefd=False) as pipe:
        collector = _Collector(top_directory, changed_fd, pipe, max_bytes, skip_globs)
        try:
            for root in sorted(roots):
                collector.collect_below(root)
        finally:
            collector.restore_modes()
        pipe.write(Entry(END, "").frame())


class _Collector:
    def __init__(
        self, top_directory: str, changed_fd: int, pipe: BinaryIO, max_bytes: int, skip_globs: Sequence[str]
    ) -> None:
        self._top_directory = top_directory
        self._changed_fd = changed_fd
        self._pipe = pipe
        self._is_skipped = match_globs(skip_globs)
        self._max_bytes = self._remaining_bytes = max_bytes
        self._entry_count = 0
        # Modes of directories before the directories were made readable.
        self._original_modes = {"": stat.S_IMODE(os.fstat(changed_fd).st_mode)}
        os.fchmod(changed_fd, 0o700)

    def collect_below(self, root: str) -> None:
        """Collect the changes below a directory. A path that is no longer a directory counts as deleted."""
        opaque = False
        path = ""

        for name in filter(None, root.split("/")):
            parent = path
            path = _join_path(path, name)
            if os.path.islink(f"{self._top_directory}/{path}"):
                raise ChangesError(f"{path} is a link; name the link's target directory instead")

            with _open_below(self._changed_fd, parent) as directory_fd:
                status = _stat_entry(directory_fd, name)
                if not status and not opaque:
                    return  # nothing changed there
                if not status or not stat.S_ISDIR(status.st_mode):
                    self._write_head(DELETED, root)
                    return
                self._make_readable(directory_fd, name, path, status)

            with _open_below(self._changed_fd, path) as directory_fd:
                opaque |= _is_opaque(directory_fd)

        self._write_tree(root, opaque)

    def restore_modes(self) -> None:
        for path, mode in reversed(self._original_modes.items()):  # the innermost first
            with _open_below(self._changed_fd, path) as directory_fd:
                os.fchmod(directory_fd, mode)

    def _write_tree(self, top_path: str, opaque: bool) -> None:
        """Write directories before their contents, and names in their order."""
        pending_paths = [top_path]
        while pending_paths:
            path = pending_paths.pop()
            with _open_below(self._changed_fd, path) as directory_fd:
                if path:
                    status = os.fstat(directory_fd)
                    mode = self._original_modes.get(path, stat.S_IMODE(status.st_mode))
                    kind = OPAQUE if _is_opaque(directory_fd) or (opaque and path == top_path) else DIRECTORY
                    self._write_head(kind, path, mode, status.st_mtime_ns)

                inner_directories = []
                names = os.listdir(directory_fd)
                self._entry_count += len(names)
                self._refuse_if(self._entry_count > MAX_ENTRIES, f"{MAX_ENTRIES} files")

                for name in sorted(names, key=os.fsencode):
                    inner_path = _join_path(path, name)
                    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)

                    if self._is_skipped(inner_path):
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        self._refuse_long_path(inner_path)  # before the directory is opened
                        self._make_readable(directory_fd, name, inner_path, status)
                        inner_directories.append(inner_path)
                    else:
                        self._write_file(directory_fd, name, inner_path, status)
                pending_paths += reversed(inner_directories)

    def _make_readable(self, parent_fd: int, name: str, path: str, status: os.stat_result) -> None:
        if status.st_mode & 0o700 != 0o700:
            self._original_modes[path] = stat.S_IMODE(status.st_mode)
            os.chmod(name, 0o700, dir_fd=parent_fd)

    def _write_file(self, parent_fd: int, name: str, path: str, status: os.stat_result) -> None:
        """Write a file or a link. Sockets and pipes are left out; in an image sockets and pipes count as
        deleted, as do the devices by which overlayfs deletes."""
        mode = stat.S_IMODE(status.st_mode)
        file_type = stat.S_IFMT(status.st_mode)

        if file_type == stat.S_IFREG:
            try:
                file_fd = os.open(name, OPEN_FILE_FLAGS, dir_fd=parent_fd)
            except PermissionError:
                os.chmod(name, 0o600, dir_fd=parent_fd)
                file_fd = os.open(name, OPEN_FILE_FLAGS, dir_fd=parent_fd)
                os.fchmod(file_fd, mode)
            try:
                self._write_head(FILE, path, mode, status.st_mtime_ns, status.st_size)
                for part in _read_parts(partial(os.read, file_fd), status.st_size):
                    self._pipe.write(part)
            finally:
                os.close(file_fd)
        elif file_type == stat.S_IFLNK:
            link_target = os.fsencode(os.readlink(name, dir_fd=parent_fd))
            self._write_head(LINK, path, mode, status.st_mtime_ns, len(link_target))
            self._pipe.write(link_target)
        elif self._top_directory == "/":
            self._write_head(DELETED, path)

    def _write_head(
        self, kind: bytes, path: str, mode: int = 0, mtime_ns: int = 0, content_size: int = 0
    ) -> None:
        """Write the head of an entry, if there is room for the head and the content of `content_size`
        bytes."""
        head = _encode_head(Entry(kind, path, mode, mtime_ns), content_size)
        self._remaining_bytes -= len(head) + content_size
        self._refuse_if(self._remaining_bytes < 0, f"{self._max_bytes} bytes")
        self._refuse_long_path(path)
        self._pipe.write(head)

    def _refuse_long_path(self, path: str) -> None:
        too_long = len(os.fsencode(path)) > MAX_PATH_BYTES
        self._refuse_if(too_long, f"{MAX_PATH_BYTES} bytes in the path of a file")

    def _refuse_if(self, exceeded: bool, limit_text: str) -> None:
        if exceeded:
            raise ChangesError(f"the changes contain more than {limit_text}")


def apply_changes(top_directory: str, _: int, source: bytes) -> None:
    """Apply the archive from the pipe to the files of this sandbox. Kept names stay as they are here, also
    if the archive deletes a directory around such a name."""
    max_bytes, _roots, keep_globs = json.loads(source)

    with open(PIPE_FD, "rb", CHUNK_BYTES, closefd=False) as pipe:
        applier = _Applier(top_directory, keep_globs)
        for entry in _decode_entries(pipe.read, max_bytes):
            applier.apply_entry(entry)
        applier.finish_directories()


STEPS = {
    frames.COLLECT: collect_changes,
    frames.APPLY: apply_changes,
    frames.READ: read_file,
    frames.WRITE: write_file,
}


class _Applier:
    def __init__(self, top_directory: str, keep_globs: Sequence[str]) -> None:
        self._top_fd = os.open(top_directory, OPEN_DIRECTORY_FLAGS)
        self._is_kept = match_globs(keep_globs, include_contents=True)
        self._written_directories: dict[str, Entry] = {}

    def apply_entry(self, entry: Entry) -> None:
        path = entry.path
        if self._is_kept(path):
            return

        parent, _, name = path.rpartition("/")
        try:
            with _open_below(self._top_fd, parent, create_missing=entry.kind != DELETED) as parent_fd:
                if entry.kind in (DIRECTORY, OPAQUE):
                    self._apply_directory(parent_fd, name, path, entry)
                elif self._remove_unkept(path):
                    self._make_file(parent_fd, name, entry)
        except FileNotFoundError:
            if entry.kind != DELETED:
                raise

    def finish_directories(self) -> None:
        """Set modes and times of directories after all files have been written."""
        for path, entry in reversed(self._written_directories.items()):
            with _open_below(self._top_fd, path) as directory_fd:
                os.fchmod(directory_fd, entry.mode)
                os.utime(directory_fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _apply_directory(self, parent_fd: int, name: str, path: str, entry: Entry) -> None:
        status = _stat_entry(parent_fd, name)
        is_replaced = entry.kind == OPAQUE or (status and not stat.S_ISDIR(status.st_mode))

        if status is None or (is_replaced and self._remove_unkept(path)):
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        else:
            os.chmod(name, status.st_mode & 0o7777 | 0o700, dir_fd=parent_fd)
        self._written_directories[path] = entry

    def _make_file(self, parent_fd: int, name: str, entry: Entry) -> None:
        times = (entry.mtime_ns, entry.mtime_ns)
        if entry.kind == LINK:
            os.symlink(os.fsdecode(entry.content), name, dir_fd=parent_fd)
            os.utime(name, ns=times, dir_fd=parent_fd, follow_symlinks=False)
        elif entry.kind == FILE:
            file_fd = os.open(name, NEW_FILE_FLAGS, 0o600, dir_fd=parent_fd)
            frames.write_all(file_fd, entry.content)
            os.fchmod(file_fd, entry.mode)
            os.utime(file_fd, ns=times)
            os.close(file_fd)

    def _remove_unkept(self, top_path: str) -> bool:
        """Remove a path, except kept names and the directories around them. True if nothing is left."""
        pending_paths = [top_path]
        directories = list[tuple[str, str, int]]()
        all_removed = True

        while pending_paths:
            path = pending_paths.pop()
            parent, _, name = path.rpartition("/")
            with _open_below(self._top_fd, parent) as parent_fd:
                status = None if self._is_kept(path) else _stat_entry(parent_fd, name)
                if status and stat.S_ISDIR(status.st_mode):
                    os.chmod(name, 0o700, dir_fd=parent_fd)
                    directories.append((parent, name, stat.S_IMODE(status.st_mode)))
                    with _open_below(parent_fd, name) as directory_fd:
                        pending_paths += [f"{path}/{inner_name}" for inner_name in os.listdir(directory_fd)]
                elif status:
                    os.unlink(name, dir_fd=parent_fd)

        for parent, name, mode in reversed(directories):  # the innermost first
            with _open_below(self._top_fd, parent) as parent_fd:
                try:
                    os.rmdir(name, dir_fd=parent_fd)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
                    os.chmod(name, mode, dir_fd=parent_fd)
                    all_removed = False

        return all_removed


def _join_path(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _stat_entry(parent_fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(directory_fd: int) -> bool:
    try:
        return os.getxattr(directory_fd, "user.overlay.opaque") == b"y"
    except OSError:
        return False


@contextmanager
def _open_below(top_fd: int, path: str, create_missing: bool = False) -> Iterator[int]:
    """Open a directory below `top_fd`, never through a link. `create_missing`: make missing directories."""
    is_long = len(os.fsencode(path)) >= kernel.PATH_MAX

    try:
        directory_fd = (
            _step_down(top_fd, path, create_missing) if is_long else kernel.open_beneath(top_fd, path or ".")
        )
    except FileNotFoundError:
        if not create_missing or is_long:
            raise
        directory_fd = _step_down(top_fd, path, create_missing)

    try:
        yield directory_fd
    finally:
        os.close(directory_fd)


def _step_down(top_fd: int, path: str, create_missing: bool) -> int:
    """Open a directory by one step for each name of its path. `create_missing`: make missing directories."""
    directory_fd = os.dup(top_fd)

    for name in path.split("/"):
        try:
            if create_missing:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=directory_fd)
            inner_fd = os.open(name, OPEN_DIRECTORY_FLAGS, dir_fd=directory_fd)
        finally:
            os.close(directory_fd)
        directory_fd = inner_fd
    return directory_fd
