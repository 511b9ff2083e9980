"""Append-only payload files: `length | xxh3 | bytes` records, read back by (segment, offset).

A record is kill-9 safe once it is appended (the kernel has it), and power-loss safe after `sync`.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.store.schema import StoreError, store_error

log = logging.getLogger("asyncrl.store")

RECORD_HEADER = struct.Struct("<IQ")
SEGMENT_BYTES = 64 << 20
MAX_OPEN_SEGMENTS = 64  # segments that a reader has open
MAX_REMOVED = 4  # segments at once: to delete one takes milliseconds


class FrameLocation(NamedTuple):
    """The place of a record."""

    segment: int
    offset: int


class SegmentWriter:
    """Writes records to numbered files of a directory. One writer; each opening begins a new file."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._file = -1
        self._segment = -1
        self._offset = 0

    @property
    def newest(self) -> int:
        """Number of the newest file, whoever wrote it; -1: there is none."""
        return max((int(path.stem) for path in self.directory.glob("*.seg")), default=-1)

    def append(self, payload: bytes) -> FrameLocation:
        """Write one record. StorePaused when the disk is full; a record that was half written is cut off."""
        record = RECORD_HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        try:
            if self._file < 0 or self._offset >= self.segment_bytes:
                self._begin_segment()
            # At its own offset, not at the file's end: one that somebody cuts short loses no later record.
            written_bytes = os.pwrite(self._file, record, self._offset)
            if written_bytes != len(record):
                os.ftruncate(self._file, self._offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise store_error(self.directory, error) from error
        location = FrameLocation(self._segment, self._offset)
        self._offset += written_bytes
        return location

    def sync(self) -> None:
        """Syncs what was appended, so that it survives a power cut."""
        if self._file >= 0:
            fsync(segment_path(self.directory, self._segment))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin_segment(self) -> None:
        self.sync()
        self.close()
        self._segment = self.newest + 1
        self._offset = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = os.open(segment_path(self.directory, self._segment), flags, 0o644)
        fsync(self.directory)  # the file's name survives a power cut, too


class SegmentReader:
    """Reads records, also while they are written. Files stay open, at most MOST_OPEN."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[int, int] = {}

    def read(self, location: FrameLocation) -> bytes:
        """The record at a place, verified. StoreError names the file when it is damaged or gone."""
        path = segment_path(self.directory, location.segment)
        with StoreError.instead_of(
            OSError, text=f"{path} cannot be read"
        ):  # a bad sector, or the file is gone
            file = self._file(location.segment)
            header = os.pread(file, RECORD_HEADER.size, location.offset)
            if len(header) == RECORD_HEADER.size:
                length, digest = RECORD_HEADER.unpack(header)
                payload = os.pread(file, length, location.offset + RECORD_HEADER.size)
                if len(payload) == length and xxhash.xxh3_64_intdigest(payload) == digest:
                    return payload
        raise StoreError(f"{path}: damaged record at {location.offset}")

    def oldest_kept(self, oldest_needed: int, spare_bytes: int) -> int:
        """The oldest segment to keep: those from `needed` on and, of those before it, the newest that have
        `spare_bytes` in all."""
        segment_sizes = {int(path.stem): path.stat().st_size for path in self.directory.glob("*.seg")}
        for number in sorted((number for number in segment_sizes if number < oldest_needed), reverse=True):
            spare_bytes -= segment_sizes[number]
            if spare_bytes < 0:
                break
            oldest_needed = number
        return oldest_needed

    def remove_before(self, segment: int) -> bool:
        """Delete segments below a number, at most MOST_REMOVED. Whether there may be more. The caller has no
        reference into them any more; one that cannot be deleted costs its place on the disk, and is tried
        again next time."""
        removed = 0
        for path in [path for path in self.directory.glob("*.seg") if int(path.stem) < segment]:
            if (file := self._files.pop(int(path.stem), None)) is not None:
                os.close(file)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s, which is not needed any more, stays: %s", path, error)
            else:
                removed += 1
            if removed == MAX_REMOVED:
                return True
        return False

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _file(self, segment: int) -> int:
        if segment not in self._files:
            if len(self._files) >= MAX_OPEN_SEGMENTS:
                self.close()
            self._files[segment] = os.open(segment_path(self.directory, segment), os.O_RDONLY)
        return self._files[segment]


def fsync(path: Path) -> None:
    """Let a file's data, or a directory's names, survive a power cut. StoreError when that fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise store_error(path, error) from error


def segment_path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:08d}.seg"
