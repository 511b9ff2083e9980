"""Calls of the kernel that make namespaces and mounts."""

from __future__ import annotations

import ctypes
import os

from asyncrl.isolation.sandbox.kernel import MACHINE, check, libc, syscall

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
READ_ONLY, NO_SUID, NO_DEVICES, ID_MAP = 1, 2, 4, 1 << 20  # of mount_setattr
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_EMPTY_PATH = 1, 4


def unshare(flags: int) -> None:
    check(libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    check(libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data)), f"mount at {target}")


def copy_mount(path: str) -> int:
    """Return a descriptor of a mount of its own of the tree at `path`, which is mounted nowhere yet."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE
    return syscall(f"open_tree of {path}", SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def place_mount(tree: int, path: str) -> None:
    """Mount what `copy_mount` returned at `path`, and close it."""
    flags = MOVE_MOUNT_EMPTY_PATH
    syscall(f"move_mount to {path}", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(path), flags)
    os.close(tree)


def set_attributes(tree: int, path: str, attributes: int, users: int = 0) -> None:
    """Change a mount and all below it: the one at `path` (`tree`: AT_FDCWD), or `tree` (`path` is "").
    `users`: for ID_MAP, the user namespace that maps its ids."""
    given = (ctypes.c_uint64 * 4)(attributes, 0, 0, users)
    flags = AT_RECURSIVE | AT_EMPTY_PATH
    syscall("mount_setattr", SYS_MOUNT_SETATTR, tree, os.fsencode(path), flags, given, ctypes.sizeof(given))


def enter_root(root: str) -> None:
    """Make the mount at `root` the root of this mount namespace. The old root is gone."""
    os.chdir(root)
    syscall("pivot_root", SYS_PIVOT_ROOT[MACHINE], b".", b".")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")
