"""Finds the files of a run's images: of its data, and of the turns and replies in its store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.data.storage import StoredImages, open_images
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError

SPLITS = ("train", "test")


def open_data_images(run_dir: Path) -> list[StoredImages]:
    """Open the images of a run's data. ConfigError for an unreadable file."""
    opened_images = (open_images(run_dir, split) for split in SPLITS)
    return [images for images in opened_images if images is not None]


class RunImages:
    """The files of images by digest. `data_images`: of the run's data; `reader`: of the run's store."""

    def __init__(self, data_images: Sequence[StoredImages], reader: RunReader) -> None:
        self._data_images = data_images
        self._reader = reader

    @classmethod
    def open(cls, run_dir: Path, reader: RunReader) -> RunImages:
        """Open the images of a run directory. ConfigError for an unreadable file of the data."""
        return cls(open_data_images(run_dir), reader)

    def file_of(self, digest: str) -> bytes | None:
        """Return the file of an image; None if the run does not have it any more. StoreError for an
        unreadable file."""
        for images in self._data_images:
            if (file := images.file_of(digest)) is not None:
                return file
        return self._reader.image_file(digest)

    def files_of(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return the files of images by digest. StoreError for a file that is lost."""
        files: dict[str, bytes] = {}
        for digest in digests:
            file = self.file_of(digest)
            if file is None:
                raise StoreError(f"image {digest} was deleted in the meantime; set a larger store.keep_bytes")
            files[digest] = file
        return files
