"""Unpacks an archive as the root of an image, in a child process that sees no other file.

    archive, opened ──► a user namespace of one id ──► chroot(root) ──► layer by layer ──► digest of the tree

After the chroot the kernel resolves every name and link of the archive inside the new root, wherever they
lead. The child is root over the importing user's files only: it makes no devices and changes no owners. The
child can import no module any more, as the module could come from the archive.
"""

from __future__ import annotations

import bz2  # noqa: F401 (tarfile imports bz2, gzip and lzma late)
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
from asyncrl.isolation.images import Image, describe_no_room
from asyncrl.isolation.layers import find_layers, refuse
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.sandbox.kernel import NEWUSER, unshare

ROOT_DIRECTORIES = {"bin", "etc", "usr"}  # an archive with such a top entry is a root file system, not layers
MAX_MEMORY_BYTES = 1 << 30  # address space of the child: tarfile reads some headers as one piece
CHUNK_BYTES = 1 << 20
# Names of entries that delete a path, or everything in a directory.
DELETED_PREFIX = ".wh."
DELETE_ALL_BELOW = ".wh..wh..opq"
OPAQUE_ATTRIBUTE = ("user.overlay.opaque", b"y")


class Bounds(msgspec.Struct, frozen=True):
    """Limit an import: larger archives are refused."""

    mib: Annotated[int, Meta(description="MiB of files in all layers")] = 16_384
    files: Annotated[int, Meta(description="files and directories in all layers")] = 500_000
    seconds: Annotated[int, Meta(description="seconds for unpacking")] = 1_800


class Order(msgspec.Struct, frozen=True):
    """Order `source`, an archive or a directory, to be unpacked into the empty directory `root`. `spool`: a
    new file for the archive of a directory. `image`: the digests of the images below, and settings for an
    archive without settings."""

    source: str
    spool: str
    root: str
    image: Image
    bounds: Bounds


def unpack_order(order: Order) -> Image:
    """Unpack an archive. Must be called in a separate child process, which ends up in the new root."""
    images_path = Path(order.root).parents[1]
    try:
        return _unpack_in_root(order)
    except OSError as error:
        if not disk_full(error):
            raise
        raise ConfigError(describe_no_room(images_path, error)) from error


def _unpack_in_root(order: Order) -> Image:
    if os.geteuid() != 0:
        _become_root()  # before reading: root reads the user's own files whatever their modes

    archive = _spool_directory(order) if os.path.isdir(order.source) else open(order.source, "rb")  # noqa: SIM115
    if os.geteuid() == 0:
        _become_root()
    hashlib.sha256()  # OpenSSL reads its settings now: later it would read the archive's
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))

    os.umask(0)
    os.chmod(order.root, 0o755)
    os.chroot(order.root)
    os.chdir("/")
    sys.meta_path.clear()  # from here on an imported module would come from the archive

    unpacking = _Unpacking(order)
    try:
        return unpacking.add_digest(unpacking.unpack_archive(archive))
    except Exception as error:
        if disk_full(error):
            raise
        entry_text = f"entry {unpacking.current_entry[:200]!r}: " if unpacking.current_entry else ""
        known_reasons = {
            MemoryError: f"the header needs more than {MAX_MEMORY_BYTES >> 20} MiB",
            RecursionError: "the path has too many directories",
        }
        failure_reason = known_reasons.get(type(error)) or reason(error)
        raise ConfigError(entry_text + failure_reason) from error


UNPACK = Service(f"{__name__}:UNPACK", lambda _: unpack_order, bool, Order, Image)


def _become_root() -> None:
    """Enter a user namespace as root over the files of this user."""
    uid = os.geteuid()
    gid = os.getegid()

    try:
        unshare(NEWUSER)
        for name, map_text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(map_text)
    except OSError as error:
        refuse(f"images need user namespaces, which this machine forbids ({error}); see docs/guides/tasks.md")


def _spool_directory(order: Order) -> IO[bytes]:
    """Write an archive of a directory, links as links. Sockets are left out."""
    spool_file = open(order.spool, "w+b")  # noqa: SIM115
    total_size = 0

    def count_size(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal total_size
        total_size += member.size
        if total_size >> 20 >= order.bounds.mib:
            refuse(f"the directory contains more than {order.bounds.mib} MiB of files (--mib)")
        return member

    with tarfile.open(fileobj=spool_file, mode="w") as archive:
        archive.add(order.source, ".", filter=count_size)
    spool_file.seek(0)
    return spool_file


class _Unpacking:
    """Unpack into the root of this process. `current_entry`: the name of the entry in work, for errors."""

    def __init__(self, order: Order) -> None:
        self.image = order.image
        self.bounds = order.bounds
        self.has_image_below = bool(order.image.over)
        self.total_size = 0
        self.file_count = 0
        self.current_entry = ""

    def unpack_archive(self, archive: IO[bytes]) -> Image:
        archive_tar = _open_tar(archive)
        image = self.image
        index = self._index_layers(archive_tar)
        self.current_entry = ""

        layers = iter([archive])
        if index:
            layers, image = find_layers(archive_tar, index, image)

        for layer_number, layer in enumerate(layers):
            # Deletions first, whatever their position: a layer deletes only entries of lower layers
            if layer_number or self.has_image_below:
                for _, path, _ in self._iterate_entries(layer):
                    self._apply_deletion(path)
            for layer_tar, path, member in self._iterate_entries(layer):
                self._add_entry(layer_tar, path, member)

        self.current_entry = ""
        if not self.has_image_below and not os.path.isfile("/bin/sh"):
            refuse("/bin/sh is missing, but an image needs a shell")
        return image

    def add_digest(self, image: Image) -> Image:
        """Hash the tree in the order of names, with the type, mode and contents of each path, without owners
        and times. Returns the image with the digest, and with the size and number of the remaining files."""
        settings = [image.over, image.environment, image.directory, image.user]
        tree_hash = hashlib.sha256(msgspec.msgpack.encode(settings, order="sorted"))
        total_size = 0
        file_count = 0

        pending_directories = ["/"]
        while pending_directories:
            with os.scandir(pending_directories.pop()) as entries:
                paths = sorted(entry.path for entry in entries)
            file_count += len(paths)
            for path in paths:
                self.current_entry = path
                mode = os.lstat(path).st_mode
                contents = b""

                if stat.S_ISDIR(mode):
                    pending_directories.append(path)
                    if self.has_image_below and OPAQUE_ATTRIBUTE[0] in os.listxattr(path):
                        contents = OPAQUE_ATTRIBUTE[1]
                elif stat.S_ISLNK(mode):
                    contents = os.fsencode(os.readlink(path))
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        contents = hashlib.file_digest(file, "sha256").digest()
                        total_size += file.tell()

                tree_hash.update(msgspec.msgpack.encode([os.fsencode(path), mode, contents]))

        return msgspec.structs.replace(
            image, digest=f"sha256-{tree_hash.hexdigest()}", size=total_size, files=file_count
        )

    def _index_layers(self, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        """Return the entries of an archive of layers by name; none for a root file system."""
        index = dict[str, tarfile.TarInfo]()
        while (member := tar.next()) is not None and len(index) <= self.bounds.files:
            self.current_entry = member.name

            name = posixpath.normpath(member.name).lstrip("/")
            if name.split("/")[0] in ROOT_DIRECTORIES:
                return {}
            index[name] = member
        return index if index.keys() & {"manifest.json", "oci-layout"} else {}

    def _iterate_entries(self, layer: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, str, tarfile.TarInfo]]:
        """Yield all entries with their paths. Raises if the archive ends early."""
        with _open_tar(layer) as tar:
            assert tar.fileobj is not None
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined] # tarfile would keep all members
                self.current_entry = member.name

                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if ".." in parts:
                    refuse("the name contains ..")
                yield tar, "/" + "/".join(parts), member

            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                refuse("the archive is damaged or cut off after this entry")
            while tar.fileobj.read(CHUNK_BYTES):
                pass  # read on to the checksum

    def _apply_deletion(self, path: str) -> None:
        """Delete paths of lower layers, if this entry says so. Paths of an image below are hidden as
        overlayfs does: by a device 0:0, or by an attribute of a directory."""
        directory, name = posixpath.split(path)
        if name == DELETE_ALL_BELOW:
            if self.has_image_below and directory == "/":
                refuse("the entry deletes the entire image below; import the archive without --over")
            for inner_name in os.listdir(directory) if os.path.isdir(directory) else ():
                _remove_path(posixpath.join(directory, inner_name))
            if self.has_image_below:
                self._make_directories(directory)
                os.setxattr(directory, *OPAQUE_ATTRIBUTE)
        # A double prefix marks notes of aufs
        elif name.startswith(DELETED_PREFIX) and not name.startswith(DELETED_PREFIX * 2):
            if (name := name.removeprefix(DELETED_PREFIX)) in ("", ".", ".."):
                refuse("the entry does not name a file to delete")
            _remove_path(deleted_path := posixpath.join(directory, name))
            if self.has_image_below:
                self._make_directories(directory)
                self._count_entry()
                os.mknod(deleted_path, stat.S_IFCHR)

    def _add_entry(self, tar: tarfile.TarFile, path: str, member: tarfile.TarInfo) -> None:
        """Create an entry's path in place of a present path. Links in its directories resolve inside the
        root."""
        self._count_entry(member.size if member.isreg() else 0)  # other entries could have a negative size

        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return  # devices and pipes

        if path == "/" or posixpath.basename(path).startswith(DELETED_PREFIX):
            return

        self._make_directories(posixpath.dirname(path))
        if member.isdir():
            _make_directory(path, member.mode & 0o1777)
            return

        _remove_path(path)
        if member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link(posixpath.join("/", member.linkname), path, follow_symlinks=False)
        else:
            open_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            contents = tar.extractfile(member)
            assert contents is not None
            with open(os.open(path, open_flags, member.mode & 0o777), "wb") as file:
                shutil.copyfileobj(contents, file, CHUNK_BYTES)
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _make_directories(self, path: str) -> None:
        if os.path.isdir(path):
            return
        if os.path.lexists(path) and not stat.S_ISCHR(os.lstat(path).st_mode):
            refuse(f"the parent {path!r} is not a directory")

        self._make_directories(posixpath.dirname(path))
        self._count_entry()
        _make_directory(path, 0o755)

    def _count_entry(self, size: int = 0) -> None:
        self.file_count += 1
        self.total_size += size
        if self.file_count > self.bounds.files:
            refuse(f"the layers contain more than {self.bounds.files} entries (--files)")
        if self.total_size > self.bounds.mib << 20:
            refuse(f"the layers contain more than {self.bounds.mib} MiB of files (--mib)")


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    file.seek(0)
    try:
        return tarfile.open(fileobj=file)
    except tarfile.ReadError:
        refuse("the file is not a tar archive, or uses a compression other than gzip, bzip2 or xz")


def _make_directory(path: str, mode: int) -> None:
    """Make a directory, or change the mode of a present directory. Only here a directory replaces a file."""
    existing_mode = os.lstat(path).st_mode if os.path.lexists(path) else 0

    if stat.S_ISDIR(existing_mode):
        os.chmod(path, mode)
        return

    _remove_path(path)
    os.mkdir(path, mode)
    if stat.S_ISCHR(existing_mode):  # the path was deleted before: the image below must not show through
        os.setxattr(path, *OPAQUE_ATTRIBUTE)


def _remove_path(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        emptying.empty_directory(path)
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)
