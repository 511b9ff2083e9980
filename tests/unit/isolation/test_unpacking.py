"""What archives hold ends up inside the new root, whatever it is, or is refused by one line."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from asyncrl.isolation.layers import Settings
from asyncrl.isolation.unpacking import Bounds, Order, Unpacked

FORKS = """
import os, sys, msgspec
from asyncrl.errors import reason
from asyncrl.isolation.unpacking import Order, unpack
for line in sys.stdin.buffer:
    if os.fork() == 0:
        try:
            reply = unpack(msgspec.json.decode(line, type=Order))
        except BaseException as error:
            reply = reason(error)
        os.write(1, msgspec.json.encode(reply) + b"\\n")
        os._exit(0)
    os.wait()
"""
SHELL = ("bin/sh", b"#!")
BOUNDS = Bounds(mib=4, files=60, path=200, depth=8, seconds=20)
SMALL = 1 << 16


class Unpacker:
    """Unpacks archives, each in a process that is forked from one that has all imports."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.count = directory, 0
        command = [sys.executable, "-c", FORKS]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.root = directory

    def __call__(self, archive: bytes | Path, over: str = "", bounds: Bounds = BOUNDS) -> Unpacked:
        """Raises AssertionError with the refusal."""
        self.count += 1
        place = self.directory / str(self.count)
        self.root = place / "root"
        self.root.mkdir(parents=True)
        source = archive if isinstance(archive, Path) else place / "archive"
        if isinstance(archive, bytes):
            source.write_bytes(archive)
        order = Order(str(source), str(place / "spool"), str(self.root), over, Settings(), bounds)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()
        reply = msgspec.json.decode(self.process.stdout.readline(), type=Unpacked | str)
        assert isinstance(reply, Unpacked), reply
        return reply

    def refusal(self, archive: bytes | Path, **given: Any) -> str:
        with pytest.raises(AssertionError) as caught:
            self(archive, **given)
        return str(caught.value)


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unpacker]:
    unpacker = Unpacker(tmp_path_factory.mktemp("unpacked"))
    yield unpacker
    assert unpacker.process.stdin
    unpacker.process.stdin.close()
    unpacker.process.wait()


Entry = tuple[str, bytes | str | None] | tarfile.TarInfo


def tar(*entries: Entry, mode: str = "w") -> bytes:
    """Make an archive: of a file (bytes), a symbolic link to a text, a directory (None), or what is given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry, io.BytesIO(bytes(entry.size)) if entry.isreg() else None)
                continue
            name, contents = entry
            info = made(name, tarfile.DIRTYPE if contents is None else tarfile.REGTYPE, mode=0o755)
            if isinstance(contents, str):
                info.type, info.linkname = tarfile.SYMTYPE, contents
            file: IO[bytes] | None = None
            if isinstance(contents, bytes):
                info.size, file = len(contents), io.BytesIO(contents)
            archive.addfile(info, file)
    return buffer.getvalue()


def made(name: str, kind: bytes = tarfile.REGTYPE, **given: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in given.items():
        setattr(info, key, value)
    return info


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return made(name, tarfile.LNKTYPE, linkname=target)


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


# What archives may hold


def test_a_tree_keeps_contents_modes_times_and_links(unpack: Unpacker) -> None:
    file = made("usr/tool", mode=0o755, size=5, mtime=1_000_000_000)
    found = unpack(
        tar(SHELL, file, hard_link("usr/same", "usr/tool"), ("etc/link", "/usr/tool"), ("tmp", None))
    )
    root = unpack.root
    tool = (root / "usr/tool").stat()
    assert (tool.st_size, stat.S_IMODE(tool.st_mode), tool.st_mtime) == (5, 0o755, 1_000_000_000)
    assert (root / "usr/same").stat().st_ino == tool.st_ino
    assert os.readlink(root / "etc/link") == "/usr/tool"
    assert found.files == 8 and found.size == 7  # with the three directories above the files
    assert found.settings.environment["PATH"].endswith(":/bin") and found.settings.directory == "/"


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compression_and_times_do_not_change_the_digest(unpack: Unpacker, mode: str) -> None:
    plain = unpack(tar(SHELL, made("a", mtime=1)))
    assert unpack(tar(made("./a", mtime=2), ("./bin/sh", b"#!"), mode=mode)).digest == plain.digest


@pytest.mark.parametrize(
    "other",
    [
        (SHELL, ("a", b"y")),
        (SHELL, ("b", b"x")),
        (SHELL, ("a", "x")),
        (SHELL, ("a", None)),
        (SHELL, made("a", mode=0o644)),
        (SHELL, ("a", b"x"), ("c", None)),
    ],
)
def test_every_difference_changes_the_digest(unpack: Unpacker, other: tuple[Entry, ...]) -> None:
    assert unpack(tar(SHELL, ("a", b"x"))).digest != unpack(tar(*other)).digest


def test_the_digest_depends_on_the_image_below(unpack: Unpacker) -> None:
    digests = {unpack(tar(SHELL), over=over).digest for over in ("", "sha256-1", "sha256-2")}
    assert len(digests) == 3


def test_a_directory_is_packed_with_its_links_and_without_pipes(unpack: Unpacker, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").write_text("#!")
    (tmp_path / "bin/sh").chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    assert unpack(tmp_path).left_out == 1
    assert os.readlink(unpack.root / "passwd") == "/etc/passwd"
    assert files(unpack.root) == {"bin", "bin/sh", "passwd"}


def test_rights_are_dropped_and_devices_left_out(unpack: Unpacker) -> None:
    found = unpack(
        tar(
            made("usr/su", mode=0o7755),
            made("mail", tarfile.DIRTYPE, mode=0o2775),
            made("tmp", tarfile.DIRTYPE, mode=0o1777),
            made("dev/sda", tarfile.BLKTYPE, devmajor=8),
            made("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3),
            made("run/pipe", tarfile.FIFOTYPE),
            made("strange", b"Z"),
            SHELL,
        )
    )
    modes = {name: stat.S_IMODE((unpack.root / name).stat().st_mode) for name in ("usr/su", "mail", "tmp")}
    assert modes == {"usr/su": 0o755, "mail": 0o775, "tmp": 0o1777}
    assert found.left_out == 4
    assert files(unpack.root) == {"usr", "usr/su", "mail", "tmp", "bin", "bin/sh"}


def test_owners_are_the_importing_user_and_directories_without_rights_are_filled(unpack: Unpacker) -> None:
    closed = made("closed", tarfile.DIRTYPE, mode=0, uid=33, gid=33)
    unpack(tar(SHELL, closed, ("closed/inner/file", b"x"), made(".", tarfile.DIRTYPE, mode=0)))
    inner = (unpack.root / "closed").stat()
    assert (inner.st_uid, stat.S_IMODE(inner.st_mode)) == (os.getuid(), 0)
    assert stat.S_IMODE(unpack.root.stat().st_mode) == 0o755
