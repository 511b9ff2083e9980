"""Stores samples in a file, which the launcher writes once; samples are decoded one by one on demand.

    sample │ sample │ … │ end of each sample (uint64) │ footer │ length of the footer (uint64)

Samples and footer are msgpack. The file is mapped into memory, so a reader holds no decoded samples.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, overload

import msgspec
import xxhash

from asyncrl.errors import ConfigError
from asyncrl.types import Sample

UINT64 = struct.Struct("<Q")


class Footer(msgspec.Struct, frozen=True):
    """Ends a file of samples. `fingerprint`: of all samples in order. `sizes`: samples of each source."""

    fingerprint: str
    sizes: tuple[int, ...]


class Samples(Sequence[Sample]):
    """Reads the samples of a file on demand. Raises ValueError if the file is malformed."""

    def __init__(self, file: BinaryIO) -> None:
        self._mapped_file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        footer_size_offset = len(self._mapped_file) - UINT64.size
        footer_offset = footer_size_offset - UINT64.unpack_from(self._mapped_file, footer_size_offset)[0]
        footer = msgspec.msgpack.decode(self._mapped_file[footer_offset:footer_size_offset], type=Footer)
        self.fingerprint = footer.fingerprint
        self.sizes = footer.sizes

        ends_offset = footer_offset - UINT64.size * sum(self.sizes)
        self._sample_ends = memoryview(self._mapped_file)[ends_offset:footer_offset].cast("Q")
        self._decoder = msgspec.msgpack.Decoder(Sample)

    @classmethod
    def open(cls, path: Path) -> Samples:
        """Open the samples that a launcher saved. ConfigError if the file cannot be read."""
        try:
            with path.open("rb") as file:
                return cls(file)
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(
                f"{path}: not readable ({error}); restart the launcher, which writes the file again"
            ) from None

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
        footer = msgspec.msgpack.encode(Footer(digest.hexdigest(), tuple(sizes)))
        file.write(footer + UINT64.pack(len(footer)))
        file.flush()

        return cls(file)

    def save(self, path: Path) -> None:
        """Save a copy, and replace an existing file at the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_bytes(self._mapped_file)
        path.with_suffix(".tmp").replace(path)

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


def samples_path(run_dir: Path, split: str) -> Path:
    """Return the path of the file in which the launcher saves the samples for the coordinator."""
    return run_dir / "data" / f"{split}.samples"


def check_same_data(samples: Samples, recorded_fingerprint: str, filtered_by: str = "") -> None:
    """Check that a resumed run has the same samples, as groups name samples by number. ConfigError unless the
    fingerprint equals `recorded_fingerprint`, or that is empty (a new run). `filtered_by`: changed settings
    that filter other prompts."""
    if recorded_fingerprint not in ("", samples.fingerprint):
        advice = "; restore the data (and the task images)"
        if filtered_by:
            advice = f" (data.filter_overlong depends on {filtered_by}); restore the earlier value"

        raise ConfigError(
            "data.train: the samples or their order have changed since the run started"
            f"{advice}, or start a new run with another name=…"
        )
