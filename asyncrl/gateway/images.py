"""Reads the images that agents send: base64 in requests, decoded and scaled once for each episode.

    {"image_url": {"url": "data:image/png;base64,…"}} ──RequestImages──► RequestContent(IMAGE_MARK, ImageRef)

Agents send all images again with each request. A model that reads text only gets IMAGE_NOTE instead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

from asyncrl.errors import AsyncrlError
from asyncrl.types import IMAGE_MARK, ImageRef
from asyncrl.vision.content import (
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


class _PreparedImage(NamedTuple):
    ref: ImageRef
    stored_bytes: int


class RequestImages:
    """Reads the images in a request of an episode; new images have PREPARE_SECONDS from now on. `layout`:
    None for a model that reads text only. `add_image` takes an image into the episode. `prepared`: the
    episode's images by the hash of the base64. `while_preparing`: the context in which a new image waits for
    other images and is prepared."""

    def __init__(
        self,
        layout: ImageLayout | None,
        add_image: Callable[[StoredImage], ImageRef] = lambda image: image.ref,
        *,
        prepared: dict[bytes, _PreparedImage] | None = None,
        while_preparing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.layout = layout
        self._add_image = add_image
        self._prepared = {} if prepared is None else prepared
        self._while_preparing = while_preparing
        self._deadline = time.monotonic() + PREPARE_SECONDS
        self.prepare_seconds = 0.0  # CPU time of the new images of this request

    def for_request(self, while_preparing: Callable[[], AbstractContextManager[None]]) -> RequestImages:
        """Return a reader for a new request of the same episode."""
        return RequestImages(
            self.layout, self._add_image, prepared=self._prepared, while_preparing=while_preparing
        )

    def end_request(self) -> None:
        """Prepare no further images, in any thread: the next new image raises ImageTimeoutError."""
        self._deadline = time.monotonic()

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
        if key not in self._prepared:
            started = time.thread_time()
            try:
                with self._while_preparing():
                    self._prepared[key] = self._prepare(encoded_file, self.layout)
            finally:
                self.prepare_seconds += time.thread_time() - started
        return RequestContent(IMAGE_MARK, (self._prepared[key].ref,))

    def _prepare(self, encoded_file: str, layout: ImageLayout) -> _PreparedImage:
        if len(self._prepared) >= MAX_EPISODE_IMAGES:
            raise ImageError(f"an episode can have at most {MAX_EPISODE_IMAGES} images; send fewer images")

        stored_image = self._prepare_in_time(ImageFile(encoded_file), layout)
        stored_bytes = len(stored_image.file)
        if sum(image.stored_bytes for image in self._prepared.values()) + stored_bytes > MAX_EPISODE_BYTES:
            raise ImageError(
                f"the images of an episode take more than {MAX_EPISODE_BYTES >> 20} MiB; send fewer or "
                "smaller images"
            )

        return _PreparedImage(self._add_image(stored_image), stored_bytes)

    def _prepare_in_turn(self, image: ImageFile, layout: ImageLayout) -> StoredImage:
        try:
            return prepare_in_turn(
                image,
                layout,
                seconds=self._seconds_left,
                is_wanted=lambda: self._seconds_left > 0,  # `end_request` may come during the wait
            )
        except MemoryError as error:
            raise MemoryError(
                "too little memory to decode an image of a request; free memory, lower rollout.workers, or "
                "send smaller images"
            ) from error

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _prepare_in_time(self, image: ImageFile, layout: ImageLayout) -> StoredImage:
        if self._seconds_left > 0:
            with suppress(ImageTimeoutError):
                return self._prepare_in_turn(image, layout)

        raise ImageTimeoutError(
            f"the new images of the request were not read within {PREPARE_SECONDS:g} s; send the request "
            "again, or fewer or smaller images"
        )


class _NoImages(RequestImages):
    def read_url(self, url: Any) -> RequestContent:
        raise HasImageError("the request has an image; read it in a thread")

    def read_base64(self, encoded_file: str) -> RequestContent:
        raise HasImageError("the request has an image; read it in a thread")


TEXT_ONLY = RequestImages(layout=None)
