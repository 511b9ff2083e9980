"""The images of prompts in the embedded engine: where their ids lie, the positions of all ids, and patches.

    Request ──ImageReader.read──► PromptImages ──► Batcher     chunks and prefixes that cut no image
              (in a thread)                   ├──► KVCache     offset of the positions behind the images
                                              └──► forward     patches and positions of a chunk

An image is encoded by the forward that computes its ids; nothing is encoded whose keys and values are kept or
copied. Patches take more memory than files: a request has those of the images it will prefill until its
prompt is computed. They are read again, from the file, if keys and values were lost meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from asyncrl.engines.base import EngineRefused, Request
from asyncrl.errors import ConfigError
from asyncrl.vision.files import ImageError
from asyncrl.vision.image_ids import ImageRun, find_whole_runs
from asyncrl.vision.layout import ImageLayout, layout_or_refusal, read_image_layout
from asyncrl.vision.pixels import PixelReader, Pixels, image_size
from asyncrl.vision.positions import rope_positions

# Patches of recently read images to keep: 40 images of 512 x 512 pixels.
CACHED_BYTES = 256 << 20
NO_POSITIONS = np.empty((3, 0), dtype=np.int64)
PREFIX_BLOCK = 32  # ids; a prompt is known by its whole blocks


class PromptImages:
    """The images of one prompt, in order. `runs`: where their ids lie. `positions` [3, T]: time, height and
    width of each id of the prompt, at least up to the last image. Those of later ids are the id's number plus
    `rope_offset`."""

    def __init__(
        self,
        runs: Sequence[ImageRun] = (),
        positions: np.ndarray = NO_POSITIONS,
        files: Mapping[str, bytes] = {},
        pixel_cache: PixelCache | None = None,
    ) -> None:
        self.runs = runs
        self.images_end = runs[-1].end if runs else 0
        self.rope_offset = 0
        if positions.size:
            self.rope_offset = int(positions[:, : self.images_end].max()) + 1 - self.images_end
        self._positions = positions[:, : self.images_end].astype(np.int32)  # kept until the request ends
        self._files = files
        self._pixel_cache = pixel_cache
        self._pixels_by_digest: dict[str, Pixels] = {}

    def load_pixels(self, start: int) -> None:
        """Read the patches of the images behind the first `start` ids, and keep them until
        `drop_pixels`. ImageError and ConfigError if they cannot be read."""
        for run in self.runs:
            if run.start >= start:
                self._pixels_by_digest[run.digest] = self._read_pixels(run.digest)

    def drop_pixels(self) -> None:
        self._pixels_by_digest.clear()

    def pixels_within(self, start: int, end: int) -> list[Pixels]:
        """Return the patches of each image among the ids [start, end)."""
        return [
            self._pixels_by_digest.get(run.digest) or self._read_pixels(run.digest)
            for run in self.runs
            if start <= run.start < end
        ]

    def positions_within(self, start: int, end: int) -> np.ndarray:
        """Return the positions [3, end - start] of the ids [start, end), which may go on behind the prompt's
        images."""
        later_positions = np.arange(max(start, self.images_end), end) + self.rope_offset
        return np.concatenate(
            [self._positions[:, start:end], np.broadcast_to(later_positions, (3, len(later_positions)))],
            axis=1,
        )

    def uncut_length(self, length: int) -> int:
        """Return the largest number of leading ids, at most `length`, that ends inside no image."""
        for run in self.runs:
            if run.start < length < run.end:
                return run.start
        return length

    def chunk_end(self, start: int, end: int) -> int:
        """Return the end of a chunk [start, end) that cuts no image: before the last image, or behind it if
        the chunk begins with this image."""
        uncut_end = self.uncut_length(end)
        if uncut_end > start:
            return uncut_end
        return next(run.end for run in self.runs if run.start == start)

    def prefix_ends(self, length: int) -> Sequence[int]:
        """Return the lengths, below `length`, at which a prompt of so many ids may share its beginning with
        other prompts: the ends of blocks outside images, and the ends of images."""
        if not self.runs:
            return range(PREFIX_BLOCK, length, PREFIX_BLOCK)

        ends: list[int] = []
        text_start = 0
        for run in self.runs:
            ends += _block_ends(text_start, run.start)
            ends.append(run.end)
            text_start = run.end

        ends += _block_ends(text_start, length)
        return [end for end in ends if end < length]

    def _read_pixels(self, digest: str) -> Pixels:
        assert self._pixel_cache is not None
        return self._pixel_cache.read(digest, self._files[digest])


def _block_ends(text_start: int, text_end: int) -> range:
    """Return the ends of whole blocks of the prompt that are behind `text_start` and at most `text_end`."""
    first_end = text_start // PREFIX_BLOCK * PREFIX_BLOCK + PREFIX_BLOCK
    return range(first_end, text_end + 1, PREFIX_BLOCK)


NO_IMAGES = PromptImages()


class PixelCache:
    """Reads patches with the processor of the model in a directory, and keeps the latest: the members of a
    group have the same images. May be called by several threads."""

    def __init__(self, model_directory: str) -> None:
        self._model_directory = model_directory
        self._reader: PixelReader | None = None  # made for the first image: the import takes seconds
        self._pixels_by_digest: OrderedDict[str, Pixels] = OrderedDict()  # the least recently used first
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def read(self, digest: str, file: bytes) -> Pixels:
        """Return the patches of a stored image. ImageError for a file that cannot be decoded, ConfigError
        without a processor."""
        with self._lock:
            if digest in self._pixels_by_digest:
                self._pixels_by_digest.move_to_end(digest)
                return self._pixels_by_digest[digest]

            if self._reader is None:
                self._reader = PixelReader(self._model_directory)
            pixels = self._reader.read(file)
            self._pixels_by_digest[digest] = pixels
            self._cached_bytes += pixels.pixel_values.nbytes
            while self._cached_bytes > CACHED_BYTES:
                _, oldest_pixels = self._pixels_by_digest.popitem(last=False)
                self._cached_bytes -= oldest_pixels.pixel_values.nbytes

            return pixels


class ImageReader:
    """Reads the images of requests. `layout`: how the model reads images; None if it reads none, for the
    reason in `refusal`."""

    def __init__(self, model_directory: str, layout: ImageLayout | None, refusal: str = "") -> None:
        self.layout = layout
        self._refusal = refusal
        self._pixel_cache = PixelCache(model_directory)

    @classmethod
    def of_model(cls, model_directory: str) -> ImageReader:
        """Return the reader for the model in a directory, which may be a model of text alone."""
        layout, refusal = layout_or_refusal(partial(read_image_layout, model_directory))
        return cls(model_directory, layout, refusal)

    def check(self, request: Request) -> None:
        """Raise EngineRefused for the model's placeholder where no image is: the model would look for one."""
        if self.layout is not None and (complaint := self.layout.placeholder_complaint(request.ids)):
            raise EngineRefused(f"session {request.session!r}: {complaint}")

    def read(self, request: Request, kept_length: int) -> PromptImages:
        """Find the images of a request, and read the patches of those behind the first `kept_length` ids,
        whose KV is kept. EngineRefused says what is wrong with an image, or why the model reads none."""
        label = f"session {request.session!r}"
        if self.layout is None:
            raise EngineRefused(f"{label}: the prompt has images: {self._refusal}")

        with EngineRefused.instead_of(ValueError, text=f"{label}: the prompt has invalid ids"):
            runs = find_whole_runs(request.ids)

        missing_digests = [run.digest for run in runs if run.digest not in request.images]
        if missing_digests:
            raise EngineRefused(
                f"{label}: the file of image {missing_digests[0]} is not among the images of the request"
            )

        with EngineRefused.instead_of(ImageError, ConfigError, ValueError, text=label):
            sizes = {run.digest: image_size(request.images[run.digest]) for run in runs}
            grids = {digest: self.layout.grid(*size) for digest, size in sizes.items()}
            positions = rope_positions(np.array(request.ids), grids)
            images = PromptImages(runs, positions, request.images, self._pixel_cache)
            images.load_pixels(kept_length)

        return images


TEXT_ONLY = ImageReader("", layout=None, refusal="the model reads text only")
