"""The root of a sandbox with an image: overlayfs over the image's layers, which are never written.

    copies of mounts of the layers, /proc, /dev, shown paths ──► a new root ──► the copies are placed inside

No path of the image is a path of the machine: the image's links are followed only when the machine's root is
gone."""

from __future__ import annotations

import array
import os
import stat
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, SCM_RIGHTS, SOL_SOCKET, socketpair
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.isolation.sandbox import kernel

UPPER_NAME = "upper"
WORK_NAME = "work"
MERGED_NAME = "root"
# Top names of the sandbox that no shown path of the machine replaces
RESERVED_NAMES = (
    "",
    "proc",
    "dev",
    "etc",
    "sandbox",
)
MAX_FILE_BYTES = 1 << 20  # bytes that are read of a file in /etc
ETC_FILES = ("passwd", "group", "hosts", "nsswitch.conf")  # files in /etc that a sandbox makes or adds to
DEFAULT_ETC_TEXTS = {"hosts": "127.0.0.1 localhost\n::1 localhost\n", "nsswitch.conf": "hosts: files\n"}


def copy_layers(layers: Sequence[str], uid: int) -> list[int]:
    """Copy the mounts of an image's layers, in which all files belong to the user `uid`. OSError: the files
    belong to another user, and cannot be mapped."""
    if not layers:
        return []

    owner_status = os.stat(layers[0])
    user_namespace = -1
    if owner_status.st_uid != uid:
        if os.geteuid() != 0:
            raise PermissionError(
                f"{layers[0]} belongs to another user; import the image as the user who runs the sandbox"
            )
        user_namespace = _make_mapped_namespace(owner_status, uid)

    layer_mounts = []
    for layer in layers:
        layer_mounts.append(kernel.copy_mount(layer))
        kernel.set_attributes(layer_mounts[-1], "", kernel.SAFE_READ_ONLY)
        if user_namespace >= 0:
            try:
                kernel.set_attributes(layer_mounts[-1], "", kernel.ID_MAP, user_namespace)
            except OSError as error:
                advice = (
                    "this file system cannot map users; keep images on another file system, or do not run as "
                    "root"
                )
                raise OSError(error.errno, advice, layer) from error

    if user_namespace >= 0:
        os.close(user_namespace)
    return layer_mounts


def _make_mapped_namespace(owner_status: os.stat_result, uid: int) -> int:
    """Return a descriptor of a user namespace for id-mapped mounts: files of the owner and of his group
    appear in a mount with that namespace as files of the user and the group `uid`."""
    parent_socket, child_socket = socketpair()
    child_pid = os.fork()

    if child_pid == 0:
        try:
            parent_socket.close()
            kernel.unshare(kernel.NEWUSER)
            descriptors = array.array("i", [os.open("/proc/self", os.O_PATH)])
            child_socket.sendmsg([b"u"], [(SOL_SOCKET, SCM_RIGHTS, descriptors)])
            child_socket.recv(1)  # until the ids are mapped
        finally:
            os._exit(0)

    child_socket.close()
    _, ancillary, *_ = parent_socket.recvmsg(1, CMSG_SPACE(4), MSG_CMSG_CLOEXEC)
    if not ancillary:
        raise PermissionError("cannot create a user namespace in which to map the image's files")

    process_fd = int.from_bytes(ancillary[0][2], "little")
    for name, inside_id in (("uid_map", owner_status.st_uid), ("gid_map", owner_status.st_gid)):
        map_fd = os.open(name, os.O_WRONLY, dir_fd=process_fd)
        os.write(map_fd, f"{inside_id} {uid} 1".encode())
        os.close(map_fd)

    user_namespace = os.open("ns/user", os.O_RDONLY, dir_fd=process_fd)
    os.close(process_fd)
    parent_socket.close()
    os.waitpid(child_pid, 0)
    return user_namespace


def enter_image(
    layer_mounts: Sequence[int],
    small_root: str,
    home: str,
    shown_paths: Sequence[str],
    uid: int,
    inside_uid: int,
) -> int:
    """Change to a root of layers and an upper layer, and return a descriptor of the upper layer, which lies
    in `home` of `small_root`. The small root also has /proc, /dev and the shown paths. `inside_uid`: the id
    of the user `uid` inside."""
    private_directory = small_root + home
    for name in (UPPER_NAME, WORK_NAME, MERGED_NAME, *map(str, range(len(layer_mounts)))):
        os.mkdir(f"{private_directory}/{name}", 0o755)

    for layer, layer_mount in enumerate(layer_mounts):
        kernel.place_mount(layer_mount, f"{private_directory}/{layer}")
    _give_to_user(f"{private_directory}/{UPPER_NAME}", uid)

    lower_directories = ":".join(f"{private_directory}/{layer}" for layer in range(len(layer_mounts)))
    upper_fd = os.open(f"{private_directory}/{UPPER_NAME}", os.O_DIRECTORY | os.O_CLOEXEC)

    os.setxattr(upper_fd, "user.asyncrl", b"")  # lets directories replace directories: Linux 6.6
    os.removexattr(upper_fd, "user.asyncrl")
    options = f"lowerdir={lower_directories},upperdir={private_directory}/{UPPER_NAME}"
    options += f",workdir={private_directory}/{WORK_NAME},userxattr"
    kernel.mount("overlay", f"{private_directory}/{MERGED_NAME}", "overlay", kernel.MS_SAFE, options)

    grafts: dict[str, int | str] = {}  # a copied mount, or the target of a link, by path
    for path in _outermost_paths(shown_paths):
        source = small_root + path
        grafts[path] = os.readlink(source) if os.path.islink(source) else kernel.copy_mount(source)

    proc_mount = kernel.copy_mount(f"{small_root}/proc")
    device_mount = kernel.copy_mount(f"{small_root}/dev")

    kernel.enter_root(f"{private_directory}/{MERGED_NAME}")
    for path in ("/proc", "/dev", home):
        _make_directory(path, uid, real=True)
    os.chmod(home, 0o700)
    _make_directory("/tmp", uid, 0o1777)

    _name_user(uid, inside_uid, home)
    for path, copied in grafts.items():
        _graft_path(path, copied, uid)

    kernel.place_mount(device_mount, "/dev")
    kernel.place_mount(proc_mount, "/proc")  # last: links of /proc lead to descriptors
    return upper_fd


def _outermost_paths(paths: Sequence[str]) -> list[str]:
    """Leave out paths inside other paths, and paths that a sandbox makes. `paths`: shorter paths first."""
    outermost_paths: list[str] = []
    for path in paths:
        first_name, _, remaining_path = path[1:].partition("/")
        is_reserved = first_name in RESERVED_NAMES and not (first_name == "etc" and remaining_path)
        if not is_reserved and not any(path.startswith(f"{above}/") for above in outermost_paths):
            outermost_paths.append(path)
    return outermost_paths


def _graft_path(path: str, copied: int | str, uid: int) -> None:
    if isinstance(copied, int) and stat.S_ISDIR(os.fstat(copied).st_mode):
        _make_directory(path, uid, real=True)
    else:
        _make_directory(os.path.dirname(path), uid)
        with suppress(FileNotFoundError):
            os.unlink(path)

    if isinstance(copied, str):
        os.symlink(copied, path)
        return

    if not os.path.lexists(path):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    kernel.place_mount(copied, path)


def _make_directory(path: str, uid: int, mode: int = 0o755, real: bool = False) -> None:
    """Make a directory of the image if there is none, in place of a file. `real`: also in place of a link to
    a directory."""
    if os.path.isdir(path) and not (real and os.path.islink(path)):
        return
    if os.path.lexists(path):
        os.unlink(path)
    else:
        _make_directory(os.path.dirname(path), uid)

    os.mkdir(path)
    os.chmod(path, mode)
    _give_to_user(path, uid)


def _give_to_user(path: str | int, uid: int) -> None:
    # Only root's sandbox has another user; elsewhere the group may have another number
    if uid != os.getuid():
        os.chown(path, uid, uid)


def _name_user(uid: int, inside_uid: int, home: str) -> None:
    """Give the user of the code, whose id inside is `inside_uid`, a name in the image."""
    user_name = "sandbox" if inside_uid else "root"
    _make_directory("/etc", uid)
    account_lines = {
        "passwd": f"{user_name}:x:{inside_uid}:{inside_uid}::{home}:/bin/sh\n",
        "group": f"{user_name}:x:{inside_uid}:\n",
    }

    for file, line in account_lines.items():
        present_text = _read_text(f"/etc/{file}")
        if not any(entry.split(b":")[2:3] == [b"%d" % inside_uid] for entry in present_text.splitlines()):
            line_end = b"" if present_text[-1:] in (b"", b"\n") else b"\n"
            _replace_file(f"/etc/{file}", present_text + line_end + line.encode(), uid)

    for file, text in DEFAULT_ETC_TEXTS.items():
        if not _read_text(f"/etc/{file}"):
            _replace_file(f"/etc/{file}", text.encode(), uid)


def _read_text(path: str) -> bytes:
    """Read a file of the image; a path that is no file has no text."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return os.read(fd, MAX_FILE_BYTES)
        finally:
            os.close(fd)
    return b""


def _replace_file(path: str, data: bytes, uid: int) -> None:
    with suppress(OSError):  # a directory may be in the file's place
        if os.path.lexists(path):
            os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        _give_to_user(fd, uid)
        with open(fd, "wb", 0) as stream:
            stream.write(data)
