"""Append-only payload files: `length | xxh3 | bytes` records, read back by (segment, offset).

A record is kill-9 safe once it is appended (the kernel has it), and power-loss safe after `sync`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.store.schema import StoreError

HEADER = struct.Struct("<IQ")
SEGMENT_BYTES = 64 << 20


class FramePlace(NamedTuple):
    """Where a record is."""

    segment: int
    offset: int


class SegmentWriter:
    """Writes records to numbered files of a directory. One writer; a new file after each opening."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.segment_bytes = directory, segment_bytes
        self.current = max((int(path.stem) for path in directory.glob("*.seg")), default=-1)
        self._file, self._offset = -1, 0
        self._roll()

    def append(self, payload: bytes) -> FramePlace:
        """Write one record. StoreError when the disk is full; a record that was half written is cut off."""
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

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _roll(self) -> None:
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
        self.current += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        self._file, self._offset = os.open(segment_path(self.directory, self.current), flags, 0o644), 0


class SegmentReader:
    """Reads records, also while they are written. Files stay open until `close` or their removal."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[int, int] = {}

    def read(self, place: FramePlace) -> bytes:
        """The record at a place, verified. StoreError names the file when it is damaged or gone."""
        file = self._file(place.segment)
        header = os.pread(file, HEADER.size, place.offset)
        if len(header) == HEADER.size:
            length, digest = HEADER.unpack(header)
            payload = os.pread(file, length, place.offset + HEADER.size)
            if len(payload) == length and xxhash.xxh3_64_intdigest(payload) == digest:
                return payload
        path = segment_path(self.directory, place.segment)
        raise StoreError(f"{path}: damaged record at {place.offset}")

    def remove_before(self, segment: int) -> None:
        """Delete whole segments below a number. The caller has no reference into them any more."""
        for path in self.directory.glob("*.seg"):
            if int(path.stem) < segment:
                if (file := self._files.pop(int(path.stem), None)) is not None:
                    os.close(file)
                path.unlink()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _file(self, segment: int) -> int:
        if segment not in self._files:
            path = segment_path(self.directory, segment)
            try:
                self._files[segment] = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise StoreError(f"{path} is gone, but a live trajectory is in it") from None
        return self._files[segment]


def segment_path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:08d}.seg"
