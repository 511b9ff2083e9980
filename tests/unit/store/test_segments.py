from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from asyncrl.store.schema import StoreError
from asyncrl.store.segments import FramePlace, SegmentReader, SegmentWriter, segment_path


def test_records_come_back_and_survive_reopening(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path, segment_bytes=100)
    reader = SegmentReader(tmp_path)
    payloads = [bytes([i]) * (30 * i) for i in range(6)]
    places = [segments.append(payload) for payload in payloads]
    assert [reader.read(place) for place in places] == payloads
    assert places[-1].segment > 0  # rolled over
    segments.close()
    again = SegmentWriter(tmp_path)
    assert [reader.read(place) for place in places] == payloads
    assert again.append(b"new").segment > places[-1].segment  # never appends to a file with an unknown tail


def test_damage_is_found(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path)
    reader = SegmentReader(tmp_path)
    place = segments.append(b"payload")
    path = next(tmp_path.glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged record at 0"):
        reader.read(place)
    with pytest.raises(StoreError, match="damaged"):
        reader.read(FramePlace(place.segment, 4000))


def test_old_segments_go_and_the_current_one_stays(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path, segment_bytes=10)
    reader = SegmentReader(tmp_path)
    places = [segments.append(b"0123456789") for _ in range(4)]
    reader.remove_before(places[2].segment)
    with pytest.raises(StoreError, match="No such file"):
        reader.read(places[0])
    assert reader.read(places[3]) == b"0123456789"


def test_an_old_segment_that_cannot_be_deleted_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segments = SegmentWriter(tmp_path, segment_bytes=10)
    places = [segments.append(b"0123456789") for _ in range(4)]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        SegmentReader(tmp_path).remove_before(places[2].segment)
    assert "Read-only" in caplog.text and len(list(tmp_path.glob("*.seg"))) == 4
    SegmentReader(tmp_path).remove_before(places[2].segment)
    assert len(list(tmp_path.glob("*.seg"))) == 2


def test_a_full_disk_is_an_error_and_leaves_no_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = SegmentWriter(tmp_path)
    reader = SegmentReader(tmp_path)
    before = segments.append(b"before")
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, at: write(file, data[:5], at)
    )  # it fills up half-way
    with pytest.raises(StoreError, match="free disk space"):
        segments.append(b"too much")
    monkeypatch.undo()
    after = segments.append(b"after")
    assert reader.read(before) == b"before" and reader.read(after) == b"after"


def test_a_file_that_is_cut_short_while_it_is_written_loses_no_later_record(tmp_path: Path) -> None:
    segments, reader = SegmentWriter(tmp_path), SegmentReader(tmp_path)
    first, second = segments.append(b"first"), segments.append(b"second")
    os.truncate(segment_path(tmp_path, first.segment), second.offset + 3)
    third = segments.append(b"third")
    assert reader.read(first) == b"first" and reader.read(third) == b"third"
    with pytest.raises(StoreError, match=f"damaged record at {second.offset}"):
        reader.read(second)
