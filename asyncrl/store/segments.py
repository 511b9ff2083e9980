"""Append-only payload files: `length | xxh3 | bytes` records, read back by (segment, offset).

kill -9 safe always (what `write` took is the kernel's), power-loss safe after `sync`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import xxhash

from asyncrl.errors import AsyncrlError

HEADER = struct.Struct("<IQ")
SEGMENT_BYTES = 64 << 20


class StoreError(AsyncrlError):
    """The run store is damaged, full or somebody else's."""


class FramePlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a record is."""

    segment: int
    offset: int


class Segments:
    """Writes records to numbered files of a directory. One writer; a new file after each opening."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.segment_bytes = directory, segment_bytes
        self.current = max((int(path.stem) for path in directory.glob("*.seg")), default=-1)
        self._file: int = -1
        self._offset = 0
        self._readers: dict[int, int] = {}
        self._roll()

    def append(self, payload: bytes) -> FramePlace:
        """Write one record. StoreError when the disk is full; nothing is half-referenced then."""
        if self._offset >= self.segment_bytes:
            self._roll()
        place = FramePlace(self.current, self._offset)
        record = HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        try:
            written = os.write(self._file, record)
            if written != len(record):
                raise OSError(28, "short write")
        except OSError as error:
            os.ftruncate(self._file, self._offset)
            raise StoreError(
                f"{self.directory}: cannot write a payload ({error.strerror}); free disk space"
            ) from error
        self._offset += written
        return place

    def read(self, place: FramePlace) -> bytes:
        """The record at a place, verified. StoreError names the file when it is damaged."""
        reader = self._reader(place.segment)
        header = os.pread(reader, HEADER.size, place.offset)
        if len(header) == HEADER.size:
            length, digest = HEADER.unpack(header)
            payload = os.pread(reader, length, place.offset + HEADER.size)
            if len(payload) == length and xxhash.xxh3_64_intdigest(payload) == digest:
                return payload
        raise StoreError(f"{self._path(place.segment)}: damaged record at {place.offset}")

    def remove_before(self, segment: int) -> None:
        """Delete whole segments below a number (never the current one)."""
        for path in self.directory.glob("*.seg"):
            number = int(path.stem)
            if number < min(segment, self.current):
                os.close(self._readers.pop(number)) if number in self._readers else None
                path.unlink()

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        for reader in self._readers.values():
            os.close(reader)
        self._readers = {}
        os.close(self._file)

    def _roll(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
        self.current += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        self._file, self._offset = os.open(self._path(self.current), flags, 0o644), 0

    def _reader(self, segment: int) -> int:
        if segment not in self._readers:
            try:
                self._readers[segment] = os.open(self._path(segment), os.O_RDONLY)
            except FileNotFoundError:
                raise StoreError(f"{self._path(segment)} is gone, but a live trajectory is in it") from None
        return self._readers[segment]

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.seg"
