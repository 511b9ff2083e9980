"""Reads the images of micro-batches: from stored files to the pixels and positions that a forward reads.

    files by digest ──threads──► Pixels ──lay_out_images──► ImageInputs, in the order of the ids
                        │          └─ kept by digest, up to PIXEL_CACHE_BYTES
                        └► episodes to leave out: a faulty worker may have stored other files

The images of a part of the plan are read before the part is trained; pixels beyond PIXEL_CACHE_BYTES are not
kept, and read again for their micro-batch. Files stay until the batch is complete, as a batch behind a
barrier is read several times.
"""

from __future__ import annotations

import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, DeadlineError, ProtocolError
from asyncrl.types import Turn
from asyncrl.vision.files import ImageError
from asyncrl.vision.image_ids import (
    DIGEST_DIGITS,
    FIRST_IMAGE_ID,
    MIN_RUN_IDS,
    RUN_START,
    ImageRun,
    find_runs,
    image_ids,
    with_placeholders,
)
from asyncrl.vision.layout import ImageLayout
from asyncrl.vision.pixels import PixelReader, Pixels, image_size
from asyncrl.vision.positions import Grid, rope_positions

PIXEL_CACHE_BYTES = 2 << 30  # of decoded pixels; an image of 1024 x 1024 pixels takes 25 MB
READER_THREADS = 4  # decoding and scaling of values run without Python's lock
READ_AHEAD = 2 * READER_THREADS  # images that are read at once before a part of the plan is trained
READ_WAIT = "images to be decoded"  # name of the wait
READ_POLL_SECONDS = 0.25  # seconds between two announcements of the wait
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

    `layout`: how the models read images. `time_limit`: seconds in which READ_AHEAD images, or those of a
    micro-batch, must be read. `announce_wait` is called with the wait's name, again and again while the wait
    lasts, and with '' once it is over. `note_work` is called after each READ_AHEAD images of a part of the
    plan. ConfigError if the image processor cannot be loaded.
    """

    def __init__(
        self,
        model_directory: str,
        layout: ImageLayout,
        time_limit: float = math.inf,
        announce_wait: Callable[[str], None] = lambda name: None,
        note_work: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self._time_limit = time_limit
        self._announce_wait = announce_wait
        self._note_work = note_work
        self._reader = PixelReader(model_directory)
        thread_count = min(READER_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="images")
        self._files: dict[str, bytes] = {}  # of the batch, in the order of its parts
        self._pending: dict[str, Future[Pixels]] = {}
        self._cache: OrderedDict[str, Pixels] = OrderedDict()  # the last used come last
        self._cached_bytes = 0

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Take over the stored files, by digest, of images that the following micro-batches read."""
        self._files |= files

    def drop_files(self) -> None:
        """Drop all files: their batch is complete. Pixels are kept for the next batch."""
        self._files = {}

    def read_images_of_episodes(
        self, turns_by_uid: Mapping[str, Sequence[Turn]], *, behind_barrier: bool = False
    ) -> dict[str, str]:
        """Read all images of the episodes of a part of the plan, whose files were added before, and keep the
        first pixels, up to PIXEL_CACHE_BYTES.

        Args:
            behind_barrier: earlier parts of the batch are not trained yet, so their pixels are kept before
                those of this part.

        Returns:
            by uid why episodes cannot be trained: an image is lost or damaged, or its file has another size
            than its ids say.

        Raises:
            DeadlineError: reading takes too long.
            AsyncrlError: there is too little memory to decode an image.
        """
        runs_by_uid = {
            uid: [run for turn in turns for ids in (turn.context, turn.taught) for run in find_runs(ids)]
            for uid, turns in turns_by_uid.items()
        }

        # Sizes are in the heads of the files, so no image is decoded that is larger than its ids say.
        reasons: dict[str, str] = {}
        sizes: dict[str, tuple[int, int]] = {}
        for uid, runs in runs_by_uid.items():
            try:
                for run in runs:
                    self._check_size(run, sizes)
            except ImageError as error:
                reasons[uid] = str(error)

        sized_runs = [run for uid, runs in runs_by_uid.items() if uid not in reasons for run in runs]
        digests = list(dict.fromkeys(run.digest for run in sized_runs))
        damaged: dict[str, str] = {}
        for start in range(0, len(digests), READ_AHEAD):
            next_digests = digests[start : start + READ_AHEAD]
            self._announce_wait(READ_WAIT)
            self.prefetch(next_digests)
            self._await_reads(next_digests)
            for digest in next_digests:
                try:
                    self._keep_pixels(digest)
                except ImageError as error:
                    damaged[digest] = f"image {digest}: {error}"
            self._trim_cache(soon_used=list(self._files) if behind_barrier else digests)
            self._note_work()

        if digests:
            self._announce_wait("")

        for uid, runs in runs_by_uid.items():
            for run in runs:
                if run.digest in damaged:
                    reasons.setdefault(uid, damaged[run.digest])

        return reasons

    def _check_size(self, run: ImageRun, sizes: dict[str, tuple[int, int]]) -> None:
        """Check that the file of an image has as many merged patches as the image has ids. ImageError if not,
        or without a file. `sizes`: height and width of the images seen so far, by digest."""
        digest = run.digest
        if digest not in self._files:
            raise ImageError(f"image {digest} is lost")
        if digest not in sizes:
            with ImageError.instead_of(ImageError, text=f"image {digest}"):
                sizes[digest] = image_size(self._files[digest])

        height, width = sizes[digest]
        id_count = run.end - run.start
        is_multiple = not (height % self.layout.factor or width % self.layout.factor)
        if not is_multiple or self.layout.run_length(height, width) != id_count:
            raise ImageError(f"image {digest} has {width} x {height} pixels, which do not fit {id_count} ids")

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
        without the file, AsyncrlError for a lack of memory."""
        wanted_digests = list(dict.fromkeys(digests))
        self.prefetch(wanted_digests)
        if self._await_reads(wanted_digests):
            self._announce_wait("")

        pixels_by_digest: dict[str, Pixels] = {}
        for digest in wanted_digests:
            if digest == DUMMY_DIGEST:
                pixels_by_digest[digest] = dummy_pixels(self.layout)
                continue
            pixels_by_digest[digest] = self._keep_pixels(digest)

        self._trim_cache()
        return pixels_by_digest

    def _await_reads(self, digests: Iterable[str]) -> bool:
        """Wait until these images are read. Returns whether the wait was announced; the caller announces its
        end. DeadlineError if the wait takes too long."""
        futures = [self._pending[digest] for digest in digests if digest in self._pending]
        deadline = time.monotonic() + self._time_limit
        is_announced = False
        while wait(futures, timeout=READ_POLL_SECONDS).not_done:
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {self._time_limit:g} s for {READ_WAIT}")
            self._announce_wait(READ_WAIT)
            is_announced = True

        return is_announced

    def _keep_pixels(self, digest: str) -> Pixels:
        """Return the pixels of an image that was read, and keep them in the cache as the newest. ImageError
        for a file that cannot be decoded, AsyncrlError for a lack of memory."""
        if digest in self._pending:
            with AsyncrlError.instead_of(
                MemoryError,
                text=f"image {digest}: there is too little memory to decode the image",
                advice="free memory, or set model.max_image_tokens lower",
            ):
                pixels = self._pending.pop(digest).result()
            self._cache[digest] = pixels
            self._cached_bytes += self._cache[digest].pixel_values.nbytes
        self._cache.move_to_end(digest)
        return self._cache[digest]

    def _trim_cache(self, soon_used: Sequence[str] = ()) -> None:
        """Drop pixels beyond PIXEL_CACHE_BYTES: the least recently used first, then those of the images that
        are used soon, which are in the order of use, the last first."""
        if self._cached_bytes <= PIXEL_CACHE_BYTES:
            return

        kept_digests = set(soon_used)
        other_digests = [digest for digest in self._cache if digest not in kept_digests]
        for digest in (*other_digests, *reversed(soon_used)):
            if self._cached_bytes <= PIXEL_CACHE_BYTES:
                return
            if digest in self._cache:
                self._cached_bytes -= self._cache.pop(digest).pixel_values.nbytes


def digests_of(turns: Iterable[Turn]) -> list[str]:
    """Return the digests of all images that the contexts of turns contain, also in a teacher's prompts; each
    digest once, in order."""
    return digests_in(ids for turn in turns for ids in (turn.context, turn.taught))


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
