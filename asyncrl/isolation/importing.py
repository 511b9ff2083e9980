"""Imports and removes images. What an archive holds is unpacked by a child process (unpacking.py)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from asyncrl.errors import ConfigError, disk_full
from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import Child, ChildError
from asyncrl.isolation.images import NAME, Image, find_image, images_directory, list_images, no_room
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.unpacking import CHUNK, DELETED, OPAQUE, UNPACK, Bounds, Order

MOST_OVER = 8  # overlayfs takes the paths of all in 4 KiB
LOCK_SECONDS = 60.0  # to wait for a lock that others hold for moments
LARGEST = 8 << 20  # bytes of a child's answer
INCOMING = "incoming-"  # names of directories that are no images yet, or no more


def import_image(source: str, name: str = "", over: str = "", bounds: Bounds = Bounds()) -> Image:
    """Import an archive, a directory or `-`, the standard input, as `name`: whole, or not at all. `over`: the
    image that it lies over. ConfigError for what is refused. Must be called outside of event loops."""
    if name and (not NAME.fullmatch(name) or name.startswith("sha256-")):
        raise ConfigError(f"--name {name!r}: up to 100 letters, digits and . _ -, but not sha256-")
    if source != "-" and not os.path.exists(source):
        raise ConfigError(f"{source}: no such file or directory")
    image = find_image(over) if over else Image("")
    layers = [root for root in image.layers if root]
    below = tuple(Path(root).parent.name for root in layers)
    if len(below) > MOST_OVER:
        raise ConfigError(f"--over {over}: it lies over {MOST_OVER} images itself; import them as one")
    image = msgspec.structs.replace(image, digest="", root="", over=below, size=0, files=0)
    images = images_directory()
    try:
        return _imported(source, name, image, layers, bounds, images)
    except OSError as error:
        if not disk_full(error):
            raise
        raise ConfigError(f"{source}: {no_room(images, error)}; nothing was imported") from error


def _imported(source: str, name: str, image: Image, layers: list[str], bounds: Bounds, images: Path) -> Image:
    images.mkdir(parents=True, exist_ok=True)
    emptying.sweep(str(images), INCOMING)
    with emptying.own_directory(str(images), INCOMING) as made:
        place = Path(made)
        path = os.path.abspath(source)
        spool = place / "archive"
        root = place / "root"
        root.mkdir()
        if not os.path.isdir(path) and not os.path.isfile(path):
            path = _copy(source, str(spool), bounds)
        try:
            image = asyncio.run(_unpack(Order(path, str(spool), str(root), image, bounds)))
            _refuse_hiding(str(root), layers)
        except CallTimeout:
            late = f"not unpacked within {bounds.seconds} s (--seconds)"
            raise ConfigError(f"{source}: {late}; nothing was imported") from None
        except (ChildError, ConfigError) as error:
            raise ConfigError(f"{source}: {error}; nothing was imported") from error
        spool.unlink(missing_ok=True)
        (place / "image.json").write_bytes(msgspec.json.encode(image))
        with _locked(images):
            if image.over:
                find_image(image.over[0])  # it may have been removed
            if not (images / image.digest).exists():
                place.rename(images / image.digest)
            if name:
                (images / "names").mkdir(exist_ok=True)
                (link := images / ".new").unlink(missing_ok=True)
                link.symlink_to(f"../{image.digest}")
                link.replace(images / "names" / name)
    return find_image(image.digest)


def remove_image(name: str) -> bool:
    """Remove a name and, if it has no other one, its image; or by its digest an image with all names. Returns
    whether the image is gone. ConfigError for one that another lies over."""
    with _locked(images := images_directory()):
        found = list_images()
        digest = next((one for one in found if name in (one, *found[one])), "") or find_image(name).digest
        gone = name == digest or found[digest] == [name]
        others = (path for path in images.glob("sha256-*/image.json") if path.parent.name != digest)
        above = [path.parent.name for path in others if digest in path.read_text(errors="replace")]
        if gone and above:
            raise ConfigError(f"image {name!r} has images over it: {len(above)}; remove first {above[0]}")
        for each in found[digest] if gone else [name]:
            (images / "names" / each).unlink()
        if gone:
            (images / digest).rename(images / f"{INCOMING}{digest}")
    emptying.sweep(str(images), INCOMING)
    return gone


async def _unpack(order: Order) -> Image:
    child = await Child.start(UNPACK, "the unpacking process", LARGEST)
    try:
        await child.open(True)
        return await child.ask(order, order.bounds.seconds)
    finally:
        child.kill()
        await child.gone()


def _refuse_hiding(root: str, layers: list[str]) -> None:
    """Refuse a directory in `root` at the place of a link below it: all that the link leads to would be
    hidden, as with a file for bin/ over a link from there to usr/bin. Follows no link."""
    ahead = [("", layers)]
    while ahead:
        above, below = ahead.pop()
        with suppress(PermissionError), os.scandir(root + above) as entries:
            for path in (f"{above}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)):
                there = [layer for layer in below if os.path.lexists(layer + path)]
                if not there or OPAQUE[0] in os.listxattr(root + path):
                    continue  # nothing is below, or it is to hide what is
                links = [layer for layer in there if os.path.islink(layer + path)]
                if there[:1] == links[:1]:
                    target = os.readlink(there[0] + path)
                    raise ConfigError(
                        f"{path[1:]!r} is a link to {target!r} in the image below, all of which this would "
                        f"hide: put its files there, or delete the link before ({DELETED}NAME)"
                    )
                ahead.append((path, [layer for layer in there if layer not in links]))


def _copy(source: str, spool: str, bounds: Bounds) -> str:
    """Copy what cannot be read twice."""
    with open(sys.stdin.fileno() if source == "-" else source, "rb") as file, open(spool, "wb") as copy:
        while chunk := file.read(CHUNK):
            copy.write(chunk)
            if copy.tell() >> 20 >= bounds.mib:
                raise ConfigError(f"{source}: has more than {bounds.mib} MiB (--mib)")
    return spool


@contextmanager
def _locked(images: Path) -> Iterator[None]:
    """Hold the lock of all images, for a moment. ConfigError where another process keeps it."""
    images.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + LOCK_SECONDS
    with (images / ".lock").open("a") as lock:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                who = f"process {Path(lock.name).read_text()}"
                raise ConfigError(f"{lock.name}: {who} has kept it for {LOCK_SECONDS:g} s; wait, or end that")
            time.sleep(0.05)
        lock.truncate(0)
        print(os.getpid(), end="", file=lock, flush=True)
        yield
