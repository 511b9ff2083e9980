"""The run's journal: one SQLite index (flow, plans, commits, versions) over payload segments.

The coordinator is the only writer. It puts everything that one turn of its loop changed into one transaction,
and sends messages only after it. Others read the run with `reader.RunReader`, at any time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from asyncrl.buffer.batches import Batch
from asyncrl.buffer.records import EpisodeRecord, GroupRecord
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError, open_to_write
from asyncrl.store.segments import SegmentReader, SegmentWriter
from asyncrl.types import PolicyVersion


class RunStore:
    """Owner of `run.db` and `segments/` in a run directory. All that is written becomes durable at the next
    commit(); `read` sees it at once."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._db = open_to_write(run_dir)
        self._db.execute("BEGIN")
        self._segments = SegmentWriter(run_dir / "segments")
        self._written = SegmentReader(run_dir / "segments")
        self.read = RunReader(self._db, self._written)

    def put_frame(self, uid: str, turn: int, kind: str, payload: bytes) -> None:
        """Append the payload of a turn (`kind` generated | replied); a repeat replaces the reference."""
        self._put("frames", (uid, turn, kind, *self._segments.append(payload)))

    def put_groups(self, groups: Collection[GroupRecord], live: dict[int, GroupRecord]) -> None:
        self._put("groups", *((g.id, g.id not in live, msgspec.msgpack.encode(g)) for g in groups))
        self._put("retired", *((group.sample,) for group in groups if group.retires))

    def put_episodes(self, episodes: Iterable[EpisodeRecord]) -> None:
        rows = (
            (e.uid, e.group, e.state.value, e.reason, e.step, e.result.reward, msgspec.msgpack.encode(e))
            for e in episodes
        )
        self._put("episodes", *rows)

    def put_batches(self, batches: Iterable[Batch]) -> None:
        self._put("plans", *((batch.step, msgspec.msgpack.encode(batch)) for batch in batches))

    def put_commit(self, step: int, trainer_epoch: int, plan_hash: str) -> None:
        self._put("commits", (step, trainer_epoch, plan_hash))

    def put_checkpoint(self, step: int, trainer_epoch: int, path: str) -> None:
        self._put("checkpoints", (step, trainer_epoch, path))

    def put_version(self, version: PolicyVersion, path: str) -> None:
        self._put("versions", (*version, path))

    def put_meta(self, key: str, value: str) -> None:
        self._put("meta", (key, value))

    def _put(self, table: str, *rows: tuple[object, ...]) -> None:
        if rows:
            marks = ",".join("?" * len(rows[0]))
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES({marks})", rows)

    def commit(self) -> None:
        """Make everything put so far durable (kill -9 safe)."""
        try:
            self._db.execute("COMMIT")
            self._db.execute("BEGIN")
        except sqlite3.Error as error:
            raise StoreError(f"run.db: {error}; free disk space and resume the run") from error

    def sync(self) -> None:
        """Power-loss safe up to here: called when a checkpoint is recorded."""
        self._segments.sync()
        self.commit()
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.execute("BEGIN")

    def close(self) -> None:
        self._db.execute("COMMIT")
        self.read.close()
        self._segments.close()

    def forget_frames(self, uid: str) -> None:
        """Delete the payloads of an episode that is over and in no plan."""
        self._db.execute("DELETE FROM frames WHERE uid=?", (uid,))

    def forget_plans(self, below: int, rows: int) -> None:
        """A checkpoint covers the batches before `below`, which held `rows` trajectories."""
        self._db.execute("DELETE FROM plans WHERE step<?", (below,))
        self.put_meta("covered", str(int(self.read.meta("covered", "0")) + rows))

    def remove_unused_segments(self) -> None:
        """Delete the segments older than every payload still referred to."""
        (oldest,) = self._db.execute("SELECT min(segment) FROM frames").fetchone()
        self._written.remove_before(self._segments.current if oldest is None else oldest)
