"""Search images for the line that was changed, which a task must not hold as it was."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
import os
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from .mutations import Mutation

PACKED: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ": lzma.decompress,
    **{bytes((0x78, level)): zlib.decompress for level in (0x01, 0x5E, 0x9C, 0xDA)},  # as git stores objects
}


def contents(root: str | Path) -> Iterator[tuple[str, bytes]]:
    """Yield all files below a directory, packed files also unpacked, and all objects of repositories."""
    for directory, directories, files in os.walk(root):
        for name in sorted(files):
            path = os.path.join(directory, name)
            if os.path.isfile(path) and not os.path.islink(path):  # no pipe
                yield from unpacked(path, Path(path).read_bytes())
        if {"HEAD", "objects"} <= {*files, *directories}:
            git = ("git", "--git-dir", directory, "cat-file", "--batch-all-objects", "--batch")
            yield directory, subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout


def unpacked(path: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield path, data
    for start, function in PACKED.items():
        if data.startswith(start):
            with suppress(
                OSError, EOFError, zlib.error, lzma.LZMAError
            ):  # the file may only begin like an archive
                yield from unpacked(path, function(data))

    if data.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                yield from unpacked(f"{path}/{name}", archive.read(name))


def leak(files: Iterable[tuple[str, bytes]], mutation: Mutation) -> str:
    """Name a file that has the original line, or a compiled file with all names of the function."""
    line = mutation.before.strip().encode()
    names = [bytes([len(name.encode())]) + name.encode() for name in mutation.names]  # as marshal writes them
    for path, data in files:
        if line in data or (path.endswith(".pyc") and all(name in data for name in names)):
            return path
    return ""


class BaseImage:
    """The contents of an image below all tasks, read once."""

    def __init__(self, layers: Iterable[str]) -> None:
        self.compiled: list[tuple[str, bytes]] = []
        with tempfile.TemporaryFile() as file:
            for layer in layers:
                for path, data in contents(layer):
                    file.write(data + b"\0")
                    if path.endswith(".pyc"):
                        self.compiled.append((path, data))
            file.flush()
            self.everything = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def has_mutation(self, mutation: Mutation) -> bool:
        return self.everything.find(mutation.before.strip().encode()) >= 0 or bool(
            leak(self.compiled, mutation)
        )
