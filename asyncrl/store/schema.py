"""The tables of `run.db`, and the version of the schema. All code that opens the database does so here.

The row of an episode has the values that lists show, where NULL means not known yet, and the record from
which a coordinator continues. The record is older than the row if only state, reason and step have changed
since. Held-out episodes have rows once finished, in groups below 0: -1 - the sample's row. Texts, which few
queries read, are in separate tables.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from threading import Timer

from asyncrl import __version__
from asyncrl.errors import AsyncrlError, ConfigError, disk_full

log = logging.getLogger("asyncrl.store")

DATABASE = "run.db"
# Raise it when a table, a stored struct, or `Sample` changes. Runs of the last two minor versions must stay
# readable (docs/reference/run_directory.md): READABLE_SCHEMAS then keeps their schemas, and all that reads a
# run can do without the new columns and fields. Drop schemas that only older versions wrote. An index needs
# no new version: with another index, or none, all queries return the same, only later.
SCHEMA_VERSION = 18
READABLE_SCHEMAS = frozenset({SCHEMA_VERSION})
TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups(id INTEGER PRIMARY KEY, over INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE retired(sample INTEGER PRIMARY KEY);
CREATE TABLE episodes(
    uid TEXT PRIMARY KEY, group_id INTEGER NOT NULL, member INTEGER NOT NULL, kind TEXT NOT NULL,
    mode TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, step INTEGER, "end" TEXT NOT NULL,
    score REAL, reward REAL, components TEXT, turns INTEGER NOT NULL, tokens INTEGER NOT NULL,
    calls INTEGER NOT NULL, failed_calls INTEGER NOT NULL, failed_tool TEXT NOT NULL, agent TEXT NOT NULL,
    seconds REAL NOT NULL, oldest INTEGER, newest INTEGER, record BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX episodes_group ON episodes(group_id);
CREATE TABLE questions(
    group_id INTEGER PRIMARY KEY, sample INTEGER NOT NULL, source TEXT NOT NULL, question TEXT NOT NULL,
    truth TEXT NOT NULL);
CREATE TABLE answers(uid TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE calls(
    uid TEXT NOT NULL, turn INTEGER NOT NULL, number INTEGER NOT NULL, tool TEXT NOT NULL,
    seconds REAL NOT NULL, failed INTEGER NOT NULL, refused INTEGER NOT NULL, error TEXT NOT NULL,
    PRIMARY KEY(uid, turn, number)) WITHOUT ROWID;
CREATE TABLE frames(
    uid TEXT NOT NULL, turn INTEGER NOT NULL, kind TEXT NOT NULL, segment INTEGER NOT NULL,
    offset INTEGER NOT NULL, spare INTEGER NOT NULL, PRIMARY KEY(uid, turn, kind)) WITHOUT ROWID;
CREATE INDEX frames_segment ON frames(spare, segment);
CREATE INDEX frames_image ON frames(kind, segment, offset) WHERE kind > 'image:' AND kind < 'image;';
CREATE TABLE pruned(state TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE plans(step INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE commits(
    step INTEGER PRIMARY KEY, trainer_epoch INTEGER NOT NULL, plan_hash TEXT NOT NULL);
CREATE TABLE checkpoints(step INTEGER PRIMARY KEY);
CREATE TABLE held_out(uid TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
"""
TABLES += f"PRAGMA user_version={SCHEMA_VERSION};"

WRITER_KEY = "asyncrl"  # key in meta: the version of asyncrl that began the run
RECORD_WRITER = f"INSERT INTO meta VALUES('{WRITER_KEY}', '{__version__}') ON CONFLICT(key) DO NOTHING"
NEXT_OWNER = "INSERT INTO meta VALUES('coordinator_epoch', '1') ON CONFLICT(key) DO UPDATE SET value=value+1"

OPEN_DEADLINE = 60.0  # seconds that opening waits for a locked or full store
RETRY_SECONDS = 0.25  # seconds between two tries to open a store
BUSY_TIMEOUT = 0.25  # seconds that a statement waits for another process's lock
CHECK_SECONDS = 2.0  # seconds spent on looking for damage before a start
RESTORE_ADVICE = "; `asyncrl runs restore NAME` rebuilds run.db from a copy (docs/background/reliability.md)"

# Errors that may pass: a lock of another process; a full disk or quota.
PASSING_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}


class StoreError(AsyncrlError):
    """The run store is damaged or cannot be opened."""


class StorePaused(StoreError):
    """The run store cannot be written now: the disk is full, or another process locks it."""


class SupersededError(StoreError):
    """Another coordinator has taken the run store over."""


def store_error(path: Path, error: sqlite3.Error | OSError) -> StoreError:
    """Translate an error of SQLite or of the disk into the consequence for the run."""
    if isinstance(error, OSError):
        lacks_descriptors = error.errno in (errno.EMFILE, errno.ENFILE)
        will_pass = lacks_descriptors or disk_full(error)
        advice = "raise ulimit -n" if lacks_descriptors else "free disk space"
    else:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind of error
        is_full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        advice = (
            "free disk space"
            if is_full
            else "stop the process that locks the database (lsof run.db), or let the process finish"
        )
        will_pass = code in PASSING_CODES

    if not will_pass:
        return damage_error(path, error)

    return StorePaused(f"{path}: {error}; the run waits until the store is writable; {advice}")


def damage_error(path: Path, error: sqlite3.Error | OSError) -> StoreError:
    """Return the StoreError for an error that does not pass."""
    is_corrupt = getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )
    return StoreError(f"{path}: {error}{RESTORE_ADVICE if is_corrupt else ''}")


def take_over(run_dir: Path) -> tuple[sqlite3.Connection, int]:
    """Return the database of a run, with tables, and the number of the new owner, from 1: until the next
    owner, this owner alone may write. ConfigError for a run of another minor version, StoreError when the
    database cannot be opened, StorePaused when the database could not be written for OPEN_DEADLINE."""
    path = run_dir / DATABASE
    deadline = time.monotonic() + OPEN_DEADLINE
    while True:
        try:
            db = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                db.executescript(f"BEGIN; {TABLES} COMMIT;")
            _check_continuable(db, path)
            db.execute(RECORD_WRITER)
            db.execute(NEXT_OWNER)
            (owner,) = db.execute("SELECT value FROM meta WHERE key='coordinator_epoch'").fetchone()
            return db, int(owner)
        except sqlite3.Error as error:
            failure = store_error(path, error)
            # A restarted coordinator would use up its restarts, so the store is waited for here.
            if not isinstance(failure, StorePaused) or time.monotonic() > deadline:
                raise failure from error

        log.error("%s; trying again", failure)
        time.sleep(RETRY_SECONDS)


def open_to_read(run_dir: Path) -> sqlite3.Connection:
    """Open the database of a running or finished run to read. ConfigError for a schema that this version does
    not read, StoreError when the database cannot be opened."""
    path = run_dir / DATABASE
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"  # as_uri() writes ? and % of the path as %3F and %25
        db = sqlite3.connect(uri, uri=True, isolation_level=None)
        if _schema_of(db) not in READABLE_SCHEMAS:
            raise _other_version_error(db, path, "read the file")
    except sqlite3.Error as error:
        raise damage_error(path, error) from error

    return db


def check_schema(run_dir: Path) -> None:
    """Raise ConfigError when the run in a directory, if any, cannot be continued by this version, or when the
    database is gone, or damaged, as far as a check of CHECK_SECONDS shows."""
    database_path = run_dir / DATABASE
    if not database_path.exists() or not database_path.stat().st_size:
        if (run_dir / "segments").exists():  # without segments the first coordinator ended early
            raise ConfigError(f"{database_path}: missing{RESTORE_ADVICE}")
        return

    with closing(open_to_read(run_dir)) as db:
        interrupt_timer = Timer(CHECK_SECONDS, db.interrupt)
        interrupt_timer.start()
        try:
            (check_result,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            check_result = "ok" if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT else str(error)
        finally:
            interrupt_timer.cancel()
            interrupt_timer.join()

        if check_result != "ok":
            damage = " ".join(check_result.split())
            raise ConfigError(f"{database_path}: damaged ({damage}){RESTORE_ADVICE}")

        try:
            _check_continuable(db, database_path)
        except sqlite3.Error as error:
            raise damage_error(database_path, error) from error


def _check_continuable(db: sqlite3.Connection, path: Path) -> None:
    """Raise ConfigError for a run of another minor version: the meaning of stored data may change between
    minor versions, also where the schema stays."""
    is_same_version = _minor_version(_writer_of(db) or __version__) == _minor_version(__version__)
    if _schema_of(db) != SCHEMA_VERSION or not is_same_version:
        raise _other_version_error(db, path, "continue the run")


def _other_version_error(db: sqlite3.Connection, path: Path, action: str) -> ConfigError:
    writer = ""
    with suppress(sqlite3.Error):  # another kind of database
        writer = _writer_of(db)

    cure = "use the commit of asyncrl that wrote the file"
    if writer and _minor_version(writer) != _minor_version(__version__):
        cure = f'run `pip install "asyncrl=={_minor_version(writer)}.*"`'
    if action == "continue the run":
        cure += ", or start a new run with another name=…"

    return ConfigError(
        f"{path}: written by {f'asyncrl {writer}' if writer else 'a commit before asyncrl 0.1.0'} (schema "
        f"{_schema_of(db)}), so asyncrl {__version__} (schema {SCHEMA_VERSION}) cannot {action}; {cure}"
    )


def _schema_of(db: sqlite3.Connection) -> int:
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    return int(schema)


def _writer_of(db: sqlite3.Connection) -> str:
    """Return the version of asyncrl that began a run; '' for a commit before 0.1.0, which recorded none."""
    rows = db.execute("SELECT value FROM meta WHERE key=?", (WRITER_KEY,)).fetchall()
    return rows[0][0] if rows else ""


def _minor_version(version: str) -> str:
    """Return MAJOR.MINOR of a version."""
    return ".".join(version.split(".")[:2])
