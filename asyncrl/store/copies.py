"""Copies of the part of `run.db` that a resume needs, in the run directory, and the restoration of run.db.

With each checkpoint a thread writes `copies/N/run.db`, which has the same tables: live groups, the retained
plans, the episodes of both, commits. Finished episodes are only counted.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread

import msgspec

from asyncrl.buffer.batches import Batch
from asyncrl.buffer.records import State
from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, one_line, recorded
from asyncrl.store.reader import COVERED_TO, RunReader
from asyncrl.store.schema import DATABASE, TABLES, StoreError, check_schema, open_to_read
from asyncrl.store.segments import fsync

log = logging.getLogger("asyncrl.store")

FOLDER = "copies"
KEPT_COPIES = 2
CLOSE_PATIENCE = 60.0  # seconds that closing waits for an unfinished copy; a longer copy is logged
EPOCH_MARGIN = 1_000_000  # more epochs than ever begin between two checkpoints
# The condition of the rows that a copy has, by table.
COPIED_ROWS = {
    **dict.fromkeys(("meta", "retired", "commits", "checkpoints"), ""),
    "plans": f"WHERE step > (SELECT coalesce(max(value + 0), 0) FROM run.meta WHERE key='{COVERED_TO}')",
    "groups": "WHERE NOT over OR id IN needed OR id = (SELECT max(id) FROM run.groups)",
    **dict.fromkeys(("episodes", "questions"), "WHERE group_id IN (SELECT id FROM main.groups)"),
    **dict.fromkeys(("answers", "calls"), "WHERE uid IN (SELECT uid FROM main.episodes)"),
    "frames": "WHERE NOT spare AND uid IN (SELECT uid FROM main.episodes)",
}


class Copies:
    """The copies of a run, for the coordinator. `copy_due`: make a copy after the next transaction."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._thread = Thread()
        self.copy_due = False
        self._copy_began = 0.0

    @property
    def is_copying(self) -> bool:
        return self._thread.is_alive()

    @property
    def overdue_seconds(self) -> float:
        """Return the seconds that the unfinished copy has taken, if more than CLOSE_PATIENCE; else 0."""
        copy_seconds = time.monotonic() - self._copy_began
        return copy_seconds if self.is_copying and copy_seconds > CLOSE_PATIENCE else 0.0

    def wait_for_copy(self) -> None:
        if self.is_copying:
            self._thread.join(CLOSE_PATIENCE)

    def start_copy(self, episode_counts: Mapping[State, int]) -> None:
        """Start a copy of the committed state, if a copy is due. `episode_counts`: the episodes by state.
        Nothing is raised: without room for a copy the run goes on, and the next checkpoint tries again."""
        if not self.copy_due or self.is_copying:
            return

        self.copy_due = False
        folder = self._run_dir / FOLDER
        with recorded() as failure:
            copy_directory = _unfinished_directory(folder)
            copy_directory.mkdir(parents=True)
            db = sqlite3.connect(copy_directory / DATABASE, isolation_level=None, check_same_thread=False)
            db.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {TABLES}")
            db.execute("ATTACH ? AS run", (str(self._run_dir / DATABASE),))
            db.execute("BEGIN")
            # The first read fixes the state that the transaction sees.
            db.execute("SELECT count(*) FROM run.meta").fetchone()

            self._thread = Thread(
                target=_write_copy, args=(db, copy_directory, dict(episode_counts)), name="copy", daemon=True
            )
            self._copy_began = time.monotonic()
            self._thread.start()

        if failure:
            log.error("could not copy %s: %s", self._run_dir / DATABASE, failure.line)


def _write_copy(db: sqlite3.Connection, copy_directory: Path, episode_counts: dict[State, int]) -> None:
    with recorded() as failure:
        with closing(db):
            _fill_copy(db, episode_counts)
        _finish_copy(copy_directory)
        for old_copy in _finished_copies(copy_directory.parent)[KEPT_COPIES:]:
            shutil.rmtree(old_copy)

    if failure:
        log.error("could not copy %s: %s", DATABASE, failure.line)


def _fill_copy(db: sqlite3.Connection, episode_counts: dict[State, int]) -> None:
    plans = db.execute(f"SELECT record FROM run.plans {COPIED_ROWS['plans']}")
    uids = (uid for (plan,) in plans for uid in msgspec.msgpack.decode(plan, type=Batch).planned)
    needed_groups = {(int(uid.partition(".")[0]),) for uid in uids}

    db.execute("CREATE TEMP TABLE needed(id INTEGER PRIMARY KEY)")
    db.executemany("INSERT INTO needed VALUES(?)", needed_groups)
    for table, row_filter in COPIED_ROWS.items():
        db.execute(f"INSERT INTO main.{table} SELECT * FROM run.{table} {row_filter}")

    # Episodes that are not copied are counted as pruned.
    copied_counts = dict(db.execute("SELECT state, count(*) FROM main.episodes GROUP BY state"))
    pruned_counts = [
        (state.value, count - copied_counts.get(state.value, 0)) for state, count in episode_counts.items()
    ]
    db.executemany("INSERT INTO main.pruned VALUES(?,?)", pruned_counts)
    db.execute("COMMIT")


def _finished_copies(folder: Path) -> list[Path]:
    """Return finished copies, newest first."""
    return sorted((path for path in folder.glob("*") if path.name.isdigit()), reverse=True)


def _unfinished_directory(folder: Path) -> Path:
    """Return the directory for a new copy, after deleting leftovers of killed processes: in a container these
    may all have had the same process id."""
    for leftover in folder.glob("new-*"):
        shutil.rmtree(leftover)
    return folder / f"new-{os.getpid()}"


def _finish_copy(unfinished: Path) -> Path:
    """Make a new copy the newest copy, completely or not at all."""
    for written_path in (unfinished / DATABASE, unfinished):
        fsync(written_path)

    finished_copies = _finished_copies(unfinished.parent)
    number = int(finished_copies[0].name) + 1 if finished_copies else 1
    finished_copy = unfinished.with_name(f"{number:06d}")
    os.rename(unfinished, finished_copy)
    fsync(unfinished.parent)
    return finished_copy


def restore_newest(run_dir: Path) -> list[str]:
    """Replace run.db by the newest good copy; return lines that say what is lost. The caller holds the run's
    lock. ConfigError when there is no good copy."""
    database_path = run_dir / DATABASE
    folder = run_dir / FOLDER
    good_copy = next(filter(_is_good, _finished_copies(folder)), None)
    if good_copy is None:
        raise ConfigError(f"{database_path}: no usable copy in {folder}; start a new run with another name=…")

    # The epochs of the restored run are larger than every epoch that was ever used.
    restored_copy = _unfinished_directory(folder)
    shutil.copytree(good_copy, restored_copy)
    with closing(sqlite3.connect(restored_copy / DATABASE)) as db, db:
        for key in ("coordinator_epoch", "trainer_epoch"):
            query = f"SELECT value FROM meta WHERE key='{key}'"
            epoch = EPOCH_MARGIN + max(
                _read_number(run_directory, query) for run_directory in (run_dir, *_finished_copies(folder))
            )
            db.execute("UPDATE meta SET value=? WHERE key=?", (str(epoch), key))

    good_copy = _finish_copy(restored_copy)
    damaged_progress = _progress_of(run_dir)
    damaged_directory = run_dir / f"damaged-{good_copy.name}"
    damaged_directory.mkdir(exist_ok=True)
    new_database = run_dir / f"{DATABASE}.new"
    shutil.copyfile(good_copy / DATABASE, new_database)
    fsync(new_database)
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"):
        with suppress(FileNotFoundError):
            os.replace(run_dir / name, damaged_directory / name)

    os.replace(new_database, database_path)
    fsync(run_dir)

    pruned_episodes = _read_number(run_dir, "SELECT sum(count) FROM pruned")
    return [
        f"{database_path}: restored from {good_copy} ({_progress_of(run_dir)}); the damaged files are in "
        f"{damaged_directory}",
        "lost: everything written after that copy; the readable part of the damaged database has "
        f"{damaged_progress}. Steps after the newest checkpoint are repeated, and episodes issued "
        "since then are sampled again",
        f"lost: the records of finished episodes that were counted but not copied ({pruned_episodes:,})",
        f"lost: payloads of needed episodes: {' '.join(_unreadable_episodes(run_dir)) or 'none'}",
    ]


def _is_good(copy_directory: Path) -> bool:
    """Return True if the database can be read and each issued episode is in exactly one state."""
    try:
        check_schema(copy_directory)
        with closing(RunReader.open(copy_directory)) as reader:
            issued_episodes = reader.load_run().next_group * len(reader.groups()[-1].members)
            return issued_episodes == sum(reader.counts().values())
    except (AsyncrlError, LookupError, *UNDECODABLE) as error:
        log.error("%s: %s", copy_directory, one_line(error))
        return False


def _progress_of(run_dir: Path) -> str:
    steps = _read_number(run_dir, "SELECT max(step) FROM commits")
    return f"{steps} steps and {_read_number(run_dir, 'SELECT max(id) + 1 FROM groups')} groups"


def _read_number(run_dir: Path, query: str) -> int:
    """Read a number from a database; 0 where reading fails."""
    with suppress(AsyncrlError, sqlite3.Error, TypeError, ValueError), closing(open_to_read(run_dir)) as db:
        return int(db.execute(query).fetchone()[0])
    return 0


def _unreadable_episodes(run_dir: Path) -> Iterator[str]:
    """Yield the episodes that a resume needs and of which some turns cannot be read."""
    with closing(RunReader.open(run_dir)) as reader:
        stored_run = reader.load_run()
        live_episodes = (episode for episode in stored_run.episodes if not episode.state.over)
        turn_counts = {
            episode.uid: episode.turns for episode in (*live_episodes, *stored_run.planned_episodes)
        }
        for uid, turns in turn_counts.items():
            with suppress(StoreError):
                if all(list(reader.turn_frames(uid, turns))[::2]):
                    continue
            yield uid
