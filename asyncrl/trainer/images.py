"""Reads the images of micro-batches: from stored files to the pixels and positions that a forward reads.

    files by digest ──threads──► Pixels ──lay_out_images──► ImageInputs, in the order of the ids
                                   └─ kept by digest, up to PIXEL_CACHE_BYTES

Files stay until the batch is complete, as a batch behind a barrier is read several times.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ProtocolError
from asyncrl.types import Turn
from asyncrl.vision.files import ImageError
from asyncrl.vision.image_ids import (
    DIGEST_DIGITS,
    FIRST_IMAGE_ID,
    MIN_RUN_IDS,
    RUN_START,
    find_runs,
    image_ids,
    with_placeholders,
)
from asyncrl.vision.layout import ImageLayout
from asyncrl.vision.pixels import PixelReader, Pixels, decode_stored
from asyncrl.vision.positions import Grid, rope_positions

PIXEL_CACHE_BYTES = 2 << 30  # of decoded pixels; an image of 1024 x 1024 pixels takes 25 MB
READER_THREADS = 4  # decoding and scaling of values run without Python's lock
DUMMY_DIGEST = "0" * DIGEST_DIGITS
DUMMY_SIDE = 2  # merged patches
PLACEHOLDER_STAND_IN = 0  # id in the place of a placeholder that the model itself has sampled


@dataclass(frozen=True)
class ImageInputs:
    """What a model reads beside the ids of a layout [B, T]. `pixels`: the images in the order of their first
    ids. `positions` [3, B, T]: time, height and width."""

    pixels: Pixels
    positions: Tensor

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return the arguments of the model's forward."""
        return {
            "pixel_values": self.pixels.pixel_values,
            "image_grid_thw": self.pixels.grids,
            "position_ids": self.positions,
        }

    def with_tensors(self, convert: Callable[[Tensor], Tensor]) -> ImageInputs:
        """Return a copy whose tensors went through `convert`."""
        pixels = Pixels(convert(self.pixels.pixel_values), convert(self.pixels.grids))
        return ImageInputs(pixels, convert(self.positions))


class ImagePixels:
    """Reads the images of a run for its models, ahead of the forwards, in threads.

    `layout`: how the models read images. ConfigError if the image processor cannot be loaded.
    """

    def __init__(self, model_directory: str, layout: ImageLayout) -> None:
        self.layout = layout
        self._reader = PixelReader(model_directory)
        thread_count = min(READER_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="images")
        self._files: dict[str, bytes] = {}
        self._pending: dict[str, Future[Pixels]] = {}
        self._cache: OrderedDict[str, Pixels] = OrderedDict()  # the last used come last
        self._cached_bytes = 0

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Take over the stored files, by digest, of images that the following micro-batches read."""
        self._files |= files

    def drop_files(self) -> None:
        """Drop all files: their batch is complete. Pixels are kept for the next batch."""
        self._files = {}

    def prefetch(self, digests: Iterable[str]) -> None:
        """Begin to read these images. ProtocolError without the file of an image."""
        for digest in digests:
            if digest == DUMMY_DIGEST or digest in self._cache or digest in self._pending:
                continue
            if digest not in self._files:
                raise ProtocolError(f"the trainer has no file of image {digest}, which a turn contains")
            self._pending[digest] = self._threads.submit(self._reader.read, self._files[digest])

    def pixels_of(self, digests: Iterable[str]) -> dict[str, Pixels]:
        """Return the pixels of these images. ImageError for a file that cannot be decoded, ProtocolError
        without the file."""
        wanted_digests = list(dict.fromkeys(digests))
        self.prefetch(wanted_digests)
        pixels_by_digest: dict[str, Pixels] = {}
        for digest in wanted_digests:
            if digest == DUMMY_DIGEST:
                pixels_by_digest[digest] = dummy_pixels(self.layout)
                continue
            if digest in self._pending:
                self._cache[digest] = self._pending.pop(digest).result()
                self._cached_bytes += self._cache[digest].pixel_values.nbytes
            self._cache.move_to_end(digest)
            pixels_by_digest[digest] = self._cache[digest]

        while self._cached_bytes > PIXEL_CACHE_BYTES:
            _, oldest_pixels = self._cache.popitem(last=False)
            self._cached_bytes -= oldest_pixels.pixel_values.nbytes

        return pixels_by_digest


def digests_of(turns: Iterable[Turn]) -> list[str]:
    """Return the digests of all images that the contexts of turns contain, also in a teacher's prompts; each
    digest once, in order."""
    return digests_in(ids for turn in turns for ids in (turn.context, turn.taught))


def readable_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files, by digest, that can be decoded: a faulty worker may have stored others."""
    thread_count = min(READER_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(thread_count, thread_name_prefix="images") as threads:
        are_readable = threads.map(_is_readable, files.values())
        return {
            digest: file
            for (digest, file), readable in zip(files.items(), are_readable, strict=True)
            if readable
        }


def _is_readable(file: bytes) -> bool:
    try:
        decode_stored(file)
    except ImageError:
        return False
    return True


def digests_in(rows: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
    """Return the digests of all images in rows of ids; each digest once, in order."""
    return list(dict.fromkeys(run.digest for ids in rows for run in find_runs(ids)))


def contains_images(sequences: Iterable[np.ndarray]) -> bool:
    """Return True if a sequence has an image id."""
    return any(bool((sequence >= FIRST_IMAGE_ID).any()) for sequence in sequences)


def with_numbered_images(sequences: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Return the sequences with a number of its image, counted over all sequences, in the first id of each
    run: different images then differ in their first id. By the digests they may first differ in a later id,
    and a prefix that two sequences share would end within an image."""
    numbers: dict[str, int] = {}
    numbered_sequences = []
    for sequence in sequences:
        numbered_sequence = sequence.copy()
        for run in find_runs(sequence):
            number = numbers.setdefault(run.digest, len(numbers))
            numbered_sequence[run.start] = FIRST_IMAGE_ID | RUN_START | number
        numbered_sequences.append(numbered_sequence)

    return numbered_sequences


def dummy_sequence() -> np.ndarray:
    """Return a sequence with the smallest image. All ranks gather a tower's weights together, so a rank
    without images adds this sequence, none of whose tokens is scored."""
    return np.array([0, *image_ids(DUMMY_DIGEST, DUMMY_SIDE**2)], dtype=np.int32)


def dummy_pixels(layout: ImageLayout) -> Pixels:
    """Return a grey image of DUMMY_SIDE x DUMMY_SIDE merged patches."""
    assert DUMMY_SIDE**2 >= MIN_RUN_IDS
    side = DUMMY_SIDE * layout.merge_size
    patch_values = 3 * layout.temporal_patch_size * layout.patch_size**2
    return Pixels(torch.zeros(side * side, patch_values), torch.tensor([[1, side, side]]))


def lay_out_images(
    sequences: Sequence[np.ndarray],
    token_positions: Sequence[np.ndarray],
    shape: Sequence[int],
    image_pixels: ImagePixels,
) -> ImageInputs:
    """Lay out the images of `sequences`, at least one, where their tokens lie in a layout of `shape` [B, T]:
    `token_positions` are indices of the flattened layout. An image at the same index of several sequences is
    there once."""
    digest_by_start: dict[int, str] = {}
    for sequence, positions in zip(sequences, token_positions, strict=True):
        for run in find_runs(sequence):
            digest_by_start[int(positions[run.start])] = run.digest

    pixels_by_digest = image_pixels.pixels_of(digest_by_start.values())
    merge_size = image_pixels.layout.merge_size
    grids: dict[str, Grid] = {}
    for digest, pixels in pixels_by_digest.items():
        _, rows, columns = pixels.grids[0].tolist()
        grids[digest] = (rows // merge_size, columns // merge_size)

    laid_out_positions = np.zeros((3, int(np.prod(shape))), dtype=np.int64)  # padding stays 0
    for sequence, positions in zip(sequences, token_positions, strict=True):
        laid_out_positions[:, positions] = rope_positions(sequence, grids)

    images_in_order = [pixels_by_digest[digest_by_start[start]] for start in sorted(digest_by_start)]
    return ImageInputs(
        Pixels.concatenate(images_in_order), torch.from_numpy(laid_out_positions.reshape(3, *shape))
    )


def ids_for_model(ids: Tensor, layout: ImageLayout) -> Tensor:
    """Return ids with the model's placeholder in place of image ids. A placeholder that the model itself has
    sampled stands for no image; it ends its sequence, so no scored token depends on the id in its place."""
    placeholder = layout.placeholder
    text_ids = ids.masked_fill(ids == placeholder, PLACEHOLDER_STAND_IN)
    return torch.from_numpy(with_placeholders(text_ids.numpy(), placeholder))
