"""Images: root file systems that sandboxes start from, unpacked once and never written to.

IMAGES/sha256-DIGEST/{root/, image.json}      IMAGES/names/NAME ─► ../sha256-DIGEST
IMAGES/incoming-…/   of an import under way, which holds a lock on the directory; without the lock: litter
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError, one_line

# Search path of an image without PATH.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Image(msgspec.Struct, frozen=True):
    """Describe an image. `root`: the directory of the image's files, all of which belong to the importing
    user. `over`: roots of the images below this image, the nearest first; digests in image.json.
    `environment`: variables of programs, PATH among them. `directory`: where programs start. `user`: the
    name of the user that the image was made for. `size`: bytes of the image's own `files`, without the
    images below."""

    digest: str
    root: str = ""
    over: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    directory: str = "/"
    user: str = ""
    size: int = 0
    files: int = 0

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the directories that overlayfs takes, the uppermost first."""
        return (self.root, *self.over)


def images_directory() -> Path:
    """Find the directory of all images of this user: ASYNCRL_IMAGES, or a part of the user's data
    directory."""
    data_directory = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(os.environ.get("ASYNCRL_IMAGES") or Path(data_directory, "asyncrl/images")).absolute()


def describe_no_room(images: str | Path, error: BaseException) -> str:
    """Say that the directory of images is full, and how to continue."""
    return (
        f"{images}: no space left for the image ({one_line(error)}); free some space, or set ASYNCRL_IMAGES "
        "to another directory"
    )


def find_image(name: str) -> Image:
    """Find an image by name or by digest (`sha256-…`). ConfigError tells how to import an image."""
    images = images_directory()
    image_directory = images / (name if name.startswith("sha256-") else f"names/{name}")

    try:
        if not NAME_PATTERN.fullmatch(name):
            raise FileNotFoundError
        image = msgspec.json.decode((image_directory / "image.json").read_bytes(), type=Image)
        roots = [
            str((images / digest / "root").resolve(strict=True)) for digest in (image.digest, *image.over)
        ]
    except FileNotFoundError:
        known_names = ", ".join(sorted(path.name for path in images.glob("names/*"))) or "none"
        raise ConfigError(
            f"no image named {name!r} (available: {known_names}); run asyncrl image import FILE --name {name}"
        ) from None
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(
            f"image {name!r} cannot be read ({error}); remove the image and import it again"
        ) from error

    return msgspec.structs.replace(image, root=roots[0], over=tuple(roots[1:]))


def list_images() -> dict[str, list[str]]:
    """Find all images: the names of each image, by digest."""
    images = images_directory()
    names_by_digest: dict[str, list[str]] = {path.name: [] for path in sorted(images.glob("sha256-*"))}

    for path in sorted(images.glob("names/*")):
        names_by_digest.setdefault(path.readlink().name, []).append(path.name)

    return names_by_digest
