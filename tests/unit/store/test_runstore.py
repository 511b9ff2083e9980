"""The run's journal and its segments: what is committed comes back, whatever happens to process or disk."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import asyncrl
from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.errors import ConfigError
from asyncrl.store import schema
from asyncrl.store.reader import RunReader, read_meta
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import SCHEMA_VERSION, StoreError, StorePaused, SupersededError, check_schema
from asyncrl.store.segments import FrameLocation, SegmentReader, SegmentWriter, segment_path
from tests.fakes.power import DurableFiles
from tests.unit.buffer.machine import admit, land, make, train

CHILD = """
import sys
from pathlib import Path
from asyncrl.store.runstore import RunStore
store = RunStore(Path(sys.argv[1]))
for turn in range(1000):
    store.put_frame("0.0", turn, "generated", b"payload %d" % turn)
    store.commit()
    print(turn, flush=True)
"""


def persist(store: RunStore, buffer: ReplayBuffer) -> None:
    groups, *episodes = buffer.pop_changes()
    store.put_groups(groups, buffer.live_groups)
    store.put_episodes(*episodes)
    store.commit()


def test_everything_comes_back(tmp_path: Path) -> None:
    buffer, batches = make()
    store = RunStore(tmp_path)
    admit(buffer, 3)
    for uid in ("0.0", "0.1", "1.0", "1.1", "2.0"):
        land(buffer, uid)
        store.put_frame(uid, 0, "generated", uid.encode())

    persist(store, buffer)
    train(batches)
    persist(store, buffer)  # what left the buffer between two transactions is over in the store, too
    store.put_batches(batches.pop_changes())
    store.put_commit(1, 1, batches.by_step[1].plan_hash)
    store.commit()
    store.close()

    reopened = RunStore(tmp_path)
    snapshot = reopened.reader.load_run()
    assert snapshot.committed_steps == 1 and snapshot.next_group == 3
    assert [group.id for group in snapshot.groups] == [2]
    assert {e.uid: e.state for e in snapshot.episodes} == {"2.0": State.LANDED, "2.1": State.PENDING}
    assert snapshot.batches[0].uids == batches.by_step[1].uids
    assert snapshot.batches[0].plan_hash == batches.by_step[1].plan_hash
    assert snapshot.baselines == batches.baselines and snapshot.baselines.keys() == {0, 1}
    assert {e.uid for e in snapshot.planned_episodes} == {"0.0", "0.1", "1.0", "1.1"}
    assert snapshot.pruned_counts[State.TRAINED] == 4
    assert list(reopened.reader.turn_frames("2.0", 1)) == [b"2.0", b""]
    assert list(reopened.reader.turn_frames("0.0", 1)) == [b"0.0", b""]  # a kept plan's payloads are kept
    assert reopened.reader.trained_in_plans() == 4
    restored, _ = make()
    restored.restore_groups(snapshot.groups, snapshot.episodes, snapshot.pruned_counts, 0.0)
    restored.next_group = snapshot.next_group
    assert restored.account() == buffer.account() and restored.account().conserved


def test_kill_9_loses_nothing_acknowledged(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = -1
    for line in child.stdout:
        acknowledged = int(line)
        if acknowledged == 50:
            os.kill(child.pid, signal.SIGKILL)

    child.wait(10)
    store = RunStore(tmp_path)
    frames = list(store.reader.turn_frames("0.0", acknowledged + 1))[::2]
    assert frames == [b"payload %d" % turn for turn in range(acknowledged + 1)]


@pytest.mark.parametrize("is_committed", [False, True])
def test_payloads_are_forgotten_from_a_turn_on(tmp_path: Path, is_committed: bool) -> None:
    store = RunStore(tmp_path)
    for uid in ("0.0", "0.1"):
        for turn in range(3):
            store.put_frame(uid, turn, "generated", b"%d" % turn)
    if is_committed:
        store.commit()

    store.forget_frames("0.0", turn=1)
    store.commit()
    assert list(store.reader.turn_frames("0.0", 3, ["generated"])) == [b"0", b"", b""]
    assert list(store.reader.turn_frames("0.1", 3, ["generated"])) == [b"0", b"1", b"2"]


def test_the_episodes_of_one_validation_are_forgotten(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for uid in ("val1/sampled/0", "val1/greedy/1", "val10/sampled/0", "val2/sampled/0"):
        store.put_held_out(uid, uid.encode())
    store.forget_held_out("val1/")
    store.commit()
    assert {uid for uid, _ in store.reader.held_out("val")} == {"val10/sampled/0", "val2/sampled/0"}


def test_covered_steps_stay_covered(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for step in (9, 10, 2):  # numbers, not texts, are compared
        store.cover_steps(step, 1)
        store.commit()
    assert store.reader.covered_step == 10


def test_segments_are_kept_as_far_as_their_bytes_fit(tmp_path: Path) -> None:
    for number in range(4):
        segment_path(tmp_path, number).write_bytes(bytes(10))
    reader = SegmentReader(tmp_path)
    assert [reader.oldest_kept(3, spare_bytes) for spare_bytes in (0, 9, 10, 29, 30, 99)] == [
        3,
        3,
        2,
        1,
        0,
        0,
    ]


def test_covered_plans_and_their_payloads_go(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put_frame("0.0", 0, "generated", b"x")
    store.release_frames("0.0")
    store.cover_steps(1, 4)
    store.commit()
    assert store.reader.trained_in_plans() == 4
    assert list(store.reader.turn_frames("0.0", 1)) == [b"x", b""], "there is no newer segment yet"


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_run_of_another_schema_is_refused_by_name(tmp_path: Path, version: int) -> None:
    RunStore(tmp_path).close()
    check_schema(tmp_path)
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        db.execute(f"PRAGMA user_version={version}")
    for opened in (RunStore, RunReader.open, check_schema):
        with pytest.raises(
            ConfigError,
            match=rf"run\.db: written by asyncrl .* \(schema {version}\), .*; use the commit of asyncrl that",
        ):
            opened(tmp_path)


@pytest.mark.parametrize(("writer", "cure"), [("0.0.9", "0.0.*"), ("999.1.0", "999.1.*")])
def test_a_run_of_another_minor_version_is_read_and_not_continued(
    tmp_path: Path, writer: str, cure: str
) -> None:
    RunStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "run.db")) as db, db:
        db.execute("UPDATE meta SET value=? WHERE key=?", (writer, schema.WRITER_KEY))

    RunReader.open(tmp_path).close()
    for opened in (RunStore, check_schema):
        with pytest.raises(ConfigError) as refusal:
            opened(tmp_path)
        error_text = str(refusal.value)
        assert f"written by asyncrl {writer} (schema" in error_text and "\n" not in error_text
        assert (
            f'cannot continue the run; run `pip install "asyncrl=={cure}"`, or start a new run with another'
            in error_text
        )


def test_a_run_is_continued_by_its_minor_version_and_by_the_first_one_that_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunStore(tmp_path).close()
    major, minor, *_ = asyncrl.__version__.split(".")
    monkeypatch.setattr(schema, "__version__", f"{major}.{minor}.99")
    RunStore(tmp_path).close()

    with closing(sqlite3.connect(tmp_path / "run.db")) as db, db:
        db.execute("DELETE FROM meta WHERE key=?", (schema.WRITER_KEY,))
    check_schema(tmp_path)
    RunStore(tmp_path).close()
    assert read_meta(tmp_path, schema.WRITER_KEY) == asyncrl.__version__


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    check_schema(tmp_path)  # nothing is there yet
    buffer, _ = make()
    store = RunStore(tmp_path)
    admit(buffer, 1)
    land(buffer, "0.0")
    store.put_frame("0.0", 0, "generated", b"x")
    persist(store, buffer)
    files = set(tmp_path.rglob("*.seg"))

    with closing(RunReader.open(tmp_path)) as reader:
        assert reader.counts() == {State.LANDED: 1, State.PENDING: 1}
        assert reader.episode("0.0").result.reward == 1.0
        store.put_frame("0.0", 0, "replied", b"y")
        assert list(store.reader.turn_frames("0.0", 1)) == [b"x", b"y"]
        assert list(reader.turn_frames("0.0", 1)) == [b"x", b""]

    assert set(tmp_path.rglob("*.seg")) == files  # a reader begins no segment
    assert len(list((tmp_path / "segments").glob("*.seg"))) == 1


def test_only_a_commit_commits(tmp_path: Path) -> None:
    """An error in mid-turn closes the store; what that turn had put must not be there afterwards."""
    store = RunStore(tmp_path)
    store.put_frame("0.0", 0, "generated", b"x")
    store.put_commit(1, 1, "hash")
    store.request_sync()
    store.close()
    again = RunStore(tmp_path)
    assert again.reader.plan_hash(1) is None and list(again.reader.turn_frames("0.0", 1)) == [b"", b""]
    again.put_commit(1, 1, "hash")
    again.rollback()
    again.commit()
    assert again.reader.plan_hash(1) is None


def writes(store: RunStore) -> None:
    store.put_frame("0.0", 0, "generated", b"x" * 5000)
    store.forget_plans(1, 1, 4)
    store.put_commit(1, 1, "hash")
    store.request_sync()


def assert_written_once(store: RunStore) -> None:
    store.commit()
    store.commit()
    assert store.reader.plan_hash(1) == "hash" and store.reader.meta("covered") == "4"
    assert list(store.reader.turn_frames("0.0", 1)) == [b"x" * 5000, b""]
    assert sum(path.stat().st_size for path in store._segments.directory.iterdir()) < 6000


def test_a_locked_store_is_written_when_the_lock_is_gone(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    writes(store)
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as locking:
        locking.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(
                StorePaused, match=r"locked; the run waits .* stop the process that locks the database"
            ):
                store.commit()
        locking.execute("ROLLBACK")

    assert_written_once(store)


def test_a_full_disk_is_written_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(tmp_path)
    writes(store)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:5], at))
    with pytest.raises(StorePaused, match="free disk space"):
        store.commit()
    monkeypatch.undo()
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count={pages}")  # the index cannot grow
    store.put_meta("a", "b" * 5000)
    for _ in range(3):
        with pytest.raises(StorePaused, match=r"full; the run waits .* free disk space"):
            store.commit()

    store._db.execute("PRAGMA max_page_count=100000")
    assert_written_once(store)


def test_without_descriptors_it_waits_until_there_are_some(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    writes(store)
    gc.collect()  # else a lower descriptor, of an earlier test's garbage, may become free meanwhile
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))

    try:
        with pytest.raises(StorePaused, match=r"Too many open files.*the run waits .*; raise ulimit -n"):
            store.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    assert_written_once(store)


def test_a_reader_does_not_hold_a_sync_up_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite copies its log only as far as the reader has read; what is in the log is on the disk, too."""
    store = RunStore(tmp_path)
    files = DurableFiles(tmp_path)
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as reader, files.recorded():
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM meta").fetchone()
        writes(store)
        began = time.monotonic()
        store.commit()
        assert time.monotonic() - began < 4  # SQLite itself would wait for five seconds

    assert "a reader keeps a transaction open" in caplog.text
    store.close()
    files.cut_power()
    assert_written_once(RunStore(tmp_path))


def test_an_owner_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    old = RunStore(tmp_path)
    writes(old)
    new = RunStore(tmp_path)
    assert (old.epoch, new.epoch) == (1, 2)
    with pytest.raises(SupersededError, match=r"epoch 2.* has taken over from this one .epoch 1"):
        old.commit()
    assert new.reader.plan_hash(1) is None
    writes(new)
    new.commit()
    assert list(new.reader.turn_frames("0.0", 1)) == [b"x" * 5000, b""]


def test_a_store_that_is_locked_is_opened_when_the_lock_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted coordinator must not use up its restarts meanwhile."""
    RunStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as locking:
        locking.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patch:
            patch.setattr(schema, "OPEN_DEADLINE", -1.0)
            with pytest.raises(StorePaused, match="locked"):
                RunStore(tmp_path)
        monkeypatch.setattr(schema.time, "sleep", lambda seconds: locking.execute("ROLLBACK"))
        assert RunStore(tmp_path).epoch == 2


def test_errors_of_the_index_are_errors_of_the_store(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store._db.execute("DROP TABLE commits")
    store.put_commit(1, 1, "hash")
    for broken in (store.commit, lambda: store.reader.plan_hash(1)):
        with pytest.raises(StoreError, match=r"run\.db: no such table"):
            broken()


def test_what_was_synced_survives_a_power_cut_and_no_epoch_is_given_twice(tmp_path: Path) -> None:
    files = DurableFiles(tmp_path)
    with files.recorded():
        store = RunStore(tmp_path)
        writes(store)
        store.commit()
        store.put_frame("0.1", 0, "generated", b"y")
        store.put_commit(2, 1, "later")
        store.commit()

    store.close()
    files.cut_power()
    again = RunStore(tmp_path)
    assert again.epoch == 2
    assert again.reader.plan_hash(2) is None and list(again.reader.turn_frames("0.1", 1)) == [b"", b""]
    assert_written_once(again)


# -- segments -----------------------------------------------------------------------------------------------


def test_records_come_back_and_survive_reopening(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path, segment_bytes=100)
    reader = SegmentReader(tmp_path)
    payloads = [bytes([i]) * (30 * i) for i in range(6)]
    locations = [segments.append_record(payload) for payload in payloads]
    assert [reader.read_record(location) for location in locations] == payloads
    assert locations[-1].segment > 0  # rolled over
    segments.close()
    again = SegmentWriter(tmp_path)
    assert [reader.read_record(location) for location in locations] == payloads
    assert (
        again.append_record(b"new").segment > locations[-1].segment
    )  # never appends to a file with an unknown tail


def test_damage_is_found(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path)
    reader = SegmentReader(tmp_path)
    location = segments.append_record(b"payload")
    path = next(tmp_path.glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged record at offset 0"):
        reader.read_record(location)
    with pytest.raises(StoreError, match="damaged"):
        reader.read_record(FrameLocation(location.segment, 4000))


def test_old_segments_go_and_one_that_cannot_be_deleted_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segments = SegmentWriter(tmp_path, segment_bytes=10)
    locations = [segments.append_record(b"0123456789") for _ in range(4)]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        SegmentReader(tmp_path).remove_before(locations[2].segment)

    assert "Read-only" in caplog.text and len(list(tmp_path.glob("*.seg"))) == 4
    reader = SegmentReader(tmp_path)
    reader.remove_before(locations[2].segment)
    assert len(list(tmp_path.glob("*.seg"))) == 2 and reader.read_record(locations[3]) == b"0123456789"
    with pytest.raises(StoreError, match="No such file"):
        reader.read_record(locations[0])


def test_a_file_that_is_cut_short_while_it_is_written_loses_no_later_record(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path)
    reader = SegmentReader(tmp_path)
    first = segments.append_record(b"first")
    second = segments.append_record(b"second")
    os.truncate(segment_path(tmp_path, first.segment), second.offset + 3)
    third = segments.append_record(b"third")
    assert reader.read_record(first) == b"first" and reader.read_record(third) == b"third"
    with pytest.raises(StoreError, match=f"damaged record at offset {second.offset}"):
        reader.read_record(second)


def test_an_image_is_stored_once_and_kept_with_its_episodes(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for uid in ("0.0", "0.1"):  # in the same pass
        store.put_image(uid, 0, "d1", b"picture")
    store.commit()
    store.put_image("1.0", 2, "d1", b"picture")
    assert store.reader.image_file("d1") == b"picture", "before the commit, too"
    store.commit()

    assert (tmp_path / "segments" / "00000000.seg").read_bytes().count(b"picture") == 1
    assert store.reader.image_file("d2") is None
    for uid in ("0.0", "0.1"):
        store.forget_frames(uid)
    store.commit()
    assert store.reader.image_file("d1") == b"picture"
    store.forget_frames("1.0")
    store.commit()
    assert store.reader.image_file("d1") is None
    store.close()


def test_an_image_of_an_old_segment_is_written_again(tmp_path: Path) -> None:
    """Otherwise a picture that all episodes see would keep every segment since the first."""
    store = RunStore(tmp_path)
    store._segments.segment_bytes = 1  # a record per segment
    segments = []
    for number in range(5):
        store.put_image(f"{number}.0", 0, "d1", b"picture")
        store.put_frame(f"{number}.0", 0, "generated", b"turn")
        store.commit()
        place = store.reader.image_location("d1")
        assert place is not None
        segments.append(place.segment)

    assert segments == [0, 0, 3, 3, 6]
    store.close()


def damage_picture(run_dir: Path, segment: int) -> Path:
    """Damage the record of the picture in a segment, and return the segment's file."""
    segment_file = run_dir / "segments" / f"{segment:08}.seg"
    segment_file.write_bytes(segment_file.read_bytes().replace(b"picture", b"p?cture"))
    return segment_file


def test_an_image_that_cannot_be_read_is_written_again(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put_image("0.0", 0, "d1", b"picture")
    store.commit()
    segment_file = damage_picture(tmp_path, 0)
    with pytest.raises(StoreError, match="damaged record"):
        store.reader.image_file("d1")

    for uid in ("1.0", "1.1"):
        store.put_image(uid, 0, "d1", b"picture")
    store.commit()
    store.put_image("2.0", 0, "d1", b"picture")
    store.commit()
    assert store.reader.image_file("d1") == b"picture"
    assert segment_file.read_bytes().count(b"picture") == 1
    store.close()


def test_an_image_that_cannot_be_opened_now_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path)
    store._segments.segment_bytes = 1  # a record per segment
    for number in range(5):
        store.put_image(f"{number}.0", 0, "d1", b"picture")
        store.put_frame(f"{number}.0", 0, "generated", b"turn")
        store.commit()
    newest = store.reader.image_location("d1")
    assert newest is not None
    read_record = SegmentReader.read_record
    unopened = {newest}

    def read_opened(segments: SegmentReader, location: FrameLocation) -> bytes:
        if location in unopened:
            raise StoreError("cannot be read") from OSError(errno.EMFILE, "too many open files")
        return read_record(segments, location)

    monkeypatch.setattr(SegmentReader, "read_record", read_opened)
    assert store.reader.image_file("d1") == b"picture", "older copies can be opened"
    location = newest
    while location := store.reader.image_location("d1", before=location):
        unopened.add(location)
    with pytest.raises(StoreError, match="cannot be read"):
        store.reader.image_file("d1")
    unopened.clear()
    assert not store.reader.damaged_images and store.reader.image_file("d1") == b"picture"
    store.close()


def test_of_several_locations_of_an_image_a_readable_one_is_read(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store._segments.segment_bytes = 1  # a record per segment
    for number in range(5):
        store.put_image(f"{number}.0", 0, "d1", b"picture")
        store.put_frame(f"{number}.0", 0, "generated", b"turn")
        store.commit()
    newest = store.reader.image_location("d1")
    assert newest is not None
    older = store.reader.image_location("d1", before=newest)
    assert older is not None and older.segment < newest.segment

    damage_picture(tmp_path, newest.segment)
    assert store.reader.image_file("d1") == b"picture"
    store.put_image("9.0", 0, "d1", b"picture")
    store.commit()
    rewritten = store.reader.image_location("d1")
    assert rewritten is not None and rewritten.segment > newest.segment

    for segment in (0, older.segment, rewritten.segment):
        damage_picture(tmp_path, segment)
    with pytest.raises(StoreError, match=f"{rewritten.segment:08}.seg: damaged record"):
        store.reader.image_file("d1")
    store.close()


def test_a_restarted_writer_knows_how_old_a_segment_is(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store._segments.segment_bytes = 1
    store.put_image("0.0", 0, "d1", b"picture")
    for number in range(4):
        store.put_frame(f"{number}.0", 0, "generated", b"turn")
        store.commit()
    store.close()

    store = RunStore(tmp_path)
    store.put_image("5.0", 0, "d1", b"picture")
    store.commit()
    place = store.reader.image_location("d1")
    assert place is not None and place.segment == store._segments.newest_segment
    store.close()
