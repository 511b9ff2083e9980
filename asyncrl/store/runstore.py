"""The run's journal: one SQLite index (flow, plans, commits, versions) over payload segments.

One writer (the coordinator) puts everything that one turn of its loop changed into one transaction and
answers peers only afterwards. Readers (viewers, audits) may open `run.db` beside it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from asyncrl.buffer.batches import Baseline, Batch
from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.store.segments import FramePlace, Segments, StoreError
from asyncrl.types import NO_VERSION, PolicyVersion

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups(id INTEGER PRIMARY KEY, over INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS retired(row INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS episodes(
    uid TEXT PRIMARY KEY, group_id INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    step INTEGER NOT NULL, reward REAL NOT NULL, record BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS episodes_group ON episodes(group_id);
CREATE TABLE IF NOT EXISTS frames(
    uid TEXT NOT NULL, turn INTEGER NOT NULL, kind TEXT NOT NULL, segment INTEGER NOT NULL,
    offset INTEGER NOT NULL, PRIMARY KEY(uid, turn, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans(step INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS commits(
    step INTEGER PRIMARY KEY, trainer_epoch INTEGER NOT NULL, plan_hash TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints(
    step INTEGER PRIMARY KEY, trainer_epoch INTEGER NOT NULL, path TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions(
    epoch INTEGER NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL,
    PRIMARY KEY(epoch, step)) WITHOUT ROWID;
"""


class StoredRun(msgspec.Struct):
    """What a store holds, for a coordinator that starts on it."""

    groups: list[GroupRecord]
    episodes: list[EpisodeRecord]
    left: dict[State, int]
    next_group: int
    cursor: int
    retired: set[int]
    batches: list[Batch]
    taken: list[EpisodeRecord]  # rows of the plans, those that were trained included
    baselines: dict[int, Baseline]  # of their groups
    committed: int


class RunStore:
    """Owner of `run.db` and `segments/` in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.segments = Segments(run_dir / "segments")
        self._frames: dict[str, dict[tuple[int, str], FramePlace]] = {}
        try:
            self._db = sqlite3.connect(run_dir / "run.db", isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
            self._db.execute("BEGIN")
        except sqlite3.Error as error:
            raise StoreError(f"{run_dir / 'run.db'}: {error}") from error

    # -- writing: all of it becomes durable at the next commit() ---------------------------------------

    def put_frame(self, uid: str, turn: int, kind: str, payload: bytes) -> None:
        """Append the payload of a turn (`kind` generated | replied); a repeat replaces the reference."""
        place = self.segments.append(payload)
        self._frames.setdefault(uid, {})[(turn, kind)] = place
        self._db.execute(
            "INSERT OR REPLACE INTO frames VALUES(?,?,?,?,?)", (uid, turn, kind, place.segment, place.offset)
        )

    def put_groups(self, groups: Collection[GroupRecord], live: dict[int, GroupRecord]) -> None:
        rows = [(group.id, group.id not in live, msgspec.msgpack.encode(group)) for group in groups]
        self._db.executemany("INSERT OR REPLACE INTO groups VALUES(?,?,?)", rows)
        retired = [(group.row,) for group in groups if group.retires]
        self._db.executemany("INSERT OR IGNORE INTO retired VALUES(?)", retired)

    def put_episodes(self, episodes: Iterable[EpisodeRecord]) -> None:
        rows = [
            (e.uid, e.group, e.state.value, e.reason, e.step, e.result.reward, msgspec.msgpack.encode(e))
            for e in episodes
        ]
        self._db.executemany("INSERT OR REPLACE INTO episodes VALUES(?,?,?,?,?,?,?)", rows)

    def put_batches(self, batches: Iterable[Batch]) -> None:
        rows = [(batch.step, msgspec.msgpack.encode(batch)) for batch in batches]
        self._db.executemany("INSERT OR REPLACE INTO plans VALUES(?,?)", rows)

    def put_commit(self, step: int, trainer_epoch: int, plan_hash: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO commits VALUES(?,?,?)", (step, trainer_epoch, plan_hash))

    def put_checkpoint(self, step: int, trainer_epoch: int, path: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES(?,?,?)", (step, trainer_epoch, path))

    def put_version(self, version: PolicyVersion, path: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO versions VALUES(?,?,?)", (*version, path))

    def put_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, value))

    def commit(self) -> None:
        """Make everything put so far durable (kill -9 safe)."""
        try:
            self._db.execute("COMMIT")
            self._db.execute("BEGIN")
        except sqlite3.Error as error:
            raise StoreError(f"run.db: {error}; free disk space and resume the run") from error

    def sync(self) -> None:
        """Power-loss safe up to here: called when a checkpoint is recorded."""
        self.segments.sync()
        self.commit()
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.execute("BEGIN")

    def close(self) -> None:
        self._db.execute("COMMIT")
        self._db.close()
        self.segments.close()

    # -- reading ---------------------------------------------------------------------------------------

    def meta(self, key: str, default: str = "") -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row[0] if row else default

    def frames(self, uid: str, turns: int) -> list[bytes]:
        """Generated and replied payloads of the first `turns` turns; b'' where a turn has no replies."""
        places = self._frames.get(uid, {})
        return [
            self.segments.read(places[turn, kind]) if (turn, kind) in places else b""
            for turn in range(turns)
            for kind in ("generated", "replied")
        ]

    def plan_hash(self, step: int) -> str | None:
        row = self._db.execute("SELECT plan_hash FROM commits WHERE step=?", (step,)).fetchone()
        return row[0] if row else None

    def checkpoints(self) -> list[int]:
        """Steps of all checkpoints ever recorded."""
        return [step for (step,) in self._db.execute("SELECT step FROM checkpoints ORDER BY step")]

    def newest_version(self) -> tuple[PolicyVersion, str]:
        """The newest published version and where it was put; NO_VERSION and "" before there is one."""
        found = self._db.execute("SELECT * FROM versions ORDER BY epoch DESC, step DESC LIMIT 1").fetchone()
        return (PolicyVersion(*found[:2]), found[2]) if found else (NO_VERSION, "")

    def counts(self) -> dict[State, int]:
        """Episodes by state, from the index alone: the audit's second opinion."""
        return {
            State(s): n for s, n in self._db.execute("SELECT state, count(*) FROM episodes GROUP BY state")
        }

    def trained_in_plans(self) -> int:
        """Trajectories in committed batches, from the plans still kept plus the count of those forgotten."""
        committed = {step - 1 for (step,) in self._db.execute("SELECT step FROM commits")}
        kept = (
            msgspec.msgpack.decode(r, type=Batch) for (r,) in self._db.execute("SELECT record FROM plans")
        )
        return int(self.meta("covered", "0")) + sum(len(b.uids) for b in kept if b.step in committed)

    def load(self) -> StoredRun:
        """Everything a coordinator needs to go on from here."""
        groups = self._records("SELECT record FROM groups WHERE over=0", GroupRecord)
        last = self._records("SELECT record FROM groups ORDER BY id DESC LIMIT 1", GroupRecord)
        batches = self._records("SELECT record FROM plans ORDER BY step", Batch)
        episodes = self._records(
            "SELECT e.record FROM episodes e JOIN groups g ON g.id=e.group_id WHERE g.over=0", EpisodeRecord
        )
        live = {episode.uid for episode in episodes}
        planned = {uid for batch in batches for uid in batch.uids}
        taken = [self._episode(uid) for uid in sorted(planned)]
        left = dict(self.counts())
        for episode in episodes:
            left[episode.state] -= 1
        self._load_frames(live | planned)
        return StoredRun(
            groups=groups,
            episodes=episodes,
            left=left,
            next_group=last[0].id + 1 if last else 0,
            cursor=last[0].position + 1 if last else 0,
            retired={row for (row,) in self._db.execute("SELECT row FROM retired")},
            batches=batches,
            taken=taken,
            baselines={group: self._baseline(group) for group in {episode.group for episode in taken}},
            committed=self._number("SELECT coalesce(max(step), 0) FROM commits"),
        )

    def _load_frames(self, uids: set[str]) -> None:
        self._frames = {}
        for uid, turn, kind, segment, offset in self._db.execute("SELECT * FROM frames"):
            if uid in uids:
                self._frames.setdefault(uid, {})[turn, kind] = FramePlace(segment, offset)

    def _episode(self, uid: str) -> EpisodeRecord:
        return self._records(f"SELECT record FROM episodes WHERE uid='{uid}'", EpisodeRecord)[0]

    def _baseline(self, group: int) -> Baseline:
        """Told by the records of the group, so that a plan need not hold it."""
        members = self._records(f"SELECT record FROM episodes WHERE group_id={group}", EpisodeRecord)
        (of,) = self._records(f"SELECT record FROM groups WHERE id={group}", GroupRecord)
        return Baseline.of(of, {episode.uid: episode for episode in members})

    def _records(self, query: str, kind: type) -> list:
        return [msgspec.msgpack.decode(record, type=kind) for (record,) in self._db.execute(query)]

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    # -- retention -------------------------------------------------------------------------------------

    def forget_frames(self, uid: str) -> None:
        """The episode is over and no plan needs it: its payloads may go."""
        if self._frames.pop(uid, None) is not None:
            self._db.execute("DELETE FROM frames WHERE uid=?", (uid,))

    def forget_plans(self, below: int, rows: int) -> None:
        """A checkpoint covers the batches before `below`, which held `rows` trajectories."""
        self._db.execute("DELETE FROM plans WHERE step<?", (below,))
        self.put_meta("covered", str(int(self.meta("covered", "0")) + rows))

    def remove_unused_segments(self) -> None:
        """Delete the segments older than every payload still referred to."""
        oldest = min(
            (p.segment for places in self._frames.values() for p in places.values()), default=1 << 60
        )
        self.segments.remove_before(oldest)
