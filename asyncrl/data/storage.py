"""Stores samples, and beside them images, in files that the launcher writes once, to be read on demand.

    sample │ sample │ … │ end of each sample (uint64) │ footer │ length of the footer (uint64)
    image  │ image  │ … │                               footer │ length of the footer (uint64)

Samples and footers are msgpack, images the bytes of PNG and JPEG files. The files are mapped into memory, so
a reader holds no decoded samples.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Self, overload

import msgspec
import xxhash

from asyncrl.errors import ConfigError
from asyncrl.types import Sample

UINT64 = struct.Struct("<Q")
SEQUENCE_IMAGE_IDS = "sequence_image_ids"  # name of a file


class Footer(msgspec.Struct, frozen=True):
    """Ends a file of samples. `fingerprint`: of all samples in order. `sizes`: samples of each source."""

    fingerprint: str
    sizes: tuple[int, ...]


class ImageFooter(msgspec.Struct, frozen=True):
    """Ends a file of images: the digest and the number of bytes of each image, in the file's order.
    `sample_ids`: the most ids that the images of a sample have together."""

    digests: list[str]
    sizes: list[int]
    sample_ids: int = 0


class MappedFile:
    """Maps a file with a footer into memory. Raises ValueError or struct.error if the file is malformed."""

    def __init__(self, file: BinaryIO) -> None:
        self._mapped_file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        footer_end = len(self._mapped_file) - UINT64.size
        self._footer_offset = footer_end - UINT64.unpack_from(self._mapped_file, footer_end)[0]
        self._footer_frame = self._mapped_file[self._footer_offset : footer_end]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file that a launcher saved. ConfigError if the file cannot be read."""
        try:
            with path.open("rb") as file:
                return cls(file)
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(
                f"{path}: not readable ({error}); restart the launcher, which writes the file again"
            ) from None

    def save(self, path: Path) -> None:
        """Save a copy, and replace an existing file at the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_file(path, self._mapped_file)


def _replace_file(path: Path, content: bytes | mmap.mmap) -> None:
    """Replace a file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _write_footer(file: BinaryIO, footer: msgspec.Struct) -> None:
    frame = msgspec.msgpack.encode(footer)
    file.write(frame + UINT64.pack(len(frame)))
    file.flush()


class Samples(MappedFile, Sequence[Sample]):
    """Reads the samples of a file on demand. Raises ValueError if the file is malformed."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        footer = msgspec.msgpack.decode(self._footer_frame, type=Footer)
        self.fingerprint = footer.fingerprint
        self.sizes = footer.sizes

        ends_offset = self._footer_offset - UINT64.size * sum(self.sizes)
        self._sample_ends = memoryview(self._mapped_file)[ends_offset : self._footer_offset].cast("Q")
        self._decoder = msgspec.msgpack.Decoder(Sample)

    @classmethod
    def write(cls, file: BinaryIO, sources: Iterable[Iterable[Sample]]) -> Samples:
        """Write samples of several sources, numbered consecutively, to an empty file open for both ways."""
        digest = xxhash.xxh3_128()
        ends = array("Q")
        sizes = []
        end = 0

        for source in sources:
            first_number = len(ends)
            for sample in source:
                frame = msgspec.msgpack.encode(msgspec.structs.replace(sample, row=len(ends)))
                digest.update(frame)
                file.write(frame)
                end += len(frame)
                ends.append(end)

            sizes.append(len(ends) - first_number)

        file.write(bytes(-end % UINT64.size))  # the ends are read in place, so they are aligned
        file.write(ends)
        _write_footer(file, Footer(digest.hexdigest(), tuple(sizes)))
        return cls(file)

    def __len__(self) -> int:
        return len(self._sample_ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]

        number = range(len(self))[index]  # negative indexes count from the end
        start = self._sample_ends[number - 1] if number else 0
        return self._decoder.decode(self._mapped_file[start : self._sample_ends[number]])


class StoredImages(MappedFile):
    """Reads the prepared images of a file by digest. `sample_ids`: see `ImageFooter`. Raises ValueError if
    the file is malformed."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        footer = msgspec.msgpack.decode(self._footer_frame, type=ImageFooter)
        self.sample_ids = footer.sample_ids
        ends = list(accumulate(footer.sizes))
        if sum(footer.sizes) != self._footer_offset:
            raise ValueError("the sizes of the images are not those of the file")
        self._spans = {
            digest: slice(end - size, end)
            for digest, end, size in zip(footer.digests, ends, footer.sizes, strict=True)
        }

    def file_of(self, digest: str) -> bytes | None:
        """Return the file (PNG or JPEG) of an image; None for an unknown digest."""
        span = self._spans.get(digest)
        return self._mapped_file[span] if span else None

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the digests, in the order of the file."""
        return iter(self._spans)


class ImageWriter:
    """Writes images, each once, to an empty file that is open for both ways."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sizes: dict[str, int] = {}

    def add(self, digest: str, image_file: bytes) -> bool:
        """Write an image, unless it is written already. Returns whether the image was written."""
        if digest in self._sizes:
            return False
        self._file.write(image_file)
        self._sizes[digest] = len(image_file)
        return True

    def finish(self, sample_ids: int) -> StoredImages:
        """Finish the file, and return its images. `sample_ids`: see `ImageFooter`."""
        _write_footer(self._file, ImageFooter([*self._sizes], [*self._sizes.values()], sample_ids))
        return StoredImages(self._file)


def samples_path(run_dir: Path, split: str) -> Path:
    """Return the path of the file in which the launcher saves the samples for the coordinator."""
    return run_dir / "data" / f"{split}.samples"


def images_path(run_dir: Path, split: str) -> Path:
    """Return the path of the file in which the launcher saves the images of the samples. Samples without
    images have no such file."""
    return run_dir / "data" / f"{split}.images"


def open_images(run_dir: Path, split: str) -> StoredImages | None:
    """Open the images of the samples that a launcher saved; None if the samples have no images. ConfigError
    if the file cannot be read."""
    path = images_path(run_dir, split)
    return StoredImages.open(path) if path.exists() else None


def save_sequence_image_ids(run_dir: Path, image_ids: int) -> None:
    """Save the most ids of images in a sequence that is trained, beside the samples."""
    _replace_file(run_dir / "data" / SEQUENCE_IMAGE_IDS, f"{image_ids}\n".encode())


def stored_sequence_image_ids(run_dir: Path) -> int | None:
    """Return the most ids of images in a sequence that is trained, as the launcher has saved the number; None
    without the file, as in a run directory that the launcher does not share."""
    path = run_dir / "data" / SEQUENCE_IMAGE_IDS
    return int(path.read_text()) if path.exists() else None


def check_same_data(samples: Samples, recorded_fingerprint: str, changed_by: str = "") -> None:
    """Check that a resumed run has the same samples, as groups name samples by number. ConfigError unless the
    fingerprint equals `recorded_fingerprint`, or that is empty (a new run). `changed_by`: changed settings
    that make other samples of the same data."""
    if recorded_fingerprint not in ("", samples.fingerprint):
        advice = "; restore the data (and the task images)"
        if changed_by:
            advice = f" ({changed_by}); restore the earlier value"

        raise ConfigError(
            "data.train: the samples or their order have changed since the run started"
            f"{advice}, or start a new run with another name=…"
        )
