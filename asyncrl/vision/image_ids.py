"""Image ids: the ids that stand for an image in a row of tokens, and spell the image's digest.

A model's processor puts one placeholder token into a row for each patch of an image that the model reads. All
images have the same placeholder, so rows with different images could have equal ids. In asyncrl a row has
image ids instead, a run of them for each image:

    bit 30      1 in every image id; token ids are smaller
    bit 29      1 in the first id of a run
    bits 0-28   a quarter of the digest: id number i of the run has quarter i % 4

    ids  9707  1610612743  1073741901  1073742002  1073741999  1073741831  …  151653
               first, quarter 0   quarter 1   quarter 2   quarter 3   quarter 0

Equal ids are therefore equal images: prefix trees, KV caches, branches of agents, records and messages treat
image ids as they treat any ids. Engines and the trainer put the model's placeholder back right before a
forward (`with_placeholders`), and find the images by the digests (`find_runs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FIRST_IMAGE_ID = 1 << 30
IMAGE_ID_END = 1 << 31  # image ids are smaller, so that rows are int32
RUN_START = 1 << 29
QUARTERS = 4
QUARTER_BITS = 29
QUARTER_MASK = (1 << QUARTER_BITS) - 1
DIGEST_BITS = QUARTERS * QUARTER_BITS
DIGEST_DIGITS = DIGEST_BITS // 4  # hexadecimal digits
MIN_RUN_IDS = QUARTERS  # with fewer ids a run could not spell its digest


class ImageRun(NamedTuple):
    """The ids [start, end) of an image in a row."""

    start: int
    end: int
    digest: str


def image_ids(digest: str, count: int) -> tuple[int, ...]:
    """Return the run of `count` ids for the image with this digest, DIGEST_DIGITS hexadecimal digits."""
    assert count >= MIN_RUN_IDS and len(digest) == DIGEST_DIGITS
    number = int(digest, 16)
    quarters = [number >> QUARTER_BITS * index & QUARTER_MASK for index in range(QUARTERS)]
    ids = [FIRST_IMAGE_ID | quarters[index % QUARTERS] for index in range(count)]
    ids[0] |= RUN_START
    return tuple(ids)


def find_runs(ids: Sequence[int] | np.ndarray) -> list[ImageRun]:
    """Return the runs of image ids in a row, in order. A run that a cut has left without its end is returned
    as far as it goes; without its first ids it is not returned."""
    row = np.asarray(ids, dtype=np.int64)
    positions = np.flatnonzero(row >= FIRST_IMAGE_ID)
    if not len(positions):
        return []

    is_start = (row[positions] & RUN_START) != 0
    is_start[0] = True
    is_start[1:] |= np.diff(positions) > 1
    run_starts = np.flatnonzero(is_start)
    run_ends = [*run_starts[1:], len(positions)]
    runs: list[ImageRun] = []
    for start, end in zip(run_starts, run_ends, strict=True):
        first = int(positions[start])
        count = int(end - start)
        if row[first] & RUN_START and count >= MIN_RUN_IDS:
            runs.append(ImageRun(first, first + count, _spelled_digest(row[first : first + QUARTERS])))

    return runs


def find_whole_runs(ids: Sequence[int]) -> list[ImageRun]:
    """Return the runs of image ids in a row from elsewhere, in order. ValueError if an image id belongs to no
    run, or if an id is too large for an image id."""
    largest = max(ids, default=0)
    if largest >= IMAGE_ID_END:
        raise ValueError(f"{largest} is not a valid token ID")
    if largest < FIRST_IMAGE_ID:
        return []

    runs = find_runs(ids)
    image_id_count = np.count_nonzero(np.asarray(ids) >= FIRST_IMAGE_ID)
    if image_id_count != sum(run.end - run.start for run in runs):
        raise ValueError(f"image ids must begin with the first {MIN_RUN_IDS} ids of an image")

    return runs


def has_image_ids(ids: Sequence[int]) -> bool:
    """Return True if a row has an image id."""
    return max(ids, default=0) >= FIRST_IMAGE_ID


def with_placeholders(ids: np.ndarray, placeholder: int) -> np.ndarray:
    """Return ids with the model's placeholder in place of all image ids."""
    return np.where(ids >= FIRST_IMAGE_ID, placeholder, ids)


def collapse_runs(ids: Sequence[int], placeholder: int) -> Sequence[int]:
    """Return ids with one placeholder in place of each run of image ids, as processors of engines expect
    them. The ends of runs without a beginning are left out."""
    if not has_image_ids(ids):
        return ids
    return tuple(
        placeholder if token >= FIRST_IMAGE_ID else token
        for token in ids
        if token < FIRST_IMAGE_ID or token & RUN_START
    )


def largest_token_id(ids: Sequence[int]) -> int:
    """Return the largest of the ids that are no image ids; -1 if there is none."""
    largest = max(ids, default=-1)
    if largest < FIRST_IMAGE_ID:
        return largest
    return max((token for token in ids if token < FIRST_IMAGE_ID), default=-1)


def _spelled_digest(first_ids: np.ndarray) -> str:
    number = sum(
        (int(image_id) & QUARTER_MASK) << QUARTER_BITS * index for index, image_id in enumerate(first_ids)
    )
    return f"{number:0{DIGEST_DIGITS}x}"
