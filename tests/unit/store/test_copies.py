"""Copies of what a resume needs, and a run whose run.db is made anew from one."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from random import Random
from threading import Event

import msgspec
import pytest

from asyncrl.cli import main
from asyncrl.errors import ConfigError
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import ok
from asyncrl.launch.preflight import check_checkpoint_directory
from asyncrl.launch.run_directory import lock_directory
from asyncrl.store import copies
from asyncrl.store.copies import EPOCH_MARGIN, restore_newest
from asyncrl.store.listing import Listing, episode_page
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError, check_schema
from asyncrl.store.segments import SegmentReader
from tests.fakes.world import damage
from tests.unit.store.test_retention import Coordinator, restored


def copied(run: Coordinator) -> Path:
    """A checkpoint, and the copy that comes with it."""
    run.checkpoint(keep=2)
    run.turn()
    run.store.copies.wait_for_copy()
    return max((run.state.run_dir / "copies").iterdir())


def trained(run_dir: Path, steps: int = 3, seed: int = 0) -> Coordinator:
    """A run with some batches trained, some groups under way."""
    run = Coordinator(run_dir, 1 << 30, Random(seed))
    run.store.put_meta("trainer_epoch", "7")
    while run.buffer.committed < steps:
        run.play()
    return run


def test_a_copy_is_all_that_a_resume_needs_and_counts_the_rest(tmp_path: Path) -> None:
    run = Coordinator(tmp_path, 1 << 30, Random(0))
    smaller = 0
    for _ in range(40):
        run.play()
        if run.random.random() < 0.5 and run.buffer.committed > max(run.trainer.checkpoint_step, 0):
            copy = copied(run)
            with closing(RunReader.open(copy)) as reader, closing(RunReader.open(tmp_path)) as original:
                assert msgspec.msgpack.encode(reader.load_run()) == msgspec.msgpack.encode(
                    original.load_run()
                )
                assert reader.trained_in_plans() == run.buffer.account().trained
                assert reader.counts() == {k: v for k, v in run.buffer.state_counts().items() if v} | {
                    k: 0 for k in reader.counts() if not run.buffer.state_counts()[k]
                }
                buffer, batches = restored(reader)
                assert buffer.account() == run.buffer.account() and batches.by_step == run.batches.by_step
                reader._segments = SegmentReader(tmp_path / "segments")
                needed = {**run.buffer.episodes, **run.batches.planned_episodes}.values()
                for uid in (
                    e.uid for e in needed if not e.state.over or e.uid in run.batches.planned_episodes
                ):
                    if uid in run.sent:
                        assert list(reader.turn_frames(uid, 1)) == [run.sent[uid], b""]
                assert reader.rows("SELECT count(*) FROM frames WHERE spare") == [(0,)]
                count = "SELECT count(*) FROM episodes"
                smaller += reader.rows(count)[0][0] < original.rows(count)[0][0]

    assert smaller and len(list((tmp_path / "copies").iterdir())) == 2
    run.store.close()


def test_a_copy_shows_the_moment_of_its_checkpoint_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.checkpoint(keep=2)
    run.turn()
    flow = run.buffer.account()
    busy = run.store.copies.is_copying
    for _ in range(20):
        run.play()
        run.store.request_sync()

    run.store.copies.wait_for_copy()
    with closing(RunReader.open(tmp_path / "copies" / "000001")) as reader:
        assert restored(reader)[0].account() == flow
    assert busy, "nothing was written meanwhile"
    run.store.close()


def test_a_copy_on_a_stuck_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of run.db cannot be shortened meanwhile."""
    run = trained(tmp_path)
    stuck = Event()
    monkeypatch.setattr(copies, "_fill_copy", lambda db, counts: stuck.wait(60))
    run.checkpoint(keep=2)
    run.turn()
    run.store.request_sync()
    run.store.commit()
    assert not caplog.text
    monkeypatch.setattr(copies, "CLOSE_PATIENCE", 0.0)
    run.store.request_sync()
    run.store.commit()
    assert re.search(
        r"a copy has been running for \d+ s while the write-ahead log grows; check the disk", caplog.text
    )
    stuck.set()
    run.store.copies._thread.join(60)
    assert not run.store.copies.overdue_seconds
    run.store.close()


def test_where_no_copy_can_be_made_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path)
    (tmp_path / "copies").write_text("in the way")
    run.checkpoint(keep=2)
    run.turn()
    assert "could not copy" in caplog.text and run.trainer.checkpoint_step == 3
    (tmp_path / "copies").unlink()
    run.play()
    while run.buffer.committed < 4:
        run.play()
    assert copied(run).name == "000001"
    run.store.close()


def test_a_damaged_database_is_found_before_the_start_and_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "t"
    run = trained(run_dir)
    copied(run)
    at_copy = run.buffer.account()
    epoch = run.store.epoch
    while run.buffer.committed < 5:
        run.play()
    run.store.close()
    (run_dir / "config.yaml").touch()
    check_schema(run_dir)
    damage(run_dir / "run.db")
    with pytest.raises(ConfigError, match=r"damaged .*; `asyncrl runs restore NAME` .*reliability\.md"):
        check_schema(run_dir)
    for path in (run_dir / "segments").iterdir():
        path.write_bytes(b"")
    restoring = ["runs", "restore", "t", "--run-dir", str(tmp_path)]
    with lock_directory(run_dir, "run_dir"):
        assert main(restoring) == 2 and "another run with this name" in capsys.readouterr().err
    assert main(restoring) == 0
    output = capsys.readouterr().out
    assert "3 steps and" in output and f"{at_copy.issued // 2} groups); the damaged files" in output, output
    assert len(list(run_dir.glob("damaged-*/run.db"))) == 1
    again = Coordinator(run_dir, 1 << 30, Random(0))
    assert again.buffer.account() == at_copy and again.store.epoch == epoch + EPOCH_MARGIN + 1
    listed = episode_page(
        again.store.reader, Listing.of('[["state","=","landed"],["state","=","ready"]]', "", "", "")
    )
    assert listed and all(episode["answer"] == f"answer {episode['uid']}" for episode in listed)
    assert {(episode["question"], episode["truth"], episode["sample"]) for episode in listed} == {
        ("how many?", "a lot", 7)
    }
    assert again.store.reader.meta("trainer_epoch") == str(7 + EPOCH_MARGIN)
    needed = {e.uid for e in again.buffer.episodes.values() if e.turns and not e.state.over}
    named = output.partition("lost: payloads of needed episodes: ")[2].splitlines()[0].split()
    assert needed and set(named) == needed | again.batches.planned_episodes.keys()
    again.store.close()
    damage(run_dir / "run.db")
    restore_newest(run_dir)  # once more, with no copy since
    third = Coordinator(run_dir, 1 << 30, Random(0))
    assert third.store.epoch > again.store.epoch + 1000
    third.store.close()


def test_the_older_copy_is_used_where_the_newest_is_damaged_and_without_any_it_is_said(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path)
    copied(run)
    first = run.buffer.account()
    while run.buffer.committed < 5:
        run.play()
    newest = copied(run)
    run.store.close()
    damage(newest / "run.db")
    damage(tmp_path / "run.db")
    assert f"{first.issued // 2} groups" in restore_newest(tmp_path)[0]
    again = Coordinator(tmp_path, 1 << 30, Random(0))
    assert again.buffer.account() == first
    again.store.close()
    for path in (tmp_path / "copies").iterdir():
        damage(path / "run.db")
    before = (tmp_path / "run.db").read_bytes()
    with pytest.raises(ConfigError, match="no usable copy"):
        restore_newest(tmp_path)
    assert (tmp_path / "run.db").read_bytes() == before


@pytest.mark.parametrize("left", [None, b""])
def test_a_database_that_is_gone_is_said_before_the_start(tmp_path: Path, left: bytes | None) -> None:
    run = trained(tmp_path)
    copied(run)
    run.store.close()
    for path in tmp_path.glob("run.db*"):
        path.unlink()
    if left is not None:
        (tmp_path / "run.db").write_bytes(left)
    with pytest.raises(ConfigError, match="missing; `asyncrl runs restore NAME`"):
        check_schema(tmp_path)
    restore_newest(tmp_path)
    check_schema(tmp_path)


def test_checkpoints_that_are_gone_are_said_before_the_start(tmp_path: Path) -> None:
    run = trained(tmp_path / "t")
    config = msgspec.structs.replace(run.state.config, run_dir=str(tmp_path))
    assert list(check_checkpoint_directory(Inputs(config))) == [ok("in the run directory")]
    run.checkpoint(keep=2)
    run.turn()
    warnings, _ = check_checkpoint_directory(Inputs(config))
    assert "(up to step 3) are missing" in warnings.text and "repeated from their plans" in warnings.text
    assert warnings.level == "warning"
    while run.buffer.committed < 6:
        run.play()
    run.checkpoint(keep=2)
    run.forget()
    with pytest.raises(ConfigError, match=r"\(up to step 6\) are missing; restore these files"):
        list(check_checkpoint_directory(Inputs(config)))
    checkpoint_directory = tmp_path / "t" / "checkpoints" / "step-3"
    checkpoint_directory.mkdir(parents=True)
    (checkpoint_directory / "manifest.json").touch()
    assert list(check_checkpoint_directory(Inputs(config))) == [ok("in the run directory")]
    run.store.close()


def test_an_error_of_a_damaged_database_names_the_way_on(tmp_path: Path) -> None:
    run = trained(tmp_path, steps=20)
    run.store.request_sync()
    run.store._shorten_log()
    run.store.close()
    damage(tmp_path / "run.db")

    with (
        pytest.raises(StoreError, match="malformed; `asyncrl runs restore"),
        closing(RunReader.open(tmp_path)) as reader,
    ):
        reader.load_run()


@pytest.mark.parametrize("killed_in", ["copytree", "rename"])
def test_a_restoration_that_is_killed_while_it_copies_is_begun_again_by_the_same_process_id(
    tmp_path: Path, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where each command is process 1."""
    run = trained(tmp_path)
    copied(run)
    flow = run.buffer.account()
    run.store.close()
    module = shutil if killed_in == "copytree" else os
    act = getattr(module, killed_in)

    def killed(source: Path, target: Path) -> None:
        if killed_in == "copytree":
            act(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            restore_newest(tmp_path)

    assert list((tmp_path / "copies").glob("new-*"))
    restore_newest(tmp_path)
    assert not list((tmp_path / "copies").glob("new-*"))
    again = Coordinator(tmp_path, 1 << 30, Random(0))
    assert again.buffer.account() == flow
    again.store.close()


@pytest.mark.parametrize("calls", range(1, 5))
def test_a_restoration_that_was_killed_is_begun_again(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was: a log that is not of this database would be taken for its own."""
    run = trained(tmp_path)
    copied(run)
    flow = run.buffer.account()
    replace = os.replace
    left = iter(range(1, calls))
    run.play()
    for name in ("wal", "shm"):
        (tmp_path / f"run.db-{name}.kept").write_bytes((tmp_path / f"run.db-{name}").read_bytes())
    run.store.close()
    for name in ("wal", "shm"):  # as after kill -9
        replace(tmp_path / f"run.db-{name}.kept", tmp_path / f"run.db-{name}")

    def killed(old: Path, new: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            restore_newest(tmp_path)

    assert (tmp_path / "run.db").exists() == (calls == 1)
    restore_newest(tmp_path)
    again = Coordinator(tmp_path, 1 << 30, Random(0))
    assert again.buffer.account() == flow
    again.store.close()
