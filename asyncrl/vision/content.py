"""Reads content of tools and environments: text, an image, or a list of texts and images.

    ["The map:", PIL.Image, ImageFile(bytes)] ──read_content──► "The map:" IMAGE_MARK IMAGE_MARK, StoredImages

For a model that reads text only, IMAGE_NOTE stands in the place of an image.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.types import IMAGE_MARK
from asyncrl.vision.files import MAX_FILE_BYTES, ImageError, StoredImage, prepare_decoded, prepare_image
from asyncrl.vision.layout import ImageLayout

IMAGE_NOTE = "[image]"
MAX_IMAGES = 16  # of a reply or a message
MAX_CONTENT_BYTES = 32 << 20  # stored files of a reply or a message, so that a record holds several


@dataclass(frozen=True)
class ImageFile:
    """An image as the bytes of a file (PNG, JPEG, WebP, …), or as these bytes in base64, where a PIL.Image
    could stand. A PNG or JPEG file in a size that the model reads is kept as it is."""

    file: bytes | str

    def read_bytes(self) -> bytes:
        """Return the bytes of the file. ImageError for text that is not base64."""
        if isinstance(self.file, bytes):
            return self.file
        if len(self.file) > MAX_FILE_BYTES // 3 * 4 + 4:
            raise ImageError(f"the image file has more than {MAX_FILE_BYTES:,} bytes; scale it down")
        try:
            return base64.b64decode(self.file, validate=True)
        except ValueError as error:
            raise ImageError(f"the image is not valid base64 ({error})") from None


class Content(NamedTuple):
    """Text with an IMAGE_MARK for each of the images, in order."""

    text: str
    images: tuple[StoredImage, ...] = ()


def is_image(value: Any) -> bool:
    """Return True for an ImageFile or a PIL.Image. Does not import Pillow: who makes an image has done so."""
    pillow = sys.modules.get("PIL.Image")
    return isinstance(value, ImageFile) or (pillow is not None and isinstance(value, pillow.Image))


def has_images(value: Any) -> bool:
    """Return True for an image, and for a list or tuple with an image."""
    return is_image(value) or (isinstance(value, list | tuple) and any(map(is_image, value)))


def read_content(value: Any, layout: ImageLayout | None) -> Content:
    """Return the content of a text, an image, or a list of texts and images, which follow each other without
    separators. `layout`: None for a model that reads text only. Decodes and scales images: call in a thread.
    TypeError for other values, ImageError for an image that models cannot read."""
    parts = value if isinstance(value, list | tuple) else [value]
    if sum(map(is_image, parts)) > MAX_IMAGES:
        raise ImageError(f"a reply or message can have at most {MAX_IMAGES} images")

    texts: list[str] = []
    images: list[StoredImage] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(without_marks(part))
        elif not is_image(part):
            raise TypeError(f"content must be text, images, or a list of both, not {type(part).__name__}")
        elif layout is None:
            texts.append(IMAGE_NOTE)
        else:
            texts.append(IMAGE_MARK)
            if isinstance(part, ImageFile):
                images.append(prepare_image(part.read_bytes(), layout))
            else:
                images.append(prepare_decoded(part, layout))

    if sum(len(image.file) for image in images) > MAX_CONTENT_BYTES:
        raise ImageError(
            f"the images of a reply or message take more than {MAX_CONTENT_BYTES >> 20} MiB; return fewer or "
            "smaller images"
        )

    return Content("".join(texts), tuple(images))


def without_marks(text: str) -> str:
    """Return text without IMAGE_MARKs, which would count as images."""
    return text.replace(IMAGE_MARK, "")
