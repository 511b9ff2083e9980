"""Images: root file systems that sandboxes start from, unpacked once and never written to.

IMAGES/sha256-DIGEST/{root/, image.json}      IMAGES/names/NAME ─► ../sha256-DIGEST
IMAGES/incoming-…/   of an import under way, which holds a lock on it; without the lock it is litter
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError, one_line

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of an image that names none
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Image(msgspec.Struct, frozen=True):
    """Describes an image. `root`: the directory of its files, all of which belong to the user who imported
    it. `over`: roots of the images below it, the nearest first; in image.json their digests. `environment`:
    its variables, PATH among them. `directory`: where programs start. `user`: the name of the user that it
    was made for. `size`: bytes of its own `files`."""

    digest: str
    root: str = ""
    over: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=lambda: {"PATH": PATH})
    directory: str = "/"
    user: str = ""
    size: int = 0
    files: int = 0

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the directories that overlayfs takes, the uppermost first."""
        return (self.root, *self.over)


def images_directory() -> Path:
    """Find the directory of all images of this user: ASYNCRL_IMAGES, or one in the user's data directory."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(os.environ.get("ASYNCRL_IMAGES") or Path(data, "asyncrl/images")).absolute()


def no_room(images: str | Path, error: BaseException) -> str:
    """Say where there is no room for an image, and what to do."""
    return (
        f"{images} has no room for the image ({one_line(error)}); free space there, or set ASYNCRL_IMAGES to "
        "another directory"
    )


def find_image(name: str) -> Image:
    """Find an image by its name or its digest (`sha256-…`). ConfigError that says how to import one."""
    images = images_directory()
    place = images / (name if name.startswith("sha256-") else f"names/{name}")
    try:
        if not NAME.fullmatch(name):
            raise FileNotFoundError
        image = msgspec.json.decode((place / "image.json").read_bytes(), type=Image)
        roots = [str((images / each / "root").resolve(strict=True)) for each in (image.digest, *image.over)]
    except FileNotFoundError:
        known = ", ".join(sorted(path.name for path in images.glob("names/*"))) or "none"
        raise ConfigError(
            f"there is no image {name!r} (there are: {known}); "
            f"make one: asyncrl image import FILE --name {name}"
        ) from None
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(
            f"image {name!r} cannot be read ({error}); remove it, and import it again"
        ) from error
    return msgspec.structs.replace(image, root=roots[0], over=tuple(roots[1:]))


def list_images() -> dict[str, list[str]]:
    """Find all images: their digests, with the names of each."""
    images = images_directory()
    found: dict[str, list[str]] = {path.name: [] for path in sorted(images.glob("sha256-*"))}
    for path in sorted(images.glob("names/*")):
        found.setdefault(path.readlink().name, []).append(path.name)
    return found
