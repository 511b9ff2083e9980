"""Imports and removes images. A child process unpacks the archives (unpacking.py)."""

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
from asyncrl.isolation.images import (
    NAME_PATTERN,
    Image,
    describe_no_room,
    find_image,
    images_directory,
    list_images,
)
from asyncrl.isolation.sandbox import emptying
from asyncrl.isolation.unpacking import CHUNK_BYTES, DELETED_PREFIX, OPAQUE_ATTRIBUTE, UNPACK, Bounds, Order

MAX_IMAGES_BELOW = 8  # overlayfs takes the paths of all layers in 4 KiB
LOCK_SECONDS = 60.0  # to wait for a lock that other processes hold for moments
MAX_ANSWER_BYTES = 8 << 20  # limit of the unpacking child's answer
INCOMING_PREFIX = "incoming-"  # names of directories that are not yet images, or no longer


def import_image(source: str, name: str = "", over: str = "", bounds: Bounds = Bounds()) -> Image:
    """Import an archive, a directory or `-`, the standard input, as `name`: entirely, or not at all. `over`:
    the image below the new image. ConfigError tells why an import is refused. Must be called outside of
    event loops."""
    if name and (not NAME_PATTERN.fullmatch(name) or name.startswith("sha256-")):
        raise ConfigError(
            f"--name {name!r}: use up to 100 letters, digits and . _ -; the name must not begin with sha256-"
        )

    if source != "-" and not os.path.exists(source):
        raise ConfigError(f"{source}: no such file or directory")

    image = find_image(over) if over else Image("")
    layer_roots = [root for root in image.layers if root]
    digests_below = tuple(Path(root).parent.name for root in layer_roots)
    if len(digests_below) > MAX_IMAGES_BELOW:
        raise ConfigError(
            f"--over {over}: this image already has {MAX_IMAGES_BELOW} images below it; flatten them into a "
            "single image"
        )
    image = msgspec.structs.replace(image, digest="", root="", over=digests_below, size=0, files=0)

    images = images_directory()
    try:
        images.mkdir(parents=True, exist_ok=True)
        emptying.delete_abandoned(str(images), INCOMING_PREFIX)
        with emptying.locked_directory(str(images), INCOMING_PREFIX) as directory_path:
            new_directory = Path(directory_path)
            archive_path = os.path.abspath(source)
            spool_path = new_directory / "archive"
            root_directory = new_directory / "root"
            root_directory.mkdir()

            if not os.path.isdir(archive_path) and not os.path.isfile(archive_path):
                archive_path = _copy_stream(source, str(spool_path), bounds)

            try:
                image = asyncio.run(
                    _unpack_in_child(Order(archive_path, str(spool_path), str(root_directory), image, bounds))
                )
                _refuse_hiding(str(root_directory), layer_roots)
            except CallTimeout:
                timeout_text = f"unpacking took more than {bounds.seconds} s (--seconds)"
                raise ConfigError(f"{source}: {timeout_text}; nothing was imported") from None
            except (ChildError, ConfigError) as error:
                raise ConfigError(f"{source}: {error}; nothing was imported") from error

            spool_path.unlink(missing_ok=True)
            (new_directory / "image.json").write_bytes(msgspec.json.encode(image))

            with _lock_images(images):
                if image.over:
                    find_image(image.over[0])  # raises if the image below has been removed meanwhile
                if not (images / image.digest).exists():
                    new_directory.rename(images / image.digest)
                if name:
                    (images / "names").mkdir(exist_ok=True)
                    (link := images / ".new").unlink(missing_ok=True)
                    link.symlink_to(f"../{image.digest}")
                    link.replace(images / "names" / name)
        return find_image(image.digest)
    except OSError as error:
        if not disk_full(error):
            raise
        raise ConfigError(f"{source}: {describe_no_room(images, error)}; nothing was imported") from error


def remove_image(name: str) -> bool:
    """Remove a name, and the image if this was its only name; or, given a digest, an image with all names.
    Returns whether the image was removed. ConfigError: another image lies over this image."""
    with _lock_images(images := images_directory()):
        names_by_digest = list_images()
        named_digests = [
            digest for digest, image_names in names_by_digest.items() if name in (digest, *image_names)
        ]
        digest = named_digests[0] if named_digests else find_image(name).digest

        removes_image = name == digest or names_by_digest[digest] == [name]
        other_images = (path for path in images.glob("sha256-*/image.json") if path.parent.name != digest)
        digests_above = [
            path.parent.name for path in other_images if digest in path.read_text(errors="replace")
        ]

        if removes_image and digests_above:
            raise ConfigError(
                f"image {name!r} lies below {len(digests_above)} other "
                f"image{'s' * (len(digests_above) > 1)}; remove {digests_above[0]} first"
            )

        for image_name in names_by_digest[digest] if removes_image else [name]:
            (images / "names" / image_name).unlink()

        if removes_image:
            (images / digest).rename(images / f"{INCOMING_PREFIX}{digest}")

    emptying.delete_abandoned(str(images), INCOMING_PREFIX)
    return removes_image


async def _unpack_in_child(order: Order) -> Image:
    child = await Child.start(UNPACK, "the unpacking process", MAX_ANSWER_BYTES)
    try:
        await child.open(True)
        return await child.ask(order, order.bounds.seconds)
    finally:
        child.kill()
        await child.wait_for_exit()


def _refuse_hiding(root: str, layer_roots: list[str]) -> None:
    """Refuse a directory in `root` that would replace a link of an image below: the link's target would be
    hidden, as when a file for bin/ lies over a link from bin to usr/bin. Follows no link."""
    pending_directories = [("", layer_roots)]
    while pending_directories:
        parent_path, layers_below = pending_directories.pop()
        with suppress(PermissionError), os.scandir(root + parent_path) as entries:
            for path in (
                f"{parent_path}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)
            ):
                layers_with_path = [layer for layer in layers_below if os.path.lexists(layer + path)]
                if not layers_with_path or OPAQUE_ATTRIBUTE[0] in os.listxattr(root + path):
                    continue  # there is nothing below, or the directory hides it on purpose

                linking_layers = [layer for layer in layers_with_path if os.path.islink(layer + path)]
                if layers_with_path[:1] == linking_layers[:1]:
                    link_target = os.readlink(layers_with_path[0] + path)
                    raise ConfigError(
                        f"{path[1:]!r} is a link to {link_target!r} in the underlying image, and this "
                        f"directory would hide that target; put the files into it, or delete the link first "
                        f"({DELETED_PREFIX}NAME)"
                    )
                pending_directories.append(
                    (path, [layer for layer in layers_with_path if layer not in linking_layers])
                )


def _copy_stream(source: str, spool_path: str, bounds: Bounds) -> str:
    """Copy a stream that cannot be read twice to a file; return its path."""
    with (
        open(sys.stdin.fileno() if source == "-" else source, "rb") as source_file,
        open(spool_path, "wb") as spool_file,
    ):
        while chunk := source_file.read(CHUNK_BYTES):
            spool_file.write(chunk)
            if spool_file.tell() >> 20 >= bounds.mib:
                raise ConfigError(f"the archive is larger than {bounds.mib} MiB (--mib)")
    return spool_path


@contextmanager
def _lock_images(images: Path) -> Iterator[None]:
    """Hold the lock of all images for a moment. ConfigError: another process keeps the lock."""
    images.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_SECONDS

    with (images / ".lock").open("a") as lock_file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                lock_holder = f"process {Path(lock_file.name).read_text()}"
                raise ConfigError(
                    f"{lock_file.name}: {lock_holder} has held this lock for {LOCK_SECONDS:g} s; wait, or "
                    "stop that process"
                )
            time.sleep(0.05)

        lock_file.truncate(0)
        print(os.getpid(), end="", file=lock_file, flush=True)
        yield
