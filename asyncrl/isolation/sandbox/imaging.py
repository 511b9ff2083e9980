"""The root of a sandbox with an image: overlayfs over the image's layers, which are never written.

    copies of mounts of the layers, /proc, /dev, what is shown ──► a new root ──► the copies are placed in it

Nothing of the image is a path of the machine: its links are followed only when the machine's root is gone.
"""

from __future__ import annotations

import array
import os
import stat
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, SCM_RIGHTS, SOL_SOCKET, socketpair
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.isolation.sandbox import kernel

UPPER = "upper"
WORK = "work"
MERGED = "root"
KEPT = ("", "proc", "dev", "etc", "sandbox")  # no path of the machine is shown in place of these
LARGEST = 1 << 20  # bytes of a file in /etc that gets a line
ETC = ("passwd", "group", "hosts", "nsswitch.conf")  # files in /etc that a sandbox makes or adds to
FILES = {"hosts": "127.0.0.1 localhost\n::1 localhost\n", "nsswitch.conf": "hosts: files\n"}


def copy_layers(layers: Sequence[str], uid: int) -> list[int]:
    """Copy the mounts of an image's layers. All files belong to the user `uid`: OSError if they do not, and
    cannot be mapped to him."""
    if not layers:
        return []
    owner = os.stat(layers[0])
    users = -1
    if owner.st_uid != uid:
        if os.geteuid() != 0:
            raise PermissionError(f"{layers[0]} belongs to another user: import it as the one who runs it")
        users = _map_user(owner, uid)
    trees = []
    for layer in layers:
        trees.append(kernel.copy_mount(layer))
        kernel.set_attributes(trees[-1], "", kernel.SAFE_READ_ONLY)
        if users >= 0:
            try:
                kernel.set_attributes(trees[-1], "", kernel.ID_MAP, users)
            except OSError as error:
                told = "this file system cannot map users: keep images on another, or use them not as root"
                raise OSError(error.errno, told, layer) from error
    if users >= 0:
        os.close(users)
    return trees


def _map_user(owner: os.stat_result, uid: int) -> int:
    """Return a descriptor of a user namespace in which an `owner` and his group are `uid` of this one."""
    ours, theirs = socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            kernel.unshare(kernel.NEWUSER)
            number = array.array("i", [os.open("/proc/self", os.O_PATH)])
            theirs.sendmsg([b"u"], [(SOL_SOCKET, SCM_RIGHTS, number)])
            theirs.recv(1)  # until it is mapped
        finally:
            os._exit(0)
    theirs.close()
    _, ancillary, *_ = ours.recvmsg(1, CMSG_SPACE(4), MSG_CMSG_CLOEXEC)
    if not ancillary:
        raise PermissionError("no user namespace to map the image's files in")
    process = int.from_bytes(ancillary[0][2], "little")
    for name, inside in (("uid_map", owner.st_uid), ("gid_map", owner.st_gid)):
        file = os.open(name, os.O_WRONLY, dir_fd=process)
        os.write(file, f"{inside} {uid} 1".encode())
        os.close(file)
    users = os.open("ns/user", os.O_RDONLY, dir_fd=process)
    os.close(process)
    ours.close()
    os.waitpid(pid, 0)
    return users


def enter_image(
    layers: Sequence[int], little: str, home: str, shown: Sequence[str], uid: int, number: int
) -> int:
    """Change to a root of `layers` and an upper layer, and return a descriptor of that upper layer. It lies
    in `home` of `little`, a root from which /proc, /dev and the `shown` paths are taken. `number`: the id of
    the user `uid` inside."""
    private = little + home
    for name in (UPPER, WORK, MERGED, *map(str, range(len(layers)))):
        os.mkdir(f"{private}/{name}", 0o755)
    for layer, tree in enumerate(layers):
        kernel.place_mount(tree, f"{private}/{layer}")
    _give(f"{private}/{UPPER}", uid)
    lower = ":".join(f"{private}/{layer}" for layer in range(len(layers)))
    upper = os.open(f"{private}/{UPPER}", os.O_DIRECTORY | os.O_CLOEXEC)
    os.setxattr(upper, "user.asyncrl", b"")  # so that directories can replace others: Linux 6.6
    os.removexattr(upper, "user.asyncrl")
    options = f"lowerdir={lower},upperdir={private}/{UPPER},workdir={private}/{WORK},userxattr"
    kernel.mount("overlay", f"{private}/{MERGED}", "overlay", kernel.MS_SAFE, options)
    grafts = {path: _copy(little + path) for path in _outermost(shown)}
    proc = kernel.copy_mount(f"{little}/proc")
    devices = kernel.copy_mount(f"{little}/dev")
    kernel.enter_root(f"{private}/{MERGED}")
    for path in ("/proc", "/dev", home):
        _make_directory(path, uid, real=True)
    os.chmod(home, 0o700)
    _make_directory("/tmp", uid, 0o1777)
    _name_user(uid, number, home)
    for path, copy in grafts.items():
        _graft(path, copy, uid)
    kernel.place_mount(devices, "/dev")
    kernel.place_mount(proc, "/proc")  # last: its links lead to descriptors
    return upper


def _outermost(paths: Sequence[str]) -> list[str]:
    """Leave out paths below others, and those that a sandbox makes. `paths`: the shorter ones first."""
    found: list[str] = []
    for path in paths:
        first, _, rest = path[1:].partition("/")
        kept = first in KEPT and not (first == "etc" and rest)
        if not kept and not any(path.startswith(f"{above}/") for above in found):
            found.append(path)
    return found


def _copy(path: str) -> int | str:
    """Copy the mount, or the target of a link."""
    return os.readlink(path) if os.path.islink(path) else kernel.copy_mount(path)


def _graft(path: str, copy: int | str, uid: int) -> None:
    if isinstance(copy, int) and stat.S_ISDIR(os.fstat(copy).st_mode):
        _make_directory(path, uid, real=True)
    else:
        _make_directory(os.path.dirname(path), uid)
        with suppress(FileNotFoundError):
            os.unlink(path)
    if isinstance(copy, str):
        os.symlink(copy, path)
        return
    if not os.path.lexists(path):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    kernel.place_mount(copy, path)


def _make_directory(path: str, uid: int, mode: int = 0o755, real: bool = False) -> None:
    """Make a directory of the image where there is none. `real`: also where a link leads to one."""
    if os.path.isdir(path) and not (real and os.path.islink(path)):
        return
    if os.path.lexists(path):
        os.unlink(path)
    else:
        _make_directory(os.path.dirname(path), uid)
    os.mkdir(path)
    os.chmod(path, mode)
    _give(path, uid)


def _give(path: str | int, uid: int) -> None:
    if (
        uid != os.getuid()
    ):  # root's sandbox; any other has no other user, and its group may have another number
        os.chown(path, uid, uid)


def _name_user(uid: int, number: int, home: str) -> None:
    """Give the user of the code, whose id inside is `number`, a name in the image."""
    name = "sandbox" if number else "root"
    _make_directory("/etc", uid)
    lines = {"passwd": f"{name}:x:{number}:{number}::{home}:/bin/sh\n", "group": f"{name}:x:{number}:\n"}
    for file, line in lines.items():
        old = _text(f"/etc/{file}")
        if not any(entry.split(b":")[2:3] == [b"%d" % number] for entry in old.splitlines()):
            end = b"" if old[-1:] in (b"", b"\n") else b"\n"
            _replace(f"/etc/{file}", old + end + line.encode(), uid)
    for file, text in FILES.items():
        if not _text(f"/etc/{file}"):
            _replace(f"/etc/{file}", text.encode(), uid)


def _text(path: str) -> bytes:
    """Read a file of the image; what is no file has no text."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                return os.read(file, LARGEST)
        finally:
            os.close(file)
    return b""


def _replace(path: str, data: bytes, uid: int) -> None:
    with suppress(OSError):  # what is in its place may be a directory
        if os.path.lexists(path):
            os.unlink(path)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        _give(file, uid)
        with open(file, "wb", 0) as opened:
            opened.write(data)
