"""Reads the images of rows, and prepares each different image once while further rows are read.

    row ──► Message with a provisional ImageRef ──────────────────────────► Message with the final ImageRef
                    │                                                                 ▲
                    └──► thread: read the file, prepare_image ──► StoredImage ──► file of images (storage.py)

The digest of a provisional ImageRef is that of the image as the row gives it (bytes or a path). Threads use
all cores, as Pillow decodes, scales and encodes outside of Python's lock.
"""

from __future__ import annotations

import base64
import binascii
import os
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from asyncrl.data.sources import RowOrigin
from asyncrl.data.storage import ImageWriter, StoredImages
from asyncrl.errors import ConfigError
from asyncrl.types import ImageRef, Message, Sample
from asyncrl.vision.files import (
    EXIF_ORIENTATION,
    ImageError,
    StoredImage,
    image_digest,
    prepare_decoded,
    prepare_image,
)
from asyncrl.vision.layout import ImageLayout

MAX_THREADS = 8
MAX_WAITING_IMAGES = 64  # images that are read ahead
MAX_WAITING_BYTES = 64 << 20  # of the same images, as rows give them
IMAGE_SECONDS = 600.0  # limit for reading and preparing an image, on a busy machine
QUOTED_CHARACTERS = 60  # characters of a path that an error quotes
READABLE_FORMS = "bytes, a path, base64 text, a data: URL, or {bytes, path}"
# The least size of image files, and how they begin, to tell base64 text from a path.
MIN_FILE_BYTES = 32
FILE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")


# -- what rows hold ----------------------------------------------------------------------------------


def image_in_part(part: Mapping[str, Any]) -> Any:
    """Return the image in a part of content of type `image_url` (OpenAI) or `image` (Hugging Face,
    Anthropic), to be read by `locate_image`; None if the part stands for the next image of the row."""
    if part["type"] == "image_url":
        return part.get("image_url", {})
    if "source" in part:
        source = part["source"]
        return {"base64": source["data"]} if isinstance(source, dict) and "data" in source else source

    fields = {name: part[name] for name in ("image", "base64", "path", "url") if part.get(name) is not None}
    return fields or None


def locate_image(value: Any, directory: Path) -> bytes | Path | Any:
    """Return the bytes of the file, the path of the file, or the PIL.Image that a row's value stands for.
    `directory`: of relative paths. ImageError for values of other kinds, and for files elsewhere."""
    if isinstance(value, Mapping):
        if isinstance(file := value.get("bytes"), str):
            # Bytes that are also UTF-8 text have become text (`rows.json_value`).
            return _decode_base64(file) or file.encode()

        for name in ("bytes", "base64", "image", "path", "url"):
            if value.get(name) is not None:
                return locate_image(value[name], directory)
        raise ImageError(f"the image has neither bytes nor a path; write {READABLE_FORMS}")

    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, os.PathLike):
        return directory / value
    if isinstance(value, str):
        return _locate_text(value, directory)

    import PIL.Image  # takes a moment, and most rows have no images

    if isinstance(value, PIL.Image.Image):
        return value
    raise ImageError(f"an image cannot be a value of type {type(value).__name__}; write {READABLE_FORMS}")


def _locate_text(text: str, directory: Path) -> bytes | Path:
    """Return the bytes in a data: URL or base64 text, or the path of a file."""
    if text.startswith("data:"):
        header, _, data = text.partition(",")
        if header.endswith(";base64") and (file := _decode_base64(data)):
            return file
        raise ImageError("the data: URL is not base64; write data:image/png;base64,…")

    if text.startswith("file://"):
        url = urlsplit(text)
        if url.netloc not in ("", "localhost"):
            raise ImageError(f"{text[:QUOTED_CHARACTERS]} is on another host; copy the file to this machine")
        return Path(unquote(url.path))

    if "://" in text[:QUOTED_CHARACTERS]:
        raise ImageError(
            f"{text[:QUOTED_CHARACTERS]} is not fetched over the network; download the file, and write its "
            "path"
        )

    file = _decode_base64(text)
    is_file = file is not None and len(file) >= MIN_FILE_BYTES and file.startswith(FILE_STARTS)
    return file if file is not None and is_file else directory / text


def _decode_base64(text: str) -> bytes | None:
    """Return the bytes that base64 text, perhaps in lines, stands for; None for any other text."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


class RowImages:
    """The images of one row. `column`: of the row's column `images`, which marks in the texts take in order;
    None without the column, so that marks are text. `preparer`: None if images cannot be read."""

    def __init__(self, origin: RowOrigin, column: list[Any] | None, preparer: ImagePreparer | None) -> None:
        self._origin = origin
        self._column = column
        self._preparer = preparer
        self._marks = 0

    @property
    def has_column(self) -> bool:
        return self._column is not None

    def take_next(self) -> ImageRef:
        """Return the image of the column that belongs to the next mark."""
        column = self._column or []
        self._marks += 1
        if self._marks > len(column):
            return ImageRef("", 0, 0)  # `check_marks` refuses the row
        where = f"{self._origin}: image {self._marks} of {len(column)} in the images column"
        return self._add(where, column[self._marks - 1])

    def add(self, where: str, value: Any) -> ImageRef:
        """Return an image that a message holds. `where`: the column of the message."""
        return self._add(f"{where}: an image", value)

    def check_marks(self) -> None:
        """Raise ConfigError unless the texts have a mark for each image of the column."""
        image_count = len(self._column or [])
        if self._marks != image_count:
            raise ConfigError(
                f"{self._origin}: the texts have {self._marks} <image> marks, but the images column has "
                f"{image_count} images; write <image> where each image belongs"
            )

    def _add(self, where: str, value: Any) -> ImageRef:
        if self._preparer is None:
            raise ConfigError(f"{where} cannot be read here, where no model is known; remove the image")
        try:
            return self._preparer.submit(where, locate_image(value, self._origin.directory))
        except ImageError as error:
            raise ConfigError(f"{where}: {error}, or remove the row") from error
        except MemoryError as error:
            raise _memory_error(where) from error


# -- preparing ---------------------------------------------------------------------------------------


class ImageSummary(NamedTuple):
    """Counts the different images of a split. `changes`: how many images were changed, by kind of change;
    `token_counts`: ids of each image."""

    changes: Counter[str]
    token_counts: list[int]

    def describe(self) -> str:
        """Describe the images on one line for people; '' without images."""
        if not self.token_counts:
            return ""
        changes = [f"{count:,} {change}" for change, count in sorted(self.changes.items())]
        lengths = sorted(self.token_counts)
        median = statistics.median_low(lengths)
        return (
            f"{len(lengths):,} different images ({', '.join(changes) or 'none changed'}); tokens per image: "
            f"{lengths[0]:,} to {lengths[-1]:,}, median {median:,}"
        )


class _Preparation(NamedTuple):
    """An image that is being prepared. `where`: the first row with the image; `size`: bytes in memory."""

    where: str
    prepared: Future[StoredImage]
    size: int


class ImagePreparer:
    """Prepares the images of a split in threads, and writes each different image once to `file`.
    `find_layout` returns how the model reads images, or raises ConfigError if the model reads text only;
    called for the first image. To be closed as a context manager."""

    def __init__(self, file: BinaryIO, find_layout: Callable[[], ImageLayout]) -> None:
        self._writer = ImageWriter(file)
        self._find_layout = find_layout
        self._layout: ImageLayout | None = None
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "asyncrl-images")
        self._preparations: dict[str, _Preparation] = {}
        self._waiting_bytes = 0
        self._final_refs: dict[str, ImageRef] = {}  # by the digest of the provisional reference
        self._sample_ids = 0  # see ImageFooter
        self.summary = ImageSummary(Counter(), [])

    def __enter__(self) -> ImagePreparer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, where: str, image: bytes | Path | Any) -> ImageRef:
        """Begin to prepare an image, unless a row before has the same image. Returns a provisional reference.
        `where` begins errors."""
        if self._layout is None:
            try:
                self._layout = self._find_layout()
            except ConfigError as error:
                raise ConfigError(f"{where} cannot be read: {error}") from error

        if isinstance(image, bytes):
            digest = image_digest(image)
            size = len(image)
        elif isinstance(image, Path):
            digest = image_digest(b"path " + os.fsencode(image))
            size = 0
        else:
            content = _content_of(image)
            digest = image_digest(content)
            size = len(content)

        if digest not in self._final_refs and digest not in self._preparations:
            prepared = self._threads.submit(_prepare, image, self._layout)
            self._preparations[digest] = _Preparation(where, prepared, size)
            self._waiting_bytes += size

        return ImageRef(digest, 0, 0)

    def with_final_images(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples, in order, with final in place of provisional references, while images of later
        samples are prepared. ConfigError for the first image that cannot be prepared."""
        waiting_samples: deque[Sample] = deque()
        for sample in samples:
            waiting_samples.append(sample)
            while waiting_samples and (self._is_full or self._is_prepared(waiting_samples[0])):
                yield self._with_final_images(waiting_samples.popleft())

        while waiting_samples:
            yield self._with_final_images(waiting_samples.popleft())

    def finish(self) -> StoredImages | None:
        """Finish the file, and return its images; None without images."""
        return self._writer.finish(self._sample_ids) if self._final_refs else None

    @property
    def _is_full(self) -> bool:
        return len(self._preparations) > MAX_WAITING_IMAGES or self._waiting_bytes > MAX_WAITING_BYTES

    def _is_prepared(self, sample: Sample) -> bool:
        return all(
            image.digest in self._final_refs or self._preparations[image.digest].prepared.done()
            for message in sample.prompt
            for image in message.images
        )

    def _with_final_images(self, sample: Sample) -> Sample:
        if not any(message.images for message in sample.prompt):
            return sample

        messages: list[Message] = []
        for message in sample.prompt:
            images = tuple(self._final_ref(image.digest) for image in message.images)
            messages.append(replace(message, images=images))

        assert self._layout is not None
        sample_ids = sum(
            self._layout.run_length(image.height, image.width)
            for message in messages
            for image in message.images
        )
        self._sample_ids = max(self._sample_ids, sample_ids)
        return replace(sample, prompt=tuple(messages))

    def _final_ref(self, provisional_digest: str) -> ImageRef:
        """Return the reference to a prepared image, after writing its file if the image is new."""
        if provisional_digest in self._final_refs:
            return self._final_refs[provisional_digest]

        preparation = self._preparations.pop(provisional_digest)
        self._waiting_bytes -= preparation.size
        try:
            stored_image = preparation.prepared.result(IMAGE_SECONDS)
        except ImageError as error:
            raise ConfigError(f"{preparation.where}: {error}, or remove the row") from error
        except MemoryError as error:
            raise _memory_error(preparation.where) from error
        except TimeoutError:
            raise ConfigError(
                f"{preparation.where}: the image was not prepared within {IMAGE_SECONDS:g} s; scale it down, "
                "or copy the data to a faster disk"
            ) from None

        self._final_refs[provisional_digest] = stored_image.ref
        if self._writer.add(stored_image.ref.digest, stored_image.file):
            assert self._layout is not None
            self.summary.changes.update(stored_image.changes)
            ref = stored_image.ref
            self.summary.token_counts.append(self._layout.run_length(ref.height, ref.width))
        return stored_image.ref


def _memory_error(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: there is too little memory to prepare the image; free memory, or scale the image down"
    )


def _content_of(image: Any) -> bytes:
    """Return what distinguishes a PIL.Image, which may have to be decoded now: its pixels, preceded by all
    that decides about their colours and their place."""
    try:
        pixels = bytes(image.tobytes())
        orientation = image.getexif().get(EXIF_ORIENTATION)
        palette = (image.palette.mode, image.getpalette(rawmode=None)) if image.palette else None
        header = (image.mode, image.size, orientation, palette, image.info.get("transparency"))
        return repr(header).encode() + pixels
    except MemoryError:  # the image may be sound
        raise
    except Exception as error:  # decoders of Pillow raise errors of many types for damaged files
        raise ImageError("the image is damaged; write the file again") from error


def _prepare(image: bytes | Path | Any, layout: ImageLayout) -> StoredImage:
    if isinstance(image, bytes):
        return prepare_image(image, layout)
    if not isinstance(image, Path):
        return prepare_decoded(image, layout)

    try:
        file = image.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        path = str(image)
        shown_path = path if len(path) <= 4 * QUOTED_CHARACTERS else f"{path[:QUOTED_CHARACTERS]}…"
        raise ImageError(f"{shown_path} cannot be read ({reason}); correct the path") from error

    return prepare_image(file, layout)
