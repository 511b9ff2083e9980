"""Append-only payload files: `length | xxh3 | bytes` records, read back by (segment, offset).

An appended record is kill-9 safe (the kernel has the bytes), and power-loss safe after `sync_segment`.
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
SEGMENT_BYTES = 64 << 20  # size at which a writer begins a new segment
MAX_OPEN_SEGMENTS = 64  # open files of a reader
MAX_REMOVED = 4  # segments deleted at once: each deletion takes milliseconds


class FrameLocation(NamedTuple):
    """The location of a record."""

    segment: int
    offset: int


class SegmentWriter:
    """Writes records to numbered files of a directory. Single writer; each opening begins a new file."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._file = -1
        self._segment = self.newest_segment
        self._offset = 0

    @property
    def current_segment(self) -> int:
        """Return the number of the file that this writer appends to; before its first record, that of the
        newest file of any writer."""
        return self._segment

    @property
    def newest_segment(self) -> int:
        """Return the number of the newest file of any writer; -1 without files."""
        return max((int(path.stem) for path in self.directory.glob("*.seg")), default=-1)

    def append_record(self, payload: bytes) -> FrameLocation:
        """Write a record. StorePaused when the disk is full; a half-written record is cut off."""
        record = RECORD_HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        try:
            if self._file < 0 or self._offset >= self.segment_bytes:
                self._begin_segment()
            # At the known offset, not at the file's end: a truncated file then loses no later record.
            written_bytes = os.pwrite(self._file, record, self._offset)
            if written_bytes != len(record):
                os.ftruncate(self._file, self._offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise store_error(self.directory, error) from error

        location = FrameLocation(self._segment, self._offset)
        self._offset += written_bytes
        return location

    def sync_segment(self) -> None:
        """Sync appended records, which then survive a power cut."""
        if self._file >= 0:
            fsync(segment_path(self.directory, self._segment))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin_segment(self) -> None:
        self.sync_segment()
        self.close()
        self._segment = self.newest_segment + 1
        self._offset = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = os.open(segment_path(self.directory, self._segment), flags, 0o644)
        fsync(self.directory)  # the file's name survives a power cut, too


class SegmentReader:
    """Reads records, also while a writer appends. Files stay open, at most MAX_OPEN_SEGMENTS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[int, int] = {}

    def read_record(self, location: FrameLocation) -> bytes:
        """Return a verified record. StoreError names the file when the record is damaged or the file is
        gone."""
        path = segment_path(self.directory, location.segment)
        with StoreError.instead_of(OSError, text=f"{path} cannot be read"):  # a bad sector, or a missing file
            if location.segment not in self._files:
                if len(self._files) >= MAX_OPEN_SEGMENTS:
                    self.close()
                self._files[location.segment] = os.open(path, os.O_RDONLY)

            file = self._files[location.segment]
            header = os.pread(file, RECORD_HEADER.size, location.offset)
            if len(header) == RECORD_HEADER.size:
                length, digest = RECORD_HEADER.unpack(header)
                payload = os.pread(file, length, location.offset + RECORD_HEADER.size)
                if len(payload) == length and xxhash.xxh3_64_intdigest(payload) == digest:
                    return payload

        raise StoreError(f"{path}: damaged record at offset {location.offset}")

    def oldest_kept(self, oldest_needed: int, spare_bytes: int) -> int:
        """Return the oldest segment to keep: all segments from `oldest_needed` on, and the newest earlier
        segments with at most `spare_bytes` in all."""
        segment_sizes = {int(path.stem): path.stat().st_size for path in self.directory.glob("*.seg")}
        for number in sorted((number for number in segment_sizes if number < oldest_needed), reverse=True):
            spare_bytes -= segment_sizes[number]
            if spare_bytes < 0:
                break
            oldest_needed = number
        return oldest_needed

    def remove_before(self, segment: int) -> bool:
        """Delete segments below a number, at most MAX_REMOVED; return whether there may be more. The caller
        has no reference into these segments any more; a segment that cannot be deleted is tried again next
        time."""
        removed = 0
        for path in [path for path in self.directory.glob("*.seg") if int(path.stem) < segment]:
            if (file := self._files.pop(int(path.stem), None)) is not None:
                os.close(file)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s, which is no longer needed: %s", path, error)
            else:
                removed += 1

            if removed == MAX_REMOVED:
                return True

        return False

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}


def fsync(path: Path) -> None:
    """Make a file's data, or a directory's names, survive a power cut. StoreError on failure."""
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
