"""Samples in a file: written once by the launcher, decoded one by one when asked for.

    sample │ sample │ … │ end of each sample (uint64) │ footer │ length of the footer (uint64)

Samples and footer are msgpack. Of a million samples a reader holds none: the file is mapped into memory.
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

WORD = struct.Struct("<Q")


class Footer(msgspec.Struct, frozen=True):
    """`fingerprint`: of all samples in their order. `sizes`: samples of each source, in their order."""

    fingerprint: str
    sizes: tuple[int, ...]


class Samples(Sequence[Sample]):
    """The samples of a file. Raises ValueError if it is none."""

    def __init__(self, file: BinaryIO) -> None:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = len(self._map) - WORD.size
        start = at - WORD.unpack_from(self._map, at)[0]
        footer = msgspec.msgpack.decode(self._map[start:at], type=Footer)
        self.fingerprint = footer.fingerprint
        self.sizes = footer.sizes
        self._ends = memoryview(self._map)[start - WORD.size * sum(self.sizes) : start].cast("Q")
        self._decoder = msgspec.msgpack.Decoder(Sample)

    @classmethod
    def open(cls, path: Path) -> Samples:
        """The samples that a launcher saved; ConfigError where there are none."""
        try:
            with path.open("rb") as file:
                return cls(file)
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(
                f"{path}: not readable ({error}); the launcher writes it: start it again"
            ) from None

    @classmethod
    def write(cls, file: BinaryIO, sources: Iterable[Iterable[Sample]]) -> Samples:
        """Samples of several sources, numbered one after another, into an empty file open for both ways."""
        digest = xxhash.xxh3_128()
        ends = array("Q")
        sizes = []
        end = 0
        for source in sources:
            before = len(ends)
            for sample in source:
                frame = msgspec.msgpack.encode(msgspec.structs.replace(sample, row=len(ends)))
                digest.update(frame)
                file.write(frame)
                end += len(frame)
                ends.append(end)
            sizes.append(len(ends) - before)
        file.write(bytes(-end % WORD.size))  # the ends are read in place, so they are aligned
        file.write(ends)
        footer = msgspec.msgpack.encode(Footer(digest.hexdigest(), tuple(sizes)))
        file.write(footer + WORD.pack(len(footer)))
        file.flush()
        return cls(file)

    def save(self, path: Path) -> None:
        """A copy in place of whatever the path holds."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_bytes(self._map)
        path.with_suffix(".tmp").replace(path)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self._decoder.decode(self._map[self._ends[at - 1] if at else 0 : self._ends[at]])


def samples_path(run_dir: Path, split: str) -> Path:
    """The file in which the launcher saves the samples for the coordinator."""
    return run_dir / "data" / f"{split}.samples"


def check_same_data(samples: Samples, kept: str, filtered_by: str = "") -> None:
    """ConfigError unless their fingerprint is the `kept` one, or that is empty: a new run. Groups name
    samples by number. `filtered_by`: changed settings, by which other prompts are left out."""
    if kept not in ("", samples.fingerprint):
        why = (
            f": data.filter_overlong depends on {filtered_by}; restore that"
            if filtered_by
            else "; restore the data, of tasks their images, too"
        )
        raise ConfigError(
            "data.train: these are other samples, or in another order, than those that the run was begun "
            f"with{why}, or begin a new run with another name=…"
        )
