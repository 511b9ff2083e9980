"""Unpacks an archive as the root of an image, in a child process that has nothing else in sight.

    archive, opened ──► a user namespace of one id ──► chroot(root) ──► layer by layer ──► digest of the tree

After the chroot the kernel resolves every name and link of the archive inside the new root, wherever it
leads. The child is root over the importing user's files only: it makes no devices and changes no owners. It
can import no module any more, as that could come from the archive.
"""

from __future__ import annotations

import bz2  # noqa: F401 (it, gzip and lzma: tarfile imports them late)
import gzip  # noqa: F401
import hashlib
import lzma  # noqa: F401
import os
import posixpath
import resource
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from asyncrl.errors import ConfigError, disk_full, reason
from asyncrl.isolation.child import Service
from asyncrl.isolation.images import Image, no_room
from asyncrl.isolation.layers import find_layers, refuse
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.sandbox.kernel import NEWUSER, unshare

OF_A_ROOT = {"bin", "etc", "usr"}  # a name of these at the top: no archive of layers, but a root file system
MEMORY = 1 << 30  # bytes of address space for the child: tarfile reads some headers whole
CHUNK = 1 << 20
# names of entries that delete
DELETED = ".wh."
ALL_BELOW = ".wh..wh..opq"
OPAQUE = ("user.overlay.opaque", b"y")


class Bounds(msgspec.Struct, frozen=True):
    """Limits an import, which is refused above."""

    mib: Annotated[int, Meta(description="MiB of the files of all layers")] = 16_384
    files: Annotated[int, Meta(description="files and directories of all layers")] = 500_000
    seconds: Annotated[int, Meta(description="seconds of unpacking")] = 1_800


class Order(msgspec.Struct, frozen=True):
    """Asks for `source`, an archive or a directory, to be unpacked into the empty directory `root`. `spool`:
    a new file for the archive of a directory. `image`: the digests of those below, and settings for an
    archive that has none."""

    source: str
    spool: str
    root: str
    image: Image
    bounds: Bounds


def unpack(order: Order) -> Image:
    """To be called in a child of its own: it ends up in the new root."""
    images = Path(order.root).parents[1]
    try:
        return _unpacked(order)
    except OSError as error:
        if not disk_full(error):
            raise
        raise ConfigError(no_room(images, error)) from error


def _unpacked(order: Order) -> Image:
    if os.geteuid() != 0:
        _become_root()  # before: then a user reads its own files whatever their modes
    archive = _spool(order) if os.path.isdir(order.source) else open(order.source, "rb")  # noqa: SIM115
    if os.geteuid() == 0:
        _become_root()
    hashlib.sha256()  # OpenSSL reads its settings now: later they were the archive's
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.umask(0)
    os.chmod(order.root, 0o755)
    os.chroot(order.root)
    os.chdir("/")
    sys.meta_path.clear()  # from here on a module to import would be the archive's
    work = _Unpacking(order)
    try:
        return work.digest(work.unpack(archive))
    except Exception as error:
        if disk_full(error):
            raise
        where = f"entry {work.at[:200]!r}: " if work.at else ""
        known = {
            MemoryError: f"a header over {MEMORY >> 20} MiB",
            RecursionError: "lies in too many directories",
        }
        why = known.get(type(error)) or reason(error)
        raise ConfigError(where + why) from error


UNPACK = Service(f"{__name__}:UNPACK", lambda _: unpack, bool, Order, Image)


def _become_root() -> None:
    """Enter a user namespace, as root over the files of this user."""
    uid = os.geteuid()
    gid = os.getegid()
    try:
        unshare(NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(text)
    except OSError as error:
        refuse(f"images need user namespaces, which this machine forbids ({error}); see docs/sandbox.md")


def _spool(order: Order) -> IO[bytes]:
    """Write the archive of a directory, links as links. Sockets are left out."""
    spool = open(order.spool, "w+b")  # noqa: SIM115
    size = 0

    def bounded(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += member.size
        if size >> 20 >= order.bounds.mib:
            refuse(f"has more than {order.bounds.mib} MiB of files (--mib)")
        return member

    with tarfile.open(fileobj=spool, mode="w") as archive:
        archive.add(order.source, ".", filter=bounded)
    spool.seek(0)
    return spool


class _Unpacking:
    """The new root is this process's. `at`: the entry that is worked on."""

    def __init__(self, order: Order) -> None:
        self.image = order.image
        self.bounds = order.bounds
        self.over = bool(order.image.over)
        self.size = self.files = 0
        self.at = ""

    def unpack(self, archive: IO[bytes]) -> Image:
        tar = _open(archive)
        image = self.image
        index = self._index(tar)
        self.at = ""
        layers = iter([archive])
        if index:
            layers, image = find_layers(tar, index, image)
        for number, layer in enumerate(layers):
            if number or self.over:  # first, whatever the order: a layer deletes only what is below it
                for _, path, _ in self._members(layer):
                    self._delete(path)
            for opened, path, member in self._members(layer):
                self._add(opened, path, member)
        self.at = ""
        if not self.over and not os.path.isfile("/bin/sh"):
            refuse("has no /bin/sh: an image needs a shell")
        return image

    def digest(self, image: Image) -> Image:
        """Walk the whole tree in the order of names: each has its kind, mode and contents; owners and times
        do not count. Returns the image with its digest, and its files as they are left of all layers."""
        settings = [image.over, image.environment, image.directory, image.user]
        found = hashlib.sha256(msgspec.msgpack.encode(settings, order="sorted"))
        size = 0
        files = 0
        ahead = ["/"]
        while ahead:
            with os.scandir(ahead.pop()) as entries:
                paths = sorted(entry.path for entry in entries)
            files += len(paths)
            for path in paths:
                self.at = path
                mode = os.lstat(path).st_mode
                contents = b""
                if stat.S_ISDIR(mode):
                    ahead.append(path)
                    contents = OPAQUE[1] if self.over and OPAQUE[0] in os.listxattr(path) else b""
                elif stat.S_ISLNK(mode):
                    contents = os.fsencode(os.readlink(path))
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        contents = hashlib.file_digest(file, "sha256").digest()
                        size += file.tell()
                found.update(msgspec.msgpack.encode([os.fsencode(path), mode, contents]))
        return msgspec.structs.replace(image, digest=f"sha256-{found.hexdigest()}", size=size, files=files)

    def _index(self, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        """The entries of an archive of layers by name; none of a root file system."""
        index = dict[str, tarfile.TarInfo]()
        while (member := tar.next()) is not None and len(index) <= self.bounds.files:
            self.at = member.name
            name = posixpath.normpath(member.name).lstrip("/")
            if name.split("/")[0] in OF_A_ROOT:
                return {}
            index[name] = member
        return index if index.keys() & {"manifest.json", "oci-layout"} else {}

    def _members(self, layer: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, str, tarfile.TarInfo]]:
        """Yield all entries with their paths. Raises for an archive that ends early."""
        with _open(layer) as tar:
            assert tar.fileobj is not None
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined] # it would keep them all
                self.at = member.name
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts:
                    refuse("its name leads upwards")
                yield tar, "/" + "/".join(parts), member
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                refuse("the archive is damaged or cut off after it")
            while tar.fileobj.read(CHUNK):
                pass  # to its checksum

    def _delete(self, path: str) -> None:
        """Delete what is below, if this entry says so. What an image below has is hidden as overlayfs
        does it: by a device 0:0, or by an attribute of a directory."""
        directory, name = posixpath.split(path)
        if name == ALL_BELOW:
            if self.over and directory == "/":
                refuse("deletes all of the image below; import it without --over")
            for inner in os.listdir(directory) if os.path.isdir(directory) else ():
                _remove(posixpath.join(directory, inner))
            if self.over:
                self._make_directories(directory)
                os.setxattr(directory, *OPAQUE)
        elif name.startswith(DELETED) and not name.startswith(DELETED * 2):  # which are notes of aufs
            if (name := name.removeprefix(DELETED)) in ("", ".", ".."):
                refuse("deletes no name")
            _remove(target := posixpath.join(directory, name))
            if self.over:
                self._make_directories(directory)
                self._count()
                os.mknod(target, stat.S_IFCHR)

    def _add(self, tar: tarfile.TarFile, path: str, member: tarfile.TarInfo) -> None:
        """Make what an entry says, in place of what is there. Links above it are followed inside."""
        self._count(member.size if member.isreg() else 0)  # others could have a negative one
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return  # devices and pipes
        if path == "/" or posixpath.basename(path).startswith(DELETED):
            return
        self._make_directories(posixpath.dirname(path))
        if member.isdir():
            _make_directory(path, member.mode & 0o1777)
            return
        _remove(path)
        if member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link(posixpath.join("/", member.linkname), path, follow_symlinks=False)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            contents = tar.extractfile(member)
            assert contents is not None
            with open(os.open(path, flags, member.mode & 0o777), "wb") as file:
                shutil.copyfileobj(contents, file, CHUNK)
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _make_directories(self, path: str) -> None:
        if os.path.isdir(path):
            return
        if os.path.lexists(path) and not stat.S_ISCHR(os.lstat(path).st_mode):
            refuse(f"{path!r} above it is no directory")
        self._make_directories(posixpath.dirname(path))
        self._count()
        _make_directory(path, 0o755)

    def _count(self, size: int = 0) -> None:
        self.files = self.files + 1
        self.size = self.size + size
        if self.files > self.bounds.files:
            refuse(f"has more than {self.bounds.files} entries (--files)")
        if self.size > self.bounds.mib << 20:
            refuse(f"has more than {self.bounds.mib} MiB of files (--mib)")


def _open(file: IO[bytes]) -> tarfile.TarFile:
    file.seek(0)
    try:
        return tarfile.open(fileobj=file)
    except tarfile.ReadError:
        refuse("is no tar archive, or compressed otherwise than by gzip, bzip2 or xz")


def _make_directory(path: str, mode: int) -> None:
    """Make a directory, or change the mode of what is one. It takes the place of a file only here."""
    there = os.lstat(path).st_mode if os.path.lexists(path) else 0
    if stat.S_ISDIR(there):
        os.chmod(path, mode)
        return
    _remove(path)
    os.mkdir(path, mode)
    if stat.S_ISCHR(there):  # it was deleted before: nothing of the image below shows in it
        os.setxattr(path, *OPAQUE)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        emptying.empty(path)
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)
