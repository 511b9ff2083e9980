"""Reads content of tools and environments: text, an image, or a list of texts and images.

    ["The map:", PIL.Image, ImageFile(bytes)] ──read_content──► "The map:" IMAGE_MARK IMAGE_MARK, StoredImages

For a model that reads text only, IMAGE_NOTE stands in the place of an image.
"""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from asyncrl.types import IMAGE_MARK, Message
from asyncrl.vision.files import MAX_FILE_BYTES, ImageError, StoredImage, prepare_decoded, prepare_image
from asyncrl.vision.layout import ImageLayout

IMAGE_NOTE = "[image]"  # what people, and models that read text only, read in the place of an image
MAX_IMAGES = 16  # of a reply or a message
MAX_DECODERS = 2  # images that a process decodes at a time, as each may take much memory
DECODER_SECONDS = 120.0  # for an image to wait for other images
BASE64_STEP = 1 << 20  # characters that are decoded at a time, as decoding holds Python's lock; 4 are 3 bytes
MAX_CONTENT_BYTES = 32 << 20  # stored files of a reply or a message, so that a record holds several


_free_decoders = threading.BoundedSemaphore(MAX_DECODERS)


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
            return b"".join(
                base64.b64decode(self.file[start : start + BASE64_STEP], validate=True)
                for start in range(0, len(self.file), BASE64_STEP)
            )
        except ValueError as error:
            raise ImageError(f"the image is not valid base64 ({error})") from None


class ImageTimeoutError(ImageError):
    """An image that was not read in time, because of other images. The image itself may be good."""


class Content(NamedTuple):
    """Text with an IMAGE_MARK for each of the images, in order."""

    text: str
    images: tuple[StoredImage, ...] = ()


def is_image(value: Any) -> bool:
    """Return True for an ImageFile or a PIL.Image. Does not import Pillow: who makes an image has done so."""
    pillow = sys.modules.get("PIL.Image")
    return isinstance(value, ImageFile) or (pillow is not None and isinstance(value, pillow.Image))


def has_image_parts(value: Any) -> bool:
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
            images.append(prepare_in_turn(part, layout, seconds=DECODER_SECONDS))

    if sum(len(image.file) for image in images) > MAX_CONTENT_BYTES:
        raise ImageError(
            f"the images of a reply or message take more than {MAX_CONTENT_BYTES >> 20} MiB; return fewer or "
            "smaller images"
        )

    return Content("".join(texts), tuple(images))


def prepare_in_turn(
    image: Any, layout: ImageLayout, *, seconds: float, is_wanted: Callable[[], bool] = lambda: True
) -> StoredImage:
    """Prepare an ImageFile or a PIL.Image for a model, MAX_DECODERS images at a time in this process.
    ImageError for an image that models cannot read, ImageTimeoutError for an image whose turn does not come
    within so many seconds, or is not wanted any more when it comes."""
    if not _free_decoders.acquire(timeout=seconds):
        raise ImageTimeoutError(
            f"the image waited for other images for more than {seconds:.0f} s; send fewer or smaller images"
        )
    try:
        if not is_wanted():
            raise ImageTimeoutError("the image is not wanted any more")
        if isinstance(image, ImageFile):
            return prepare_image(image.read_bytes(), layout)
        return prepare_decoded(image, layout)
    finally:
        _free_decoders.release()


def with_image_notes(message: Message) -> Message:
    """Return the message for a model that reads text only: with IMAGE_NOTE in the place of each image."""
    if not message.images:
        return message
    return replace(message, content=message.content.replace(IMAGE_MARK, IMAGE_NOTE), images=())


def without_marks(text: str) -> str:
    """Return text without IMAGE_MARKs, which would count as images."""
    return text.replace(IMAGE_MARK, "")
