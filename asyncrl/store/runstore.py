"""Writes the run's journal: one SQLite index (flow, plans, commits) over payload segments.

The coordinator is the only writer. What one turn of its loop changes is kept in memory and written by
`commit`, in one transaction; messages leave after it. Others read the run with `reader.RunReader`, always.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from asyncrl.buffer.batches import Batch
from asyncrl.buffer.records import MOST_NAMED, EpisodeRecord, GroupRecord
from asyncrl.errors import UNDECODABLE
from asyncrl.store.copies import Copies
from asyncrl.store.reader import COVERED_TO, FrameKey, RunReader
from asyncrl.store.schema import DATABASE, SupersededError, store_error, take_over
from asyncrl.store.segments import FramePlace, SegmentReader, SegmentWriter, fsync
from asyncrl.types import Sample, ToolReply
from asyncrl.values import in_short

OF_EPISODE = ("episodes", "answers", "calls", "frames")  # tables with rows of one
MEMBERS = "SELECT uid FROM episodes WHERE group_id=?"
MOST_FORGOTTEN = 200  # episodes that one transaction forgets, so that none takes long
log = logging.getLogger("asyncrl.store")

Row = tuple[object, ...]
# In place, and without its index: most of what a turn writes are episodes that were there.
PUT_EPISODE = """INSERT INTO episodes VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT(uid) DO
    UPDATE SET state=excluded.state, reason=excluded.reason, step=excluded.step, "end"=excluded."end",
    score=excluded.score, reward=excluded.reward, components=excluded.components, turns=excluded.turns,
    tokens=excluded.tokens, calls=excluded.calls, failed_calls=excluded.failed_calls,
    failed_tool=excluded.failed_tool, agent=excluded.agent, seconds=excluded.seconds,
    oldest=excluded.oldest, newest=excluded.newest, record=excluded.record"""
MOVE_EPISODE = "UPDATE episodes SET state=?, reason=?, step=? WHERE uid=?"

COVER = """INSERT INTO meta VALUES(?,?) ON CONFLICT(key) DO UPDATE SET
    value=max(CAST(value AS INTEGER), CAST(excluded.value AS INTEGER))"""


class RunStore:
    """Owns `run.db` and `segments/` in a run directory. What is put becomes durable at the next commit();
    `read` sees payloads at once, the rest after it. Opening a store takes it over: from then on an earlier
    owner can write nothing. `epoch` numbers the owners, from 1. `keep_bytes`: see `prune`."""

    def __init__(self, run_dir: Path, keep_bytes: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._keep_bytes = keep_bytes
        self._db, self.epoch = take_over(run_dir)
        self._fsync_index()  # after a power cut the number must not be given again
        self._segments = SegmentWriter(run_dir / "segments")
        self._written = SegmentReader(run_dir / "segments")
        self._statements: list[tuple[str, list[Row]]] = []  # of this turn, in order
        self._frames: dict[FrameKey, bytes] = {}  # payloads of this turn
        self._fresh: set[str] = set()  # the episodes that they are of
        self._released: set[str] = set()  # episodes whose payloads nothing needs any more
        self._places: dict[FrameKey, FramePlace] = {}  # of those that are in a segment already
        self._sync_due = False
        self.pruning = False  # there may be more to forget: each commit forgets some
        self.read = RunReader(self._db, self._written, self._frames)
        self.copies = Copies(run_dir)

    def put_frame(self, uid: str, turn: int, kind: str, payload: bytes) -> None:
        """Store the payload of a turn (`kind` generated | replied), or of the last one the `result` of its
        episode; a repeat replaces the one before."""
        self._frames[uid, turn, kind] = payload
        self._fresh.add(uid)
        self._places.pop((uid, turn, kind), None)

    def put_groups(self, groups: Collection[GroupRecord], live: dict[int, GroupRecord]) -> None:
        self._put("groups", *((g.id, g.id not in live, msgspec.msgpack.encode(g)) for g in groups))
        self._put("retired", *((group.sample,) for group in groups if group.retires))

    def put_episodes(self, episodes: Collection[EpisodeRecord], moved: Iterable[EpisodeRecord] = ()) -> None:
        """Store episodes. `moved`: of these only state, reason and step have changed."""
        self._add(PUT_EPISODE, *(listed(e) for e in episodes))
        self._add(MOVE_EPISODE, *((e.state.value, e.reason, _step(e), e.uid) for e in moved))

    def put_question(self, group: int, sample: Sample) -> None:
        """Store the texts of a group's sample, for lists; `group`: as in the row of an episode."""
        asked = next((said.content for said in reversed(sample.prompt) if said.role == "user"), "")
        texts = sample.data_source, in_short(asked), in_short(_plain(sample.ground_truth))
        self._put("questions", (group, sample.row, *texts))

    def put_answer(self, uid: str, answer: str) -> None:
        if answer:
            self._put("answers", (uid, answer))

    def put_calls(self, uid: str, turn: int, replies: Sequence[ToolReply]) -> None:
        """Store what the tools of a turn did."""
        rows = (
            (uid, turn, number, one.call.name[:MOST_NAMED], one.seconds, one.failed, one.refused,
             in_short(one.error or "", MOST_NAMED))
            for number, one in enumerate(replies)
        )  # fmt: skip
        self._put("calls", *rows)

    def put_batches(self, batches: Iterable[Batch]) -> None:
        self._put("plans", *((batch.step, msgspec.msgpack.encode(batch)) for batch in batches))

    def put_commit(self, step: int, trainer_epoch: int, plan_hash: str) -> None:
        self._put("commits", (step, trainer_epoch, plan_hash))

    def put_checkpoint(self, step: int) -> None:
        self._put("checkpoints", (step,))

    def put_held_out(self, uid: str, record: bytes) -> None:
        """Stores the result of an episode of a validation."""
        self._put("held_out", (uid, record))

    def list_held_out(self, episode: EpisodeRecord, step: int, mode: str) -> None:
        """Lists an episode of a validation that is over; `step`: of the validation."""
        self._add(PUT_EPISODE, listed(episode, -1 - episode.group, step, "held out", mode))

    def forget_held_out(self, prefix: str) -> None:
        """Deletes all of held-out episodes whose uid begins with `prefix`."""
        for table in ("held_out", *OF_EPISODE):
            after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            self._add(f"DELETE FROM {table} WHERE uid>=? AND uid<?", (prefix, after))

    def put_meta(self, key: str, value: str) -> None:
        self._put("meta", (key, value))

    def _put(self, table: str, *rows: Row) -> None:
        if rows:
            marks = ",".join("?" * len(rows[0]))
            self._add(f"INSERT OR REPLACE INTO {table} VALUES({marks})", *rows)

    def _add(self, statement: str, *rows: Row) -> None:
        """Executes the writes; those that follow each other with the same statement go together."""
        if not rows:
            return
        if not self._statements or self._statements[-1][0] != statement:
            self._statements.append((statement, []))
        self._statements[-1][1].extend(rows)

    def forget_frames(self, uid: str, turn: int = 0) -> None:
        """Delete the payloads of an episode, from this turn on."""
        if uid in self._fresh:
            for key in [key for key in self._frames if key[0] == uid and key[1] >= turn]:
                del self._frames[key]
        for table in ("frames", "calls"):
            self._add(f"DELETE FROM {table} WHERE uid=? AND turn>=?", (uid, turn))
        self._add("DELETE FROM answers WHERE uid=?", (uid,))

    def release_frames(self, uid: str) -> None:
        """Release the payloads of an episode: they are kept only as far as `keep_bytes` allows."""
        self._released.add(uid)
        self._add("UPDATE frames SET spare=1 WHERE uid=?", (uid,))

    def forget_plans(self, steps: range, rows: int) -> None:
        """Records batches, which held `rows` trajectories, of which only the commit is known."""
        self._add("DELETE FROM plans WHERE step>=? AND step<?", (steps.start, steps.stop))
        self._count_covered(rows)

    def cover(self, step: int, rows: int) -> None:
        """Record that the oldest retained checkpoint covers the batches before `step`, `rows` trajectories
        more than the one before. What was covered stays so, also where more are kept."""
        self._add(COVER, (COVERED_TO, step))
        self._count_covered(rows)

    def _count_covered(self, rows: int) -> None:
        self._add("INSERT OR IGNORE INTO meta VALUES('covered', '0')", ())
        self._add("UPDATE meta SET value=value+? WHERE key='covered'", (rows,))

    def sync(self) -> None:
        """Let the next commit be power-loss safe, with all before it. From it on, each commit forgets some of
        what need not be kept, while `pruning`."""
        self._sync_due = self.pruning = True

    # -- writing -----------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Make everything put so far durable, in one transaction: kill -9 safe, after `sync` power-loss safe.

        StorePaused: the disk is full, or another process locks the store; nothing was written and nothing is
        lost: call it again. SupersededError: another coordinator has opened the store. StoreError: damaged.
        """
        for key, payload in self._frames.items():
            if key not in self._places:
                self._places[key] = self._segments.append(payload)
        if self._sync_due:
            self._segments.sync()
        oldest: int | None = None
        if self._frames or self._statements or self._sync_due or self.pruning:
            with self._transaction():
                if (epoch := int(self.read.meta("coordinator_epoch", "0"))) != self.epoch:
                    raise SupersededError(
                        f"{self._run_dir / DATABASE}: another coordinator (epoch {epoch}) has taken over "
                        f"from this one (epoch {self.epoch})"
                    )
                for statement, rows in self._statements:
                    self._db.executemany(statement, rows)
                rows = [(*key, *self._places[key], key[0] in self._released) for key in self._frames]
                self._db.executemany("INSERT OR REPLACE INTO frames VALUES(?,?,?,?,?,?)", rows)
                if self.pruning:
                    newest = self._segments.newest
                    covered = self.read.covered
                    oldest = prune(self._db, self._written, newest, self._keep_bytes, covered)
            self._clear()
        if self._sync_due or oldest is not None:
            self._fsync_index()
            self._shorten_log()
            self._sync_due = False
        if oldest is not None:
            self.pruning = self._written.remove_before(oldest)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The only place that begins and commits. What an error interrupts is undone."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise store_error(self._run_dir / DATABASE, error) from error
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _fsync_index(self) -> None:
        """Syncs what was committed to the disk: it is in the write-ahead log until SQLite copies it."""
        fsync(self._run_dir / f"{DATABASE}-wal")
        fsync(self._run_dir)

    def _shorten_log(self) -> None:
        if self.copies.busy:  # it reads what was committed when it began
            if late := self.copies.late:
                log.warning(
                    "%s: a copy has taken %.0f s: is the disk stuck? Its log grows", self._run_dir, late
                )
            return
        try:
            (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            raise store_error(self._run_dir / DATABASE, error) from error
        if busy:
            log.warning("%s: a reader keeps a transaction open: its log grows meanwhile", self._run_dir)

    def rollback(self) -> None:
        """Forget everything put since the last commit."""
        self._clear()
        self._sync_due = False

    def _clear(self) -> None:
        self._statements.clear()
        self._frames.clear()
        self._fresh.clear()
        self._released.clear()
        self._places.clear()

    def close(self) -> None:
        """Close the files. What is not committed is lost."""
        self.copies.wait()
        self.read.close()
        self._segments.close()


def listed(
    e: EpisodeRecord, group: int | None = None, step: int | None = None, kind: str = "train", mode: str = ""
) -> Row:
    """Return the row of an episode in `episodes`."""
    result = e.result
    stats = e.stats
    landed = e.stats.turns > 0
    step = _step(e) if step is None else step
    ended = (result.end.value, result.score, result.reward) if landed else ("", None, None)
    parts = msgspec.json.encode(result.components).decode() if result.components else None
    size = (e.turns, result.tokens, stats.tool_calls, stats.failed) if landed else (e.turns, e.sampled, 0, 0)
    sampled = (e.oldest, e.newest) if e.oldest >= 0 else (None, None)
    return (
        *(e.uid, e.group if group is None else group, e.member, kind),
        *(mode or ("greedy" if e.greedy else "sampled"), e.state.value, e.reason, step, *ended, parts),
        *(*size, e.failed_tool, e.agent, stats.seconds if landed else e.seconds, *sampled),
        msgspec.msgpack.encode(e),
    )


def _step(episode: EpisodeRecord) -> int | None:
    return episode.step + 1 if episode.step >= 0 else None


def _plain(truth: str) -> str:
    """Return a ground truth, which is JSON, as people read it."""
    try:
        return msgspec.json.decode(truth, type=str)
    except UNDECODABLE:
        return truth


# -- retention ---------------------------------------------------------------------------------------------
# Needed are payloads of episodes that are not over, and of batches that the oldest retained checkpoint does
# not cover: a resume reads them. The newest `keep_bytes` of the others are kept for `asyncrl replay` and
# `regrade`. Whole segments go, and with them all payloads of each episode that has one there.

# The results of groups that are over go, once no payload is left of them and no kept plan compares with them.
# The newest group stays: it is the data cursor.
_FORGOTTEN = """
SELECT id FROM groups WHERE over AND id <= ? AND id < (SELECT max(id) FROM groups) AND NOT EXISTS (
    SELECT 1 FROM episodes e WHERE e.group_id = groups.id AND (
        e.step > (SELECT coalesce(min(step), 1 << 60) FROM plans)
        OR EXISTS (SELECT 1 FROM frames f WHERE f.uid = e.uid)))
"""
# Held-out episodes, of this validation and of earlier ones.
_HELD_OUT = """
SELECT uid FROM episodes e WHERE group_id < 0 AND step <= ?
    AND NOT EXISTS (SELECT 1 FROM frames f WHERE f.uid = e.uid)
"""
_COUNTED = """
INSERT INTO pruned SELECT state, count(*) FROM episodes WHERE group_id=? GROUP BY state
ON CONFLICT(state) DO UPDATE SET count = count + excluded.count
"""


def prune(
    db: sqlite3.Connection, segments: SegmentReader, newest: int, keep_bytes: int, covered: int
) -> int | None:
    """In a transaction: forget what is beyond `keep_bytes`, of MOST_FORGOTTEN episodes. A checkpoint covers
    the batches before `covered`, whose plans go with the first of their payloads. Returns None when there may
    be more to forget; else the oldest segment that is still referred to, `newest` if none is: once the
    transaction is durable, those before it can be deleted."""
    (needed,) = db.execute("SELECT min(segment) FROM frames WHERE spare=0").fetchone()
    oldest = segments.oldest_kept(newest if needed is None else needed, keep_bytes)
    old = "SELECT DISTINCT uid FROM frames WHERE spare=1 AND segment < ? LIMIT ?"
    gone = db.execute(old, (oldest, MOST_FORGOTTEN)).fetchall()
    if not gone:
        return oldest
    query = "SELECT group_id, coalesce(step, 0) FROM episodes WHERE uid=?"
    found = [row for uid in gone if (row := db.execute(query, uid).fetchone())]
    steps = [step for group, step in found if group >= 0 and step <= covered]
    db.execute("DELETE FROM plans WHERE step < ?", (max(steps, default=0),))
    db.executemany("DELETE FROM frames WHERE uid=?", gone)
    newest_group = max((group for group, _ in found), default=-1)  # newer groups have newer payloads
    forgotten = db.execute(_FORGOTTEN, (newest_group,)).fetchall()
    db.executemany(_COUNTED, forgotten)
    uids = [uid for group in forgotten for uid in db.execute(MEMBERS, group)]
    if over := [step for group, step in found if group < 0]:
        uids += db.execute(_HELD_OUT, (max(over),)).fetchall()
    for table in OF_EPISODE:
        db.executemany(f"DELETE FROM {table} WHERE uid=?", uids)
    db.executemany("DELETE FROM questions WHERE group_id=?", forgotten)
    db.executemany("DELETE FROM groups WHERE id=?", forgotten)
    return oldest if len(gone) < MOST_FORGOTTEN else None
