"""Reads the images that agents send: base64 in requests, decoded and scaled once for each episode.

    {"image_url": {"url": "data:image/png;base64,…"}} ──RequestImages──► RequestContent(IMAGE_MARK, ImageRef)

Agents send all images again with each request. A model that reads text only gets IMAGE_NOTE instead.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from asyncrl.errors import AsyncrlError
from asyncrl.types import IMAGE_MARK, ImageRef
from asyncrl.vision.content import (
    DECODER_SECONDS,
    IMAGE_NOTE,
    ImageFile,
    ImageTimeoutError,
    prepare_in_turn,
    without_marks,
)
from asyncrl.vision.files import ImageError, StoredImage
from asyncrl.vision.layout import ImageLayout

MAX_EPISODE_IMAGES = 1024
MAX_EPISODE_BYTES = 256 << 20  # of the stored files of an episode
PREPARE_SECONDS = 60.0  # for the new images of a request


class HasImageError(AsyncrlError):
    """A request that was read `without_images` has an image."""


class RequestContent(NamedTuple):
    """The content of a message of an agent: text with an IMAGE_MARK for each of the images."""

    text: str
    images: tuple[ImageRef, ...] = ()

    @classmethod
    def join(cls, separator: str, contents: Iterable[RequestContent]) -> RequestContent:
        parts = tuple(contents)
        text = separator.join(part.text for part in parts)
        return cls(text, tuple(image for part in parts for image in part.images))


class RequestImages:
    """Reads the images in the requests of an episode, one request at a time; the thread of a cancelled
    request may still be at work. `layout`: None for a model that reads text only. `add_image` takes an image
    into the episode."""

    def __init__(
        self,
        layout: ImageLayout | None,
        add_image: Callable[[StoredImage], ImageRef] = lambda image: image.ref,
    ) -> None:
        self.layout = layout
        self._add_image = add_image
        self._lock = threading.Lock()
        self._prepared: dict[bytes, ImageRef] = {}  # by the hash of the base64
        self._stored_bytes = 0
        self._deadline = math.inf  # for new images, on time.monotonic
        self.prepare_seconds = 0.0  # CPU time of the new images of this request

    def start_request(self) -> None:
        """Begin to read a request, which has PREPARE_SECONDS for new images."""
        self._deadline = time.monotonic() + PREPARE_SECONDS
        self.prepare_seconds = 0.0

    def without_images(self) -> RequestImages:
        """Return a reader of requests to the same model that raises HasImageError for any image: it takes no
        time and does not wait."""
        return self if self.layout is None else _NoImages(self.layout)

    def read_text(self, text: str) -> RequestContent:
        return RequestContent(text if self.layout is None else without_marks(text))

    def read_url(self, url: Any) -> RequestContent:
        """Read an image from a data URL. ImageError for any other URL, and for a bad image."""
        if self.layout is None:
            return RequestContent(IMAGE_NOTE)

        head, _, encoded_file = url.partition(",") if isinstance(url, str) else ("", "", "")
        if not (head.startswith("data:") and head.endswith(";base64")):
            raise ImageError(
                "an image must be sent as base64 (data:image/png;base64,…); images are not downloaded"
            )
        return self.read_base64(encoded_file)

    def read_base64(self, encoded_file: str) -> RequestContent:
        """Read an image from the base64 of a file. ImageError for a bad image, and for too many images;
        ImageTimeoutError for a new image behind the deadline of the request. A repeated request does not
        prepare the images before that image again."""
        if self.layout is None:
            return RequestContent(IMAGE_NOTE)

        key = hashlib.blake2b(encoded_file.encode(errors="replace"), digest_size=16).digest()
        with self._lock:
            if key not in self._prepared:
                started = time.thread_time()
                try:
                    self._prepared[key] = self._prepare(encoded_file, self.layout)
                finally:
                    self.prepare_seconds += time.thread_time() - started
            return RequestContent(IMAGE_MARK, (self._prepared[key],))

    def _prepare(self, encoded_file: str, layout: ImageLayout) -> ImageRef:
        if len(self._prepared) >= MAX_EPISODE_IMAGES:
            raise ImageError(f"an episode can have at most {MAX_EPISODE_IMAGES} images; send fewer images")

        seconds_left = self._deadline - time.monotonic()
        if seconds_left <= 0:
            raise ImageTimeoutError(
                f"the new images of the request were not read within {PREPARE_SECONDS:g} s; send the request "
                "again, or fewer or smaller images"
            )
        stored_image = prepare_in_turn(
            ImageFile(encoded_file), layout, seconds=min(seconds_left, DECODER_SECONDS)
        )
        stored_bytes = self._stored_bytes + len(stored_image.file)
        if stored_bytes > MAX_EPISODE_BYTES:
            raise ImageError(
                f"the images of an episode take more than {MAX_EPISODE_BYTES >> 20} MiB; send fewer or "
                "smaller images"
            )

        image = self._add_image(stored_image)
        self._stored_bytes = stored_bytes
        return image


class _NoImages(RequestImages):
    def read_url(self, url: Any) -> RequestContent:
        raise HasImageError("the request has an image; read it in a thread")

    def read_base64(self, encoded_file: str) -> RequestContent:
        raise HasImageError("the request has an image; read it in a thread")


TEXT_ONLY = RequestImages(layout=None)
