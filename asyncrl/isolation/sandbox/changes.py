"""Moves files into a sandbox and out of it: one, or all that changed, as an archive for another sandbox.

    upper directory of the overlay, or home ── collect ──► archive ── apply ──► the code's files

A child of the warden does it, with the rights of the code. It imports nothing, as an image does not have this
library. The owner only reads entries: an archive is untrusted.
"""

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
"""Kinds of entries. OPAQUE: a directory of which the image's contents are hidden. END comes last, so that an
archive which was cut is known."""
HEADER = struct.Struct("!cIqHQ")  # kind, mode, mtime in ns, bytes of the path, bytes of the content
MOST_ENTRIES = 200_000
LONGEST_PATH = kernel.PATH_MAX - 1  # bytes
CHUNK = 1 << 20
PIPE = 0  # to the owner, or from it
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class ChangesError(Exception):
    """The changes cannot be collected, read or applied."""


class Entry(NamedTuple):
    """Describes what there is at `path`: below the root of an image, else below the home. `content`: of
    a file, or the target of a link."""

    kind: bytes
    path: str
    mode: int = 0
    mtime_ns: int = 0
    content: bytes = b""

    def frame(self) -> bytes:
        return _head(self, len(self.content)) + self.content


def _head(entry: Entry, size: int) -> bytes:
    path = os.fsencode(entry.path)
    return HEADER.pack(entry.kind, entry.mode, entry.mtime_ns, len(path), size) + path


def packed(entries: Iterable[Entry]) -> bytes:
    """Make an archive."""
    return b"".join(entry.frame() for entry in (*entries, Entry(END, "")))


def read_entries(archive: bytes) -> Iterator[Entry]:
    """Read an archive. ChangesError for one that `collect` cannot have written."""
    return _entries(io.BytesIO(archive).read, len(archive))


def _entries(read: Callable[[int], bytes], most: int) -> Iterator[Entry]:
    """Read entries with `read`, which returns the next bytes, `b""` at their end; none above `most` bytes."""
    while True:
        kind, mode, mtime_ns, length, size = HEADER.unpack(b"".join(_parts(read, HEADER.size)))
        path = os.fsdecode(b"".join(_parts(read, length)))
        if kind == END:
            return
        known = kind in (FILE, DIRECTORY, OPAQUE, LINK, DELETED)
        if not known or mode > 0o7777 or size > most or "\0" in path or {"", ".", ".."} & {*path.split("/")}:
            raise ChangesError(f"the archive of changes has a bad entry: {path[:200]!r}")
        yield Entry(kind, path, mode, mtime_ns, b"".join(_parts(read, size)))


def _parts(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """Read exactly `size` bytes."""
    while size > 0:
        if not (part := read(min(size, CHUNK))):
            raise ChangesError("the archive of changes, or a file, ended too early")
        yield part
        size -= len(part)


def named_by(globs: Iterable[str], below: bool = False) -> Callable[[str], bool]:
    """Make a check of paths: globs that begin with a slash are of whole paths, others of the last name.
    `below`: also of what is in a directory so named. One expression: paths may be long, and globs many."""
    end = "/*" * below
    wholes = (glob if glob.startswith("/") else f"*/{glob}" for glob in globs)
    found = re.compile("|".join(translate(whole + end) for whole in wholes) or "(?!)").match
    return lambda path: found(f"/{path}{end[:1]}") is not None


def request(most: int, top: str, roots: Sequence[str], globs: Iterable[str]) -> bytes:
    """Make the source of a request. `roots`: absolute directories, which must lie below `top`; none for all.
    ValueError for another one, or a NUL."""
    below = [os.path.relpath(root, top) for root in roots or (top,)]
    if any(path.startswith("../") or "\0" in path for path in below):
        raise ValueError(f"only directories below {top} have changes, not {roots!r}")
    return json.dumps((most, ["" if path == "." else path for path in below], list(globs))).encode()


def receive(fd: int, archive: bytearray, most: int) -> None:
    """Read a file, or an archive of `collect`, which has at most `most` bytes and an END."""
    with open(fd, "rb", 0) as pipe:
        while len(archive) <= most + HEADER.size and (part := pipe.read(CHUNK)):
            archive += part


def send(fd: int, archive: bytes) -> None:
    """Write an archive for `apply`, or a file, unless the reader has given up."""
    with suppress(BrokenPipeError), open(fd, "wb", 0) as pipe:
        frames.write_all(pipe.fileno(), archive)


# -- in the sandbox, in a child of the warden ----------------------------------------------------------------


def run(kind: bytes, top: str, changed: int, source: bytes) -> int:
    """Take the step of a request; returns the exit status. `top`: the directory that can change, `/` in an
    image. `changed`: a descriptor of the directory that holds what did: `top`, or the upper directory."""
    try:
        STEPS[kind](top, changed, source)
    except (ChangesError, OSError) as error:
        os.write(2, str(error).encode(errors="replace"))
        return 1
    return 0


def read_file(_: str, __: int, source: bytes) -> None:
    """Write a file to the pipe. `source`: the most bytes, and the path."""
    most, path = json.loads(source)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # it may be a pipe
        data = file.read(most + 1) or b""
    if len(data) > most:
        raise ChangesError(f"it has more than {most} bytes")
    frames.write_all(PIPE, data)


def write_file(_: str, __: int, source: bytes) -> None:
    """Write a file from the pipe, and the directories above it. `source`: its path."""
    path = os.fsdecode(source)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        while data := os.read(PIPE, CHUNK):
            file.write(data)


def collect(top: str, changed: int, source: bytes) -> None:
    """Write an archive to the pipe: all that changed below some directories, but names that are left out."""
    most, roots, skip = json.loads(source)
    with open(PIPE, "wb", CHUNK, closefd=False) as pipe:
        collector = _Collector(top, changed, pipe, most, skip)
        try:
            for root in sorted(roots):
                collector.collect(root)
        finally:
            collector.restore_modes()
        pipe.write(Entry(END, "").frame())


class _Collector:
    def __init__(self, top: str, changed: int, pipe: BinaryIO, most: int, skip: Sequence[str]) -> None:
        self._top = top
        self._changed = changed
        self._pipe = pipe
        self._is_skipped = named_by(skip)
        self._most = self._left = most
        self._count = 0
        self._modes = {"": stat.S_IMODE(os.fstat(changed).st_mode)}  # of directories that could not be read
        os.fchmod(changed, 0o700)

    def collect(self, root: str) -> None:
        """Collect what changed below a directory. If it is no directory any more, it counts as deleted."""
        opaque = False
        path = ""
        for name in filter(None, root.split("/")):
            parent = path
            path = _join(path, name)
            if os.path.islink(f"{self._top}/{path}"):
                raise ChangesError(f"{path} is a link; name the directory that it leads to")
            with _opened(self._changed, parent) as here:
                found = _find(here, name)
                if not found and not opaque:
                    return  # nothing changed there
                if not found or not stat.S_ISDIR(found.st_mode):
                    self._write(DELETED, root)
                    return
                self._make_readable(here, name, path, found)
            with _opened(self._changed, path) as here:
                opaque |= _is_opaque(here)
        self._walk(root, opaque)

    def restore_modes(self) -> None:
        for path, mode in reversed(self._modes.items()):  # the innermost first
            with _opened(self._changed, path) as here:
                os.fchmod(here, mode)

    def _walk(self, top: str, opaque: bool) -> None:
        """Write a directory before what is in it, and names in their order."""
        ahead = [top]
        while ahead:
            path = ahead.pop()
            with _opened(self._changed, path) as here:
                if path:
                    found = os.fstat(here)
                    mode = self._modes.get(path, stat.S_IMODE(found.st_mode))
                    kind = OPAQUE if _is_opaque(here) or (opaque and path == top) else DIRECTORY
                    self._write(kind, path, mode, found.st_mtime_ns)
                inside = []
                names = os.listdir(here)
                self._count += len(names)
                self._check(self._count > MOST_ENTRIES, f"{MOST_ENTRIES} files")
                for name in sorted(names, key=os.fsencode):
                    inner = _join(path, name)
                    found = os.stat(name, dir_fd=here, follow_symlinks=False)
                    if self._is_skipped(inner):
                        continue
                    if stat.S_ISDIR(found.st_mode):
                        self._check_path(inner)  # before it is opened
                        self._make_readable(here, name, inner, found)
                        inside.append(inner)
                    else:
                        self._write_file(here, name, inner, found)
                ahead += reversed(inside)

    def _make_readable(self, here: int, name: str, path: str, found: os.stat_result) -> None:
        if found.st_mode & 0o700 != 0o700:
            self._modes[path] = stat.S_IMODE(found.st_mode)
            os.chmod(name, 0o700, dir_fd=here)

    def _write_file(self, here: int, name: str, path: str, found: os.stat_result) -> None:
        """Write what is no directory. Sockets and pipes are left out; in an image they count as deleted, as
        do the devices by which overlayfs deletes."""
        mode = stat.S_IMODE(found.st_mode)
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFREG:
            try:
                fd = os.open(name, OPEN_FILE, dir_fd=here)
            except PermissionError:
                os.chmod(name, 0o600, dir_fd=here)
                fd = os.open(name, OPEN_FILE, dir_fd=here)
                os.fchmod(fd, mode)
            try:
                self._write(FILE, path, mode, found.st_mtime_ns, found.st_size)
                for part in _parts(partial(os.read, fd), found.st_size):
                    self._pipe.write(part)
            finally:
                os.close(fd)
        elif kind == stat.S_IFLNK:
            target = os.fsencode(os.readlink(name, dir_fd=here))
            self._write(LINK, path, mode, found.st_mtime_ns, len(target))
            self._pipe.write(target)
        elif self._top == "/":
            self._write(DELETED, path)

    def _write(self, kind: bytes, path: str, mode: int = 0, mtime_ns: int = 0, size: int = 0) -> None:
        """Write an entry but for its content of `size` bytes, if there is room for both."""
        head = _head(Entry(kind, path, mode, mtime_ns), size)
        self._left -= len(head) + size
        self._check(self._left < 0, f"{self._most} bytes")
        self._check_path(path)
        self._pipe.write(head)

    def _check_path(self, path: str) -> None:
        too_long = len(os.fsencode(path)) > LONGEST_PATH
        self._check(too_long, f"{LONGEST_PATH} bytes in the path of a file")

    def _check(self, exceeded: bool, bound: str) -> None:
        if exceeded:
            raise ChangesError(f"what changed has more than {bound}")


def apply(top: str, _: int, source: bytes) -> None:
    """Apply the archive from the pipe to what this sandbox sees. Names that are kept stay as they are here,
    also where the archive deletes a directory around them."""
    most, _roots, keep = json.loads(source)
    with open(PIPE, "rb", CHUNK, closefd=False) as pipe:
        applier = _Applier(top, keep)
        for entry in _entries(pipe.read, most):
            applier.apply(entry)
        applier.finish_directories()


STEPS = {frames.TAKE: collect, frames.GIVE: apply, frames.READ: read_file, frames.WRITE: write_file}


class _Applier:
    def __init__(self, top: str, keep: Sequence[str]) -> None:
        self._top = os.open(top, OPEN_DIRECTORY)
        self._is_kept = named_by(keep, below=True)
        self._directories: dict[str, Entry] = {}

    def apply(self, entry: Entry) -> None:
        path = entry.path
        if self._is_kept(path):
            return
        parent, _, name = path.rpartition("/")
        try:
            with _opened(self._top, parent, make=entry.kind != DELETED) as here:
                if entry.kind in (DIRECTORY, OPAQUE):
                    self._apply_directory(here, name, path, entry)
                elif self._remove(path):
                    self._make_file(here, name, entry)
        except FileNotFoundError:
            if entry.kind != DELETED:
                raise

    def finish_directories(self) -> None:
        """Set modes and times after all has been written into them."""
        for path, entry in reversed(self._directories.items()):
            with _opened(self._top, path) as here:
                os.fchmod(here, entry.mode)
                os.utime(here, ns=(entry.mtime_ns, entry.mtime_ns))

    def _apply_directory(self, here: int, name: str, path: str, entry: Entry) -> None:
        found = _find(here, name)
        replaced = entry.kind == OPAQUE or (found and not stat.S_ISDIR(found.st_mode))
        if found is None or (replaced and self._remove(path)):
            os.mkdir(name, 0o700, dir_fd=here)
        else:
            os.chmod(name, found.st_mode & 0o7777 | 0o700, dir_fd=here)
        self._directories[path] = entry

    def _make_file(self, here: int, name: str, entry: Entry) -> None:
        times = (entry.mtime_ns, entry.mtime_ns)
        if entry.kind == LINK:
            os.symlink(os.fsdecode(entry.content), name, dir_fd=here)
            os.utime(name, ns=times, dir_fd=here, follow_symlinks=False)
        elif entry.kind == FILE:
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=here)
            frames.write_all(fd, entry.content)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=times)
            os.close(fd)

    def _remove(self, top: str) -> bool:
        """Remove what is there, but what is kept and the directories around it. True if nothing is left."""
        ahead = [top]
        directories = list[tuple[str, str, int]]()
        gone = True
        while ahead:
            path = ahead.pop()
            parent, _, name = path.rpartition("/")
            with _opened(self._top, parent) as here:
                found = None if self._is_kept(path) else _find(here, name)
                if found and stat.S_ISDIR(found.st_mode):
                    os.chmod(name, 0o700, dir_fd=here)
                    directories.append((parent, name, stat.S_IMODE(found.st_mode)))
                    with _opened(here, name) as inside:
                        ahead += [f"{path}/{inner}" for inner in os.listdir(inside)]
                elif found:
                    os.unlink(name, dir_fd=here)
        for parent, name, mode in reversed(directories):  # the innermost first
            with _opened(self._top, parent) as here:
                try:
                    os.rmdir(name, dir_fd=here)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
                    os.chmod(name, mode, dir_fd=here)
                    gone = False
        return gone


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _find(here: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(directory: int) -> bool:
    try:
        return os.getxattr(directory, "user.overlay.opaque") == b"y"
    except OSError:
        return False


@contextmanager
def _opened(top: int, path: str, make: bool = False) -> Iterator[int]:
    """Open a directory below `top`, never through a link. `make` those that are missing."""
    is_long = len(os.fsencode(path)) >= kernel.PATH_MAX
    try:
        directory = _step_down(top, path, make) if is_long else kernel.open_beneath(top, path or ".")
    except FileNotFoundError:
        if not make or is_long:
            raise
        directory = _step_down(top, path, make)
    try:
        yield directory
    finally:
        os.close(directory)


def _step_down(top: int, path: str, make: bool) -> int:
    """Open a directory by one step for each name of its path. `make` those that are missing."""
    directory = os.dup(top)
    for name in path.split("/"):
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=directory)
            inner_directory = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
        finally:
            os.close(directory)
        directory = inner_directory
    return directory
